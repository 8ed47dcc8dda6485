-- Say that a process is alive, unless another one has its place.
--
-- KEYS  1 worker
-- ARGV  1 nonce  2 time to live, in ms
-- Returns 1, or 0 where the place is another's.

local present = redis.call('GET', KEYS[1])
if present and present ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
