-- Do something with a key while it has the value that the caller knows of.
--
-- KEYS  1 the one that has the value  2 the one that something is done with, where it is another
-- ARGV  1 the value  2 a command on that key  3... what else the command is given
-- Returns the command's reply | nil where the value is another

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return false
end
return redis.call(ARGV[2], KEYS[2] or KEYS[1], unpack(ARGV, 3))
