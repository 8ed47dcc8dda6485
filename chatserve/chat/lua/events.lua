-- Every event after a number, if all of them are still there.
--
-- KEYS  1 session  2 events
-- ARGV  1 after
-- Returns nil where the range is not whole or there is no such session, else a list of each event's fields, the first of
-- which is number after + 1.

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
  for _, entry in ipairs(redis.call('XRANGE', KEYS[2], string.format('%.0f-0', ARGV[1] + 1), '+')) do
    table.insert(found, entry[2])
  end
end
if #found ~= num_missing then
  return false
end
return found
