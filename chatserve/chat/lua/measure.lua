-- What a session takes, for its quota: counted anew, for sessions that were stored before there were quotas.
--
-- KEYS  1 session  2 metas  3 texts  4 tokens  5 generating
-- Returns {bytes, number of answers being generated}

local size = redis.call('HSTRLEN', KEYS[1], 'record')
for i = 2, 4 do
  for _, value in ipairs(redis.call('HVALS', KEYS[i])) do
    size = size + #value
  end
end
redis.call('HSET', KEYS[1], 'bytes', size)
return {size, redis.call('HLEN', KEYS[5])}
