-- Returns at most ARGV[3] ids of runs in the slot of broker ARGV[1], after run ARGV[2]. That run may have been pruned:
-- then begin again rather than leave something out.

local slot = redis.call('HGET', '@brokers', ARGV[1])
if not slot then return {} end
local base = slot * 2 ^ 40
local last = string.format('%.0f', base + 2 ^ 40 - 1)
local place = base + (redis.call('HGET', '@run:' .. ARGV[2], 'n') or 0)
local found = {}
for _ = 1, ARGV[3] do
    local after = string.format('(%.0f', place)
    local next = redis.call('ZRANGEBYSCORE', '@held', after, last, 'WITHSCORES', 'LIMIT', 0, 1)
    if not next[1] then break end
    found[#found + 1] = string.sub(next[1], 1, -6)
    place = tonumber(next[2])
end
return found
