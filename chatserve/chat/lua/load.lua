-- A whole session as of one moment.
--
-- KEYS  1 session  2 metas  3 texts  4 tokens  5 order  6 generating
-- ARGV  1 live text prefix  2 live tokens prefix
-- Returns nil where there is no such session, else {seq, record, message ids in order, metas, texts, tokens, live texts,
-- live tokens}; the last five are flat lists of message id and value.

local state = redis.call('HMGET', KEYS[1], 'seq', 'record')
if not state[2] then
  return false
end
local live_texts, live_tokens = {}, {}
for _, message in ipairs(redis.call('HKEYS', KEYS[6])) do
  local text = redis.call('GET', ARGV[1] .. message)
  if text then
    table.insert(live_texts, message)
    table.insert(live_texts, text)
  end
  local tokens = redis.call('GET', ARGV[2] .. message)
  if tokens then
    table.insert(live_tokens, message)
    table.insert(live_tokens, tokens)
  end
end
return {
  tonumber(state[1]),
  state[2],
  redis.call('ZRANGE', KEYS[5], 0, -1),
  redis.call('HGETALL', KEYS[2]),
  redis.call('HGETALL', KEYS[3]),
  redis.call('HGETALL', KEYS[4]),
  live_texts,
  live_tokens,
}
