-- Give a session's lease back.
--
-- KEYS  1 session
-- ARGV  1 fence

if redis.call('HGET', KEYS[1], 'fence') == ARGV[1] then
  redis.call('HSET', KEYS[1], 'owner', '')
end
return 1
