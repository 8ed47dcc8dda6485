-- A whole session as of one moment.
--
-- KEYS  1 session  2 metas  3 texts  4 tokens  5 order  6 generating
-- ARGV  1 live text prefix  2 live tokens prefix
-- Returns nil where there is no such session, else {seq, record, sizes, body}: for each message in order its meta, text and
-- token ids. They stand one after another in body, their sizes as little-endian uint32 in sizes, because a client takes far
-- longer to read many small replies than to cut a large one.

local state = redis.call('HMGET', KEYS[1], 'seq', 'record')
if not state[2] then
  return false
end
local live = {}
for _, message in ipairs(redis.call('HKEYS', KEYS[6])) do
  live[message] = true
end
local sizes, body = {}, {}
for _, message in ipairs(redis.call('ZRANGE', KEYS[5], 0, -1)) do
  local meta = redis.call('HGET', KEYS[2], message)
  local text = redis.call('HGET', KEYS[3], message) or ''
  local tokens = redis.call('HGET', KEYS[4], message) or ''
  if live[message] then
    text = text .. (redis.call('GET', ARGV[1] .. message) or '')
    tokens = tokens .. (redis.call('GET', ARGV[2] .. message) or '')
  end
  sizes[#sizes + 1] = struct.pack('<I4I4I4', #meta, #text, #tokens)
  body[#body + 1] = meta
  body[#body + 1] = text
  body[#body + 1] = tokens
end
return {tonumber(state[1]), state[2], table.concat(sizes), table.concat(body)}
