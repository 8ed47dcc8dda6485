-- Give a session's lease back.
--
-- KEYS  1 session
-- ARGV  1 fence  2 the last number that was ever shown, where the store has lost events, else 0

local state = redis.call('HMGET', KEYS[1], 'fence', 'seq')
if state[1] == ARGV[1] then
  redis.call('HSET', KEYS[1], 'owner', '')
  if tonumber(state[2]) < tonumber(ARGV[2]) then
    -- Numbers are not used again, and whoever knows the lost ones finds that there is a hole, and starts afresh.
    redis.call('HSET', KEYS[1], 'seq', string.format('%.0f', ARGV[2] + 1))
  end
end
return 1
