-- Append deltas to tails, where each goes on with what its session's tail ends with. This is what a running answer needs,
-- and no more: append.lua knows what to do in any other case.
--
-- KEYS  the tail of each delta, all of different sessions
-- ARGV  1 as append.lua's second
-- Returns for each delta its event's seq as int64; 0 where it was not appended.

local call, pack, sub = redis.call, struct.pack, string.sub
local results = {}
for i, delta in ipairs(cmsgpack.unpack(ARGV[1])) do
  local name, first_token, num_tokens, text = delta[1], delta[2], delta[3], delta[4]
  local seq, tail = 0, call('GET', KEYS[i])
  if tail and num_tokens > 0 and sub(tail, 9, 8 + #name) == name then
    local last_seq, its_first, its_num = delta_before(tail, #tail)
    if its_first + its_num == first_token then
      seq = last_seq + 1
      call('APPEND', KEYS[i], text .. delta[5] .. pack('<I8I4I4I4', seq, first_token, num_tokens, #text))
      call('PUBLISH', delta[6], pack('<I8I4', seq, 0) .. name .. text)
    end
  end
  results[i] = pack('<i8', seq)
end
return table.concat(results)
