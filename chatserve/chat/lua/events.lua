-- Every event after a number, if all of them are still there.
--
-- KEYS  1 session  2 events
-- ARGV  1 after
-- Returns nil where the range is not whole or there is no such session, else {sizes, body}, as load.lua has them: for each
-- event, the first of which is number after + 1, three parts: of a delta its place, its text and nothing; of any other event
-- nothing, nothing and its payload.

local state = redis.call('HMGET', KEYS[1], 'seq', 'record')
if not state[2] then
  return false
end
local num_missing = tonumber(state[1]) - tonumber(ARGV[1])
if num_missing < 0 then
  return false
end
local found = {}
if num_missing > 0 then
  found = redis.call('XRANGE', KEYS[2], string.format('%.0f-0', ARGV[1] + 1), '+')
end
if #found ~= num_missing then
  return false
end
local sizes, body = {}, {}
for i, entry in ipairs(found) do
  local fields = entry[2]
  if fields[1] == 'delta' then
    sizes[i] = struct.pack('<I4I4I4', #fields[2], #fields[4], 0)
    body[i] = fields[2] .. fields[4]
  else
    sizes[i] = struct.pack('<I4I4I4', 0, 0, #fields[2])
    body[i] = fields[2]
  end
end
return {table.concat(sizes), table.concat(body)}
