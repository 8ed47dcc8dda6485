-- Append one delta to a message that is being generated. Costs what is new, never what is there.
--
-- KEYS  1 session  2 generating  3 events  4 live text  5 live tokens
-- ARGV  1 message id  2 attempt  3 first token  4 place (message, attempt, first token, number of tokens)
--       5 text  6 tokens  7 event history  8 fence  9 session channel
-- Returns the event's seq; nil where the message is no longer generated under this attempt and fence; or an error CONFLICT where
-- this delta's place is taken by another one.

local session, generating, events = KEYS[1], KEYS[2], KEYS[3]
local message, attempt, first_token, place, text = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local growing = redis.call('HGET', generating, message)
if not growing then
  return false
end
local its_attempt, last_first = string.match(growing, '^(%S+) (-?%d+)$')
attempt = attempt .. '.' .. ARGV[8]
if its_attempt ~= attempt then
  return false
end

if tonumber(first_token) <= tonumber(last_first) then
  -- A repeat: its first result is in the stream, near the end.
  for _, entry in ipairs(redis.call('XREVRANGE', events, '+', '-', 'COUNT', ARGV[7])) do
    local fields = entry[2]
    if fields[1] == 'delta' and fields[2] == place and fields[4] == text then
      return tonumber(string.match(entry[1], '^%d+'))
    end
  end
  return redis.error_reply('CONFLICT delta ' .. first_token .. ' comes after ' .. last_first)
end

local seq = redis.call('HINCRBY', session, 'seq', 1)
redis.call('XADD', events, 'MAXLEN', '~', ARGV[7], string.format('%.0f-0', seq), 'delta', place, 'text', text)
if text ~= '' then
  redis.call('APPEND', KEYS[4], text)
end
if ARGV[6] ~= '' then
  redis.call('APPEND', KEYS[5], ARGV[6])
end
redis.call('HSET', generating, message, attempt .. ' ' .. first_token)
redis.call('PUBLISH', ARGV[9], struct.pack('<I8I4I4I4I4I4I4I4', seq, 2, 0, 0, 0, #place, #text, 0) .. place .. text)
return seq
