-- Texts of a session's messages, in order, about as many bytes at a time as the caller wants to hold.
--
-- KEYS  1 order  2 texts  3 generating  4 log  5 tail
-- ARGV  1 after (place in the order, 0 at the start)  2 most bytes; the text that passes it is the last
-- Returns {place of the last text, or -1 at the end, text ...}.

local most = tonumber(ARGV[2])
local found, size, place = {-1}, 0, ARGV[1]

-- What was appended to a message under its present attempt.
local function appended(message, state)
  local attempt, since = string.match(state, '^(%d+)%S* .* (%d+)$')
  local chunks = {}
  for _, entry in ipairs(redis.call('XRANGE', KEYS[4], id_of(since), '+')) do
    if entry[2][1] == 'deltas' then
      chunks[#chunks + 1] = entry[2][2]
    end
  end
  chunks[#chunks + 1] = redis.call('GET', KEYS[5]) or nil
  local backwards = {}
  for i = #chunks, 1, -1 do
    local _, its_attempt, its_message, start = head_of(chunks[i])
    local stop = #chunks[i]
    while its_message == message and string.match(its_attempt, '^%d+') == attempt and stop >= start do
      local _, _, num_tokens, num_bytes = delta_before(chunks[i], stop)
      stop = stop - TRAILER - 4 * num_tokens - num_bytes
      backwards[#backwards + 1] = string.sub(chunks[i], stop + 1, stop + num_bytes)
    end
  end
  local parts = {}
  for i = #backwards, 1, -1 do
    parts[#parts + 1] = backwards[i]
  end
  return table.concat(parts)
end

while true do
  local messages = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. place, '+inf', 'WITHSCORES', 'LIMIT', 0, 100)
  for i = 1, #messages, 2 do
    local message = messages[i]
    local text, state = redis.call('HGET', KEYS[2], message) or '', redis.call('HGET', KEYS[3], message)
    if state then
      text = text .. appended(message, state)
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
