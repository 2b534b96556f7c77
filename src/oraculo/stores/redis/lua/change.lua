-- Changes a run whose version is the expected one. ARGV: id, expected version, state, then sections: history, and those
-- of write(), with the new version among the fields. Returns 1, or 0 for another version, when nothing is written.

local id, state = ARGV[1], ARGV[3]
local run = '@run:' .. id
local stored = redis.call('HMGET', run, 'version', 'n', 'state')
if stored[1] ~= ARGV[2] then return 0 end
local n, before = tonumber(stored[2]), stored[3]

at = 4
section('RPUSH', '@history:' .. id) -- first: should it be no list, then nothing is written yet
write(run, n)
if state ~= before then
    local was = parts(before)
    local status, ended = parts(state)
    redis.call('HSET', run, 'state', state)
    if status ~= was then
        redis.call('ZADD', '@runs:' .. status, n, id)
        redis.call('ZREM', '@runs:' .. was, id)
    end
    if ended ~= '' then
        redis.call('ZADD', '@ended', ended, id)
    else
        redis.call('ZREM', '@ended', id)
    end
end
return 1
