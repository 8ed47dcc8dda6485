-- Take a session's lease, where it is free or that of an owner who is known to be dead.
--
-- KEYS  1 session  2 generating  3 log  4 tail
-- ARGV  1 owner  2 whom it may be taken from ('' nobody)  3 what their channel's name begins with  4 what to tell them
-- Returns {'ok', fence, seq} | {'held', owner} | {'missing'}

local session, generating, owner = KEYS[1], KEYS[2], ARGV[1]

local state = redis.call('HMGET', session, 'record', 'owner', 'fence', 'seq')
local seq = seq_of(state[4], redis.call('GET', KEYS[4]))
if not state[1] then
  return {'missing'}
end
local holder = state[2] or ''
if holder == owner then
  return {'ok', tonumber(state[3]), seq}
elseif holder ~= '' and holder ~= ARGV[2] then
  return {'held', holder}
end

fold(session, generating, KEYS[3], KEYS[4]) -- under the fence that it was written with
local fence = redis.call('HINCRBY', session, 'fence', 1)
redis.call('HSET', session, 'owner', owner)
local growing = redis.call('HGETALL', generating)
for i = 1, #growing, 2 do
  -- Text is appended under an attempt and a fence.
  local attempt, rest = string.match(growing[i + 1], '^(%d+)%S* (.*)$')
  redis.call('HSET', generating, growing[i], string.format('%s.%.0f %s', attempt, fence, rest))
end
if holder ~= '' then
  redis.call('PUBLISH', ARGV[3] .. holder, ARGV[4])
end
return {'ok', fence, seq}
