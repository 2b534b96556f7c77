-- Returns at most ARGV[2] members of @unsent from ARGV[1] on, each with the head of its task, which has the attempt.

local found = {}
for _, member in ipairs(redis.call('ZRANGEBYLEX', '@unsent', ARGV[1], '+', 'LIMIT', 0, ARGV[2])) do
    local task = struct.unpack('>I4', member, #member - 3) - 1
    local value = redis.call('HGET', '@run:' .. string.sub(member, 1, -6), task)
    found[#found + 1] = member
    found[#found + 1] = string.sub(value or '', 1, 5)
end
return found
