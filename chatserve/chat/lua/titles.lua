-- What a list shows of sessions beside their ids.
--
-- KEYS  of each: session, order
-- Returns for each {title, number of messages}, or nil where it was deleted meanwhile.

local found = {}
for i = 1, #KEYS, 2 do
  local title = redis.call('HGET', KEYS[i], 'title')
  found[#found + 1] = title and {title, redis.call('ZCARD', KEYS[i + 1])}
end
return found
