-- One atomic change of one session, with its event numbers. Every precondition stands before the first write, because a
-- script that fails halfway is not undone.
--
-- KEYS  1 session  2 metas  3 texts  4 tokens  5 order  6 log  7 tail  8 generating  9 writes  10 index
--       11 usage  12 request (only where the change answers a client's request)
-- ARGV  1 seq that the writer knows  2 bytes of this change  3 session id  4 write id  5 create  6 delete
--       7 record ('' keeps it)  8 title  9 updated_at  10 digest  11 answer
--       12 event history  13 log ttl  14 request ttl  15 writes ttl  16 tombstone ttl  17 writes kept   (ttls in seconds)
--       18 fence  19 owner (of a session to create)  20 session channel  21 request id  22 user channel  23 announcement
--       24 most sessions  25 most bytes  26 most generations of the user (-1: any)
--       27 number of deletes, then each message id
--       then number of puts, each: message id, '1' if generating, attempt, meta, text, tokens
--       then number of events, each its payload
-- Returns {'ok', first seq} | {'done', answer} | {'conflict'} | {'exists'} | {'deleted'} | {'missing'} | {'fenced'}
--         | {'quota', which, used}

local session, metas, texts, tokens, order, log = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local tail, generating, writes, index, usage, request = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local id, write_id = ARGV[3], ARGV[4]
local create, delete, record, fence = ARGV[5] == '1', ARGV[6] == '1', ARGV[7], ARGV[18]

-- A retry of this very write gets its first result: this comes before the request's own answer, whose receiver would
-- take the work for another's and publish nothing.
local mark = write_id .. '\n'
for _, write in ipairs(redis.call('LRANGE', writes, 0, -1)) do
  if string.sub(write, 1, #mark) == mark then
    return {'ok', tonumber(string.sub(write, #mark + 1))}
  end
end
if request then
  local done = redis.call('HMGET', request, 'digest', 'answer')
  if done[1] then
    if done[1] == ARGV[10] then
      return {'done', done[2]}
    end
    return {'conflict'}
  end
end
local state = redis.call('HMGET', session, 'seq', 'deleted', 'fence')
local last_seq = seq_of(state[1], redis.call('GET', tail))
if state[2] then
  return {'deleted'}
elseif create and state[1] then
  return {'exists'}
elseif not create and not state[1] then
  return {'missing'}
elseif not create and ((state[3] or '0') ~= fence or last_seq < tonumber(ARGV[1])) then
  return {'fenced'}
end

local function over(number, used)
  local most = tonumber(ARGV[number])
  return most >= 0 and used > most
end
local used = redis.call('HMGET', usage, 'bytes', 'generating')
local num_sessions, num_bytes = redis.call('ZCARD', index), tonumber(used[1] or 0)
if create and over(24, num_sessions + 1) then
  return {'quota', 'sessions', num_sessions}
elseif over(25, num_bytes + tonumber(ARGV[2])) then
  return {'quota', 'bytes', num_bytes}
elseif over(26, tonumber(used[2] or 0) + 1) then
  return {'quota', 'generations', tonumber(used[2] or 0)}
end

-- What is stored of a message. Text that is still being generated counts when it has ended.
local function size_of(message)
  local size = 0
  for _, key in ipairs({metas, texts, tokens}) do
    size = size + redis.call('HSTRLEN', key, message)
  end
  return size
end
local grown, num_generating = 0, redis.call('HLEN', generating)

local function set_or_clear(key, field, value)
  if value == '' then
    redis.call('HDEL', key, field)
  else
    redis.call('HSET', key, field, value)
  end
end

local at = 26
local function take()
  at = at + 1
  return ARGV[at]
end

local first_seq = last_seq + 1
fold(session, generating, log, tail)

if create and ARGV[19] ~= '' then
  redis.call('HSET', session, 'owner', ARGV[19], 'fence', fence)
end
if record ~= '' then
  grown = #record - redis.call('HSTRLEN', session, 'record')
  redis.call('HSET', session, 'record', record, 'title', ARGV[8])
  redis.call('ZADD', index, ARGV[9], id)
end

for _ = 1, tonumber(take()) do
  local message = take()
  grown = grown - size_of(message)
  redis.call('HDEL', generating, message)
  redis.call('HDEL', metas, message)
  redis.call('HDEL', texts, message)
  redis.call('HDEL', tokens, message)
  redis.call('ZREM', order, message)
end

for _ = 1, tonumber(take()) do
  local message, is_generating, attempt, meta, text, token_ids = take(), take() == '1', take(), take(), take(), take()
  grown = grown - size_of(message)
  if redis.call('HSET', metas, message, meta) == 1 then
    redis.call('ZADD', order, redis.call('HINCRBY', session, 'order', 1), message)
  end
  local growing = is_generating and redis.call('HGET', generating, message)
  if not growing or string.match(growing, '^%d+') ~= attempt then
    redis.call('HDEL', generating, message)
    set_or_clear(texts, message, text)
    set_or_clear(tokens, message, token_ids)
    if is_generating then
      redis.call('HSET', generating, message, string.format('%s.%s 0 -1 %.0f', attempt, fence, first_seq))
    end
  end
  grown = grown + size_of(message)
end

local num_events = tonumber(take())
local seq = redis.call('HINCRBY', session, 'seq', num_events)
local payloads = {}
for i = 1, num_events do
  payloads[i] = take()
end

local grown_to = redis.call('HINCRBY', session, 'bytes', grown)
if delete then
  grown = grown - grown_to
  redis.call('UNLINK', session, metas, texts, tokens, order, log, generating)
  redis.call('ZREM', index, id)
  redis.call('HSET', session, 'deleted', '1', 'seq', seq)
  redis.call('EXPIRE', session, ARGV[16])
else
  for i, payload in ipairs(payloads) do
    redis.call('XADD', log, id_of(first_seq + i - 1), 'event', payload)
  end
  trim(log, generating, seq, tonumber(ARGV[12]))
  if redis.call('EXISTS', generating) == 1 then
    redis.call('PERSIST', log) -- it has the text of unfinished answers
  else
    redis.call('EXPIRE', log, ARGV[13])
  end
end

redis.call('HINCRBY', usage, 'bytes', grown)
redis.call('HINCRBY', usage, 'generating', redis.call('HLEN', generating) - num_generating)
if redis.call('EXISTS', index) == 0 then
  redis.call('UNLINK', usage)
end

if request then
  redis.call('HSET', request, 'digest', ARGV[10], 'answer', ARGV[11])
  redis.call('EXPIRE', request, ARGV[14])
end
redis.call('LPUSH', writes, mark .. string.format('%.0f', first_seq))
redis.call('LTRIM', writes, 0, ARGV[17] - 1)
redis.call('EXPIRE', writes, ARGV[15])

if num_events > 0 then
  -- As events.lua has them, after the seq of the first and the answer to the request that made them.
  local answered = request and {ARGV[21], ARGV[11]} or {'', ''}
  local sizes, body = {struct.pack('<I4I4I4', #answered[1], #answered[2], 0)}, {answered[1], answered[2]}
  for _, payload in ipairs(payloads) do
    sizes[#sizes + 1] = struct.pack('<I4I4I4', 0, 0, #payload)
    body[#body + 1] = payload
  end
  local head = struct.pack('<I8I4', first_seq, #sizes)
  redis.call('PUBLISH', ARGV[20], head .. table.concat(sizes) .. table.concat(body))
end
if ARGV[23] ~= '' then
  redis.call('PUBLISH', ARGV[22], ARGV[23])
end
return {'ok', first_seq}
