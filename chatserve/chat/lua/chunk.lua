-- Put before the scripts that see a session's deltas.
--
-- A chunk is a run of deltas of one attempt at one message, numbered without gaps, all integers little-endian:
--   u64 seq of the first delta, u16 length of the name, name: ATTEMPT.FENCE, a space, message id
--   of each delta: text, token ids (int32 each), u64 seq, u32 first token, u32 number of tokens, u32 bytes of text
-- What is known of a delta stands behind it, so that a chunk grows at its end and is read from there. The one that grows is a
-- session's tail; it is moved to the session's log before anything else changes the session. While there is a tail, its
-- last delta has the session's seq, and says how far its message has got.
--
-- A state in `generating` is: ATTEMPT.FENCE, number of tokens appended to the attempt, first token of the last delta without
-- tokens (-1 none), the seq from which on the attempt's deltas lie in the log.

local TRAILER = 20

-- Seq, first token, number of tokens and bytes of text of the delta that ends at a place.
local function delta_before(chunk, stop)
  return struct.unpack('<I8I4I4I4', chunk, stop - TRAILER + 1)
end

-- Seq of the first delta, ATTEMPT.FENCE, message, and where the first delta begins.
local function head_of(chunk)
  local first_seq, length = struct.unpack('<I8I2', chunk)
  local attempt, message = string.match(string.sub(chunk, 11, 10 + length), '^(%S+) (.*)$')
  return first_seq, attempt, message, 11 + length
end

local function seq_of(session_seq, tail)
  return tail and (delta_before(tail, #tail)) or tonumber(session_seq or 0)
end

local function id_of(seq)
  return string.format('%.0f-0', seq)
end

-- Move a tail to the log, so that session, generating and log are all there is.
local function fold(session, generating, log, key)
  local tail = redis.call('GET', key)
  if not tail then
    return
  end
  local seq, first_token, num_tokens = delta_before(tail, #tail)
  local _, _, message = head_of(tail)
  local state = redis.call('HGET', generating, message)
  if state then -- else a server of somebody's own has let go of it, which must not make the session unwritable
    local attempt, rest = string.match(state, '^(%S+) %S+ (.*)$')
    redis.call('HSET', generating, message, string.format('%s %.0f %s', attempt, first_token + num_tokens, rest))
  end
  redis.call('XADD', log, id_of(seq), 'deltas', tail)
  redis.call('HSET', session, 'seq', string.format('%.0f', seq))
  redis.call('DEL', key)
end

-- Let go of the oldest entries of a log, but of none that has the text of an unfinished answer.
local function trim(log, generating, seq, history)
  local oldest = seq - history + 1
  for _, state in ipairs(redis.call('HVALS', generating)) do
    oldest = math.min(oldest, tonumber(string.match(state, '%d+$')))
  end
  if oldest > 1 then
    redis.call('XTRIM', log, 'MINID', '~', id_of(oldest))
  end
end
