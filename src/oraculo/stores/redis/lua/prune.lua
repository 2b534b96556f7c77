-- Deletes runs that ended before ARGV[1]. It skips the first ARGV[2] of them, and looks at ARGV[3] at most.
-- Returns how many were deleted, and how many are kept because of an unsent dead letter.

local function delete(id)
    local run = '@run:' .. id
    local stored = redis.call('HMGET', run, 'n', 'state', 'name', 'key')
    redis.call('UNLINK', run, '@history:' .. id)
    redis.call('ZREM', '@ended', id)
    redis.call('ZREM', '@runs', id)
    if not stored[1] then return end
    redis.call('ZREM', '@runs:' .. string.match(stored[2], '^[^:]*'), id)
    redis.call('ZREM', '@named:' .. stored[3], id)
    if stored[4] ~= '' then redis.call('HDEL', '@keys', stored[4]) end
    for _, slot in ipairs(redis.call('HVALS', '@brokers')) do
        local place = string.format('%.0f', slot * 2 ^ 40 + stored[1])
        redis.call('ZREMRANGEBYSCORE', '@held', place, place)
    end
end

local deleted, kept = 0, 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', '@ended', '-inf', '(' .. ARGV[1], 'LIMIT', ARGV[2], ARGV[3])) do
    local unsent = redis.call('ZRANGEBYLEX', '@unsent', '[' .. id .. '\0', '(' .. id .. '\1', 'LIMIT', 0, 1)
    if unsent[1] then
        kept = kept + 1
    else
        delete(id)
        deleted = deleted + 1
    end
end
return {deleted, kept}
