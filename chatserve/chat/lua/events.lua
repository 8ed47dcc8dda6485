-- Every event after a number, if all of them are still there.
--
-- KEYS  1 session  2 log  3 tail
-- ARGV  1 after
-- Returns nil where the range is not whole or there is no such session, else {sizes, body}, as load.lua has them: for each
-- event or chunk of deltas, three parts: the chunk, nothing, and the payload of an event that is no delta. A chunk may
-- begin before the range.

local state = redis.call('HMGET', KEYS[1], 'seq', 'record')
if not state[2] then
  return false
end
local tail, after = redis.call('GET', KEYS[3]), tonumber(ARGV[1])
local num_missing = seq_of(state[1], tail) - after
if num_missing < 0 then
  return false
end
local sizes, body, num_found = {}, {}, 0
local function add(chunk, payload)
  sizes[#sizes + 1] = struct.pack('<I4I4I4', #chunk, 0, #payload)
  body[#body + 1] = chunk .. payload
  if chunk == '' then
    num_found = num_found + 1
  else
    num_found = num_found + delta_before(chunk, #chunk) - math.max(head_of(chunk) - 1, after)
  end
end
if num_missing > 0 then
  for _, entry in ipairs(redis.call('XRANGE', KEYS[2], id_of(after + 1), '+')) do
    local kind, content = unpack(entry[2])
    if kind == 'deltas' then
      add(content, '')
    else
      add('', content)
    end
  end
  if tail then
    add(tail, '')
  end
end
if num_found ~= num_missing then
  return false
end
return {table.concat(sizes), table.concat(body)}
