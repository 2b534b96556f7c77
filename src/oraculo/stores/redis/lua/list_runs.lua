-- Runs newest first. ARGV: the index, another index that they must be in or '', the number they must be below, how many
-- to look at, how many to find, the field to return of each.
-- Returns the number below which to go on, '' when there are no more; then number, id and field of each that was found.

local index, other = ARGV[1], ARGV[2]
if other ~= '' and redis.call('ZCARD', other) < redis.call('ZCARD', index) then index, other = other, index end

local seen = redis.call('ZREVRANGEBYSCORE', index, '(' .. ARGV[3], '-inf', 'WITHSCORES', 'LIMIT', 0, ARGV[4])
local most = tonumber(ARGV[5])
local found, count = {#seen == 2 * ARGV[4] and seen[#seen] or ''}, 0
for i = 1, #seen, 2 do
    local id, n = seen[i], seen[i + 1]
    if other == '' or redis.call('ZSCORE', other, id) then
        found[#found + 1] = n
        found[#found + 1] = id
        found[#found + 1] = redis.call('HGET', '@run:' .. id, ARGV[6])
        count = count + 1
        if count == most then
            found[1] = n
            break
        end
    end
end
return found
