-- Append deltas to messages that are being generated, whatever has happened to their sessions. Each costs what is new,
-- never what is there; many in one call, because a call costs as much as several of them.
--
-- KEYS  for each delta: session, generating, log, tail
-- ARGV  1 event history
--       2 MessagePack: for each delta length and name as in a chunk's head, first token, number of tokens, text, token ids,
--         channel
-- Returns for each delta its event's seq as int64; 0 where the message is no longer generated under this attempt and fence;
-- -1 where its place is taken by another one, or does not follow what is there.

local call, pack = redis.call, struct.pack
local history = tonumber(ARGV[1])

-- The seq of the delta at this place with this text, or -1. It is near the end: the last write was not answered.
local function find(log, since, attempt, message, first_token, num_tokens, text)
  attempt = string.match(attempt, '^%d+')
  local last, count = '+', 16
  while true do
    local entries = call('XREVRANGE', log, last, id_of(since), 'COUNT', count)
    for _, entry in ipairs(entries) do
      local kind, chunk = unpack(entry[2])
      local its_attempt, its_message, start, stop
      if kind == 'deltas' then
        _, its_attempt, its_message, start = head_of(chunk)
        stop = #chunk
      end
      if its_message == message and string.match(its_attempt, '^%d+') == attempt then
        while stop >= start do
          local seq, first, num, size = delta_before(chunk, stop)
          stop = stop - TRAILER - 4 * num - size
          if first == first_token and num == num_tokens then
            return string.sub(chunk, stop + 1, stop + size) == text and seq or -1
          end
        end
      end
    end
    if #entries < count then
      return -1
    end
    last, count = '(' .. entries[#entries][1], 4 * count
  end
end

local results = {}
for i, delta in ipairs(cmsgpack.unpack(ARGV[2])) do
  local session, generating, log, tail = unpack(KEYS, 4 * i - 3, 4 * i)
  local name, first_token, num_tokens, text, tokens, channel = unpack(delta)
  local attempt, message = string.match(string.sub(name, 3), '^(%S+) (.*)$')

  fold(session, generating, log, tail)
  local growing = call('HGET', generating, message)
  local its_attempt, has_tokens, last_empty, since
  if growing then
    its_attempt, has_tokens, last_empty, since = string.match(growing, '^(%S+) (%d+) (-?%d+) (%d+)$')
    has_tokens, last_empty = tonumber(has_tokens), tonumber(last_empty)
  end
  local seq
  if its_attempt ~= attempt then
    seq = 0
  elseif first_token < has_tokens or (num_tokens == 0 and last_empty == first_token) then
    seq = find(log, since, attempt, message, first_token, num_tokens, text) -- a repeat
  elseif first_token > has_tokens then
    seq = -1
  else
    seq = tonumber(call('HGET', session, 'seq')) + 1
    local chunk = pack('<I8', seq) .. name .. text .. tokens .. pack('<I8I4I4I4', seq, first_token, num_tokens, #text)
    call('SET', tail, chunk)
    if num_tokens == 0 then
      local noted = string.format('%s %.0f %.0f %s', attempt, first_token, first_token, since)
      call('HSET', generating, message, noted)
      fold(session, generating, log, tail) -- nothing in a tail tells two deltas without tokens apart
    end
    trim(log, generating, seq, history)
    call('PUBLISH', channel, pack('<I8I4', seq, 0) .. name .. text)
  end
  results[i] = pack('<i8', seq)
end
return table.concat(results)
