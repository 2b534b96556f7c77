-- Creates a run. ARGV: id, idempotency key ('' for none, else with a '=' before it), fingerprint, name, state, then
-- sections: history, and those of write(). Returns the outcome, and the id of the run that exists now.

local id, key, fingerprint, name, state = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local run = '@run:' .. id

if key ~= '' then
    local other = redis.call('HGET', '@keys', key)
    local stored = other and redis.call('HGET', '@run:' .. other, 'fingerprint')
    if stored then return {stored == fingerprint and 'same' or 'key_reused', other} end
end
local stored = redis.call('HGET', run, 'fingerprint')
if stored then return {stored == fingerprint and 'same' or 'id_in_use', id} end

-- In this order, a key of another type stops the script while it has only taken a number, and a place in a list that
-- shows nothing without its run.
local n = redis.call('INCR', '@sequence')
redis.call('ZADD', '@named:' .. name, n, id)
at = 6
section('RPUSH', '@history:' .. id)
redis.call('HSET', run, 'n', n, 'name', name, 'fingerprint', fingerprint, 'state', state, 'key', key)
write(run, n)
if key ~= '' then redis.call('HSET', '@keys', key, id) end
local status, ended = parts(state)
redis.call('ZADD', '@runs', n, id)
redis.call('ZADD', '@runs:' .. status, n, id)
if ended ~= '' then redis.call('ZADD', '@ended', ended, id) end
return {'created', id}
