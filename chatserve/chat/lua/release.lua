-- Give a session's lease back.
--
-- KEYS  1 session  2 generating  3 log  4 tail
-- ARGV  1 fence  2 the last number that was ever shown, where the store has lost events, else 0

if redis.call('HGET', KEYS[1], 'fence') == ARGV[1] then
  fold(KEYS[1], KEYS[2], KEYS[3], KEYS[4])
  redis.call('HSET', KEYS[1], 'owner', '')
  if tonumber(redis.call('HGET', KEYS[1], 'seq') or 0) < tonumber(ARGV[2]) then
    -- Numbers are not used again, and whoever knows the lost ones finds that there is a hole, and starts afresh.
    redis.call('HSET', KEYS[1], 'seq', string.format('%.0f', ARGV[2] + 1))
  end
end
return 1
