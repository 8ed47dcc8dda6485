-- Bring a message that was being generated under schema 3 to schema 4: what was appended to it becomes part of what was put.
--
-- KEYS  1 session  2 generating  3 texts  4 tokens  5 usage  6 live text  7 live tokens
-- ARGV  1 message id
-- Does nothing where it was done, or the message was generated under schema 4.

local session, generating, texts, tokens = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local attempt, last_empty = string.match(redis.call('HGET', generating, ARGV[1]) or '', '^(%S+) (-?%d+)$')
if not attempt then
  return 0
end
local text, token_ids = redis.call('GET', KEYS[6]) or '', redis.call('GET', KEYS[7]) or ''
if text ~= '' then
  redis.call('HSET', texts, ARGV[1], (redis.call('HGET', texts, ARGV[1]) or '') .. text)
end
if token_ids ~= '' then
  redis.call('HSET', tokens, ARGV[1], (redis.call('HGET', tokens, ARGV[1]) or '') .. token_ids)
end
for _, key in ipairs({session, KEYS[5]}) do
  redis.call('HINCRBY', key, 'bytes', #text + #token_ids)
end
local seq = redis.call('HGET', session, 'seq')
redis.call('HSET', generating, ARGV[1], string.format('%s %.0f %s %.0f', attempt, #token_ids / 4, last_empty, seq + 1))
redis.call('UNLINK', KEYS[6], KEYS[7])
return 1
