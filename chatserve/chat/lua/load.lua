-- A whole session as of one moment.
--
-- KEYS  1 session  2 metas  3 texts  4 tokens  5 order  6 generating  7 log  8 tail
-- Returns nil where there is no such session, else {seq, fence, record, sizes, body, states, chunks}: for each message in order
-- its meta, and its text and token ids as they were put. They stand one after another in body, their sizes as little-endian
-- uint32 in sizes, because a client takes far longer to read many small replies than to cut a large one. Then the messages
-- that are being generated, each with its state, and the chunks in which their deltas are.

local state = redis.call('HMGET', KEYS[1], 'seq', 'record', 'fence')
if not state[2] then
  return false
end

local sizes, body = {}, {}
local order = redis.call('ZRANGE', KEYS[5], 0, -1)
-- By the hundred: a call a message is several times slower, and unpack has its limits.
for first = 1, #order, 100 do
  local some = {unpack(order, first, math.min(first + 99, #order))}
  local metas = redis.call('HMGET', KEYS[2], unpack(some))
  local texts = redis.call('HMGET', KEYS[3], unpack(some))
  local tokens = redis.call('HMGET', KEYS[4], unpack(some))
  for i = 1, #some do
    local meta, text, token_ids = metas[i], texts[i] or '', tokens[i] or ''
    sizes[#sizes + 1] = struct.pack('<I4I4I4', #meta, #text, #token_ids)
    body[#body + 1] = meta
    body[#body + 1] = text
    body[#body + 1] = token_ids
  end
end

local states, chunks = redis.call('HGETALL', KEYS[6]), {}
local tail = redis.call('GET', KEYS[8])
local since = math.huge
for i = 2, #states, 2 do
  since = math.min(since, tonumber(string.match(states[i], '%d+$')))
end
if #states > 0 then
  for _, entry in ipairs(redis.call('XRANGE', KEYS[7], id_of(since), '+')) do
    if entry[2][1] == 'deltas' then
      chunks[#chunks + 1] = entry[2][2]
    end
  end
  chunks[#chunks + 1] = tail or nil
end
local seq, fence = seq_of(state[1], tail), tonumber(state[3] or 0)
return {seq, fence, state[2], table.concat(sizes), table.concat(body), states, chunks}
