-- Texts of a session's messages, in order, about as many bytes at a time as the caller wants to hold.
--
-- KEYS  1 order  2 texts  3 generating
-- ARGV  1 live text prefix  2 after (place in the order, 0 at the start)  3 most bytes; the text that passes it is the last
-- Returns {place of the last text, or -1 at the end, text ...}.

local most = tonumber(ARGV[3])
local found, size, place = {-1}, 0, ARGV[2]
while true do
  local messages = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. place, '+inf', 'WITHSCORES', 'LIMIT', 0, 100)
  for i = 1, #messages, 2 do
    local message = messages[i]
    local text = redis.call('HGET', KEYS[2], message) or ''
    if redis.call('HEXISTS', KEYS[3], message) == 1 then
      text = text .. (redis.call('GET', ARGV[1] .. message) or '')
    end
    table.insert(found, text)
    size = size + #text
    place = messages[i + 1]
    if size >= most then
      found[1] = tonumber(place)
      return found
    end
  end
  if #messages < 200 then
    return found
  end
end
