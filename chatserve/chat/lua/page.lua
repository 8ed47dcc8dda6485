-- A page of a user's sessions, newest first, from a place in the order rather than a rank: what changes meanwhile neither
-- hides a session that stays where it is nor shows it twice.
--
-- KEYS  1 index
-- ARGV  1 limit  2 updated_at of the last session seen ('+inf' at the start)  3 its id
-- Returns a list of {session id, updated_at}.

local limit = tonumber(ARGV[1])

-- As the server sorts members. Lua's own `<` on strings follows the server's locale.
local function sorts_before(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then
      return x < y
    end
  end
  return #a < #b
end

local page, offset = {}, 0
while true do
  local found = redis.call('ZREVRANGEBYSCORE', KEYS[1], ARGV[2], '-inf', 'WITHSCORES', 'LIMIT', offset, limit)
  for i = 1, #found, 2 do
    local id, updated_at = found[i], found[i + 1]
    if tonumber(updated_at) ~= tonumber(ARGV[2]) or sorts_before(id, ARGV[3]) then
      table.insert(page, {id, updated_at})
      if #page == limit then
        return page
      end
    end
  end
  if #found < 2 * limit then
    return page
  end
  offset = offset + limit
end
