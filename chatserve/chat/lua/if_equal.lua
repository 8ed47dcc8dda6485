-- Do something with a key while it has the value that the caller knows of.
--
-- KEYS  1 any
-- ARGV  1 the value  2 a command on the key  3... what else the command is given
-- Returns the command's reply | nil where the value is another

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return false
end
return redis.call(ARGV[2], KEYS[1], unpack(ARGV, 3))
