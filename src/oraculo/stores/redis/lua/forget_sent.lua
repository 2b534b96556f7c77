-- Takes at most ARGV[1] members of @held and marks them unsent. Returns how many it took, and how many it marked.

local taken, noted = redis.call('ZRANGE', '@held', 0, ARGV[1] - 1), 0
for _, member in ipairs(taken) do
    local run = '@run:' .. string.sub(member, 1, -6)
    local task = struct.unpack('>I4', member, #member - 3) - 1
    local value = redis.call('HGET', run, task)
    if value then
        redis.call('HSET', run, task, '1' .. string.sub(value, 2))
        redis.call('ZADD', '@unsent', 0, member)
        noted = noted + 1
    end
    redis.call('ZREM', '@held', member)
end
return {#taken, noted}
