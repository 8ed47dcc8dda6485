-- A whole session as of one moment.
--
-- KEYS  1 session  2 metas  3 texts  4 tokens  5 order  6 generating
-- ARGV  1 live text prefix  2 live tokens prefix
-- Returns nil where there is no such session, else {seq, fence, record, sizes, body}: for each message in order its meta, text and
-- token ids. They stand one after another in body, their sizes as little-endian uint32 in sizes, because a client takes far
-- longer to read many small replies than to cut a large one.

local state = redis.call('HMGET', KEYS[1], 'seq', 'record', 'fence')
if not state[2] then
  return false
end
local live = {}
for _, message in ipairs(redis.call('HKEYS', KEYS[6])) do
  live[message] = true
end

local sizes, body = {}, {}
local order = redis.call('ZRANGE', KEYS[5], 0, -1)
-- By the hundred: a call a message is several times slower, and unpack has its limits.
for first = 1, #order, 100 do
  local chunk = {unpack(order, first, math.min(first + 99, #order))}
  local metas = redis.call('HMGET', KEYS[2], unpack(chunk))
  local texts = redis.call('HMGET', KEYS[3], unpack(chunk))
  local tokens = redis.call('HMGET', KEYS[4], unpack(chunk))
  for i, message in ipairs(chunk) do
    local meta, text, token_ids = metas[i], texts[i] or '', tokens[i] or ''
    if live[message] then
      text = text .. (redis.call('GET', ARGV[1] .. message) or '')
      token_ids = token_ids .. (redis.call('GET', ARGV[2] .. message) or '')
    end
    sizes[#sizes + 1] = struct.pack('<I4I4I4', #meta, #text, #token_ids)
    body[#body + 1] = meta
    body[#body + 1] = text
    body[#body + 1] = token_ids
  end
end
return {tonumber(state[1]), tonumber(state[3] or 0), state[2], table.concat(sizes), table.concat(body)}
