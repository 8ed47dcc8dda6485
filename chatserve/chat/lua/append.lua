-- Append deltas to messages that are being generated. Each costs what is new, never what is there; many in one call,
-- because a call costs as much as several of them.
--
-- KEYS  for each delta: session, generating, events, live text, live tokens
-- ARGV  1 event history
--       then for each delta: message id, ATTEMPT.FENCE, first token, place (message, attempt, first token, number of
--       tokens), text, tokens, session channel
-- Returns for each delta its event's seq; 0 where the message is no longer generated under this attempt and fence; -1
-- where its place is taken by another one, or does not follow what is there.

local call, pack = redis.call, struct.pack
local history = ARGV[1]
local results = {}

-- The seq of the delta with this place and text, or -1. It is near the end: the last write was not answered.
local function seq_of(events, place, text)
  local last, count = '+', 16
  while true do
    local entries = call('XREVRANGE', events, last, '-', 'COUNT', count)
    for _, entry in ipairs(entries) do
      local fields = entry[2]
      if fields[1] == 'delta' and fields[2] == place and fields[4] == text then
        return tonumber(string.match(entry[1], '^%d+'))
      end
    end
    if #entries < count then
      return -1
    end
    last, count = '(' .. entries[#entries][1], 4 * count
  end
end

for i = 1, #KEYS / 5 do
  local key, arg = 5 * i - 5, 7 * i - 6
  local session, generating, events = KEYS[key + 1], KEYS[key + 2], KEYS[key + 3]
  local message, attempt, first_token = ARGV[arg + 1], ARGV[arg + 2], ARGV[arg + 3]
  local place, text, tokens = ARGV[arg + 4], ARGV[arg + 5], ARGV[arg + 6]

  local growing = call('HGET', generating, message)
  local its_attempt, last_empty
  if growing then
    its_attempt, last_empty = string.match(growing, '^(%S+) (-?%d+)$')
  end
  local num_tokens = growing and call('STRLEN', KEYS[key + 5]) / 4
  local first = tonumber(first_token)
  if its_attempt ~= attempt then
    results[i] = 0
  elseif first < num_tokens or (tokens == '' and last_empty == first_token) then
    results[i] = seq_of(events, place, text) -- a repeat
  elseif first > num_tokens then
    results[i] = -1
  else
    local seq = call('HINCRBY', session, 'seq', 1)
    call('XADD', events, 'MAXLEN', '~', history, string.format('%.0f-0', seq), 'delta', place, 'text', text)
    if text ~= '' then
      call('APPEND', KEYS[key + 4], text)
    end
    if tokens ~= '' then
      call('APPEND', KEYS[key + 5], tokens)
    else
      call('HSET', generating, message, attempt .. ' ' .. first_token)
    end
    -- As commit.lua has it.
    call('PUBLISH', ARGV[arg + 7], pack('<I8I4I4I4I4I4I4I4', seq, 2, 0, 0, 0, #place, #text, 0) .. place .. text)
    results[i] = seq
  end
end
return results
