"""Lua scripts for what must happen in one step on the server, with commands that Redis 6.2 has.

KEYS[1] is always the stream, and its consumer group has the same name. A script settles a message only while it is
pending for the consumer that settles it. It writes the message to the new place before it removes the old one. So a
script that fails half way, for want of memory, leaves a duplicate at worst.

Beside `body`, an entry has `redeliveries` when it was written anew after a delivery, because the group's own counter
starts again then. A dead letter has `reason`, `at` and `redeliveries`. Fields that others wrote are kept.
"""

from oraculo.clients.redis import Script

NEVER_REACHED = f"{2**64 - 1}-0"  # reading after the last possible id would start again at the first
LOOKED_AT = 1_000  # pending messages that one call checks for ended leases
PAGE = 100  # messages that one call handles: a script blocks the server
TRIMMED = 20_000  # messages that one call trims: they leave in blocks, which takes milliseconds


_FIELDS = """
local function value_of(fields, name)
    for i = 1, #fields, 2 do
        if fields[i] == name then return fields[i + 1] end
    end
end

-- The fields with those of `changed` set; the ones set to false are left out.
local function changed_fields(fields, changed)
    local made = {}
    for i = 1, #fields, 2 do
        if changed[fields[i]] == nil then
            made[#made + 1] = fields[i]
            made[#made + 1] = fields[i + 1]
        end
    end
    for name, value in pairs(changed) do
        if value then
            made[#made + 1] = name
            made[#made + 1] = value
        end
    end
    if #made == 0 then made = {'body', ''} end
    return made
end

local function carried(fields)
    local count = tonumber(value_of(fields, 'redeliveries') or '0')
    return count and count >= 0 and count < 1e9 and math.floor(count) or 0
end
"""

_SETTLING = (
    _FIELDS
    + """
local stream, delayed, dlq = KEYS[1], KEYS[2], KEYS[3]
local is_letter = stream == dlq

local function now_ms()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- How often it was delivered before this delivery, of which the group has counted `times`. A letter keeps its count.
local function redeliveries(fields, times)
    if is_letter then return carried(fields) end
    return carried(fields) + times - 1
end

local function leave(id)
    redis.call('XACK', stream, stream, id)
    redis.call('XDEL', stream, id)
end

local function dead_letter(id, fields, count, reason, at)
    local letter = changed_fields(fields, {reason = reason, at = at, redeliveries = string.format('%d', count)})
    redis.call('XADD', dlq, '*', unpack(letter))
    leave(id)
end

-- Lets it be delivered again after `delay` ms, or buries it when that was its last delivery (limit 0: it never is).
local function give_back(id, times, delay, limit, reason, at)
    local entry = redis.call('XRANGE', stream, id, id)[1]
    if not entry then return leave(id) end
    local count = redeliveries(entry[2], times)
    if limit > 0 and count + 1 >= limit then return dead_letter(id, entry[2], count, reason, at) end
    local changed = is_letter and {} or {redeliveries = string.format('%d', count + 1)}
    local fields = changed_fields(entry[2], changed)
    if delay > 0 then
        redis.call('ZADD', delayed, now_ms() + delay, cmsgpack.pack({id, fields}))
    else
        redis.call('XADD', stream, '*', unpack(fields))
    end
    leave(id)
end
"""
)

_OWN = """
-- Those of the ids behind ARGV[4] that are pending for consumer ARGV[1]; ARGV[2] and [3] are the first and the last.
local function own_ids()
    local pending, own = {}, {}
    for _, entry in ipairs(redis.call('XPENDING', KEYS[1], KEYS[1], ARGV[2], ARGV[3], ARGV[4], ARGV[1])) do
        pending[entry[1]] = true
    end
    for i = 5, #ARGV do
        if pending[ARGV[i]] then own[#own + 1] = ARGV[i] end
    end
    return own
end
local own = own_ids()
if #own == 0 then return 0 end
"""

# ARGV: consumer, first id, last id, how many pending messages there may be between them, ids…
ACK = Script.of(
    _OWN
    + """
redis.call('XACK', KEYS[1], KEYS[1], unpack(own))
redis.call('XDEL', KEYS[1], unpack(own))
return #own
"""
)

# ARGV as for ACK. Claiming with JUSTID restarts the lease and counts no delivery.
EXTEND = Script.of(
    _OWN
    + """
own[#own + 1] = 'JUSTID'
redis.call('XCLAIM', KEYS[1], KEYS[1], ARGV[1], 0, unpack(own))
return #own - 1
"""
)

# KEYS: stream, delayed, dlq. ARGV: consumer, id, delay in ms, limit (0: none; 1: dead-letter it now), reason, at
RETRY = Script.of(
    _SETTLING
    + """
local found = redis.call('XPENDING', stream, stream, ARGV[2], ARGV[2], 1, ARGV[1])[1]
if not found then return 0 end
give_back(ARGV[2], found[4], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6])
return 1
"""
)

# Gives back what a consumer holds, and then forgets the consumer. KEYS: stream, delayed, dlq.
# ARGV: consumer, limit, reason, at. Returns 1 while there may be more.
RELEASE = Script.of(
    _SETTLING
    + f"""
local held = redis.call('XPENDING', stream, stream, '-', '+', {PAGE}, ARGV[1])
for _, entry in ipairs(held) do
    give_back(entry[1], entry[4], 0, tonumber(ARGV[2]), ARGV[3], ARGV[4])
end
if #held == {PAGE} then return 1 end
redis.call('XGROUP', 'DELCONSUMER', stream, stream, ARGV[1])
return 0
"""
)

# Moves back messages whose delay is over, claims messages whose lease has ended, and shows that the consumer lives.
# KEYS: stream, delayed, dlq. ARGV: consumer, lease in ms, cursor, how many it may have, limit, reason, at.
# Returns the next cursor, the ms until the next delay ends (-1: there is none), and {{id, redeliveries, fields}}.
# Ignores errors of writing, which a later call repeats: on a full server consuming makes room.
UPKEEP = Script.of(
    _SETTLING
    + f"""
local function end_delays()
    local now = now_ms()
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', delayed, '-inf', now, 'LIMIT', 0, {PAGE})) do
        local added = redis.pcall('XADD', stream, '*', unpack(cmsgpack.unpack(member)[2]))
        if type(added) == 'table' and added.err then return 1000 end
        redis.call('ZREM', delayed, member)
    end
    local following = redis.call('ZRANGEBYSCORE', delayed, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    return following[2] and math.max(0, math.ceil(following[2] - now)) or -1
end

local limit, claimed = tonumber(ARGV[5]), {{}}

local function claim(id)
    local times = redis.call('XPENDING', stream, stream, id, id, 1)[1][4]
    local entry = redis.call('XRANGE', stream, id, id)[1]
    if not entry then return leave(id) end
    local count = redeliveries(entry[2], times)
    if limit > 0 and count + 1 >= limit then
        return pcall(dead_letter, id, entry[2], count, ARGV[6], ARGV[7])
    end
    redis.call('XCLAIM', stream, stream, ARGV[1], 0, id)
    claimed[#claimed + 1] = {{id, is_letter and count or count + 1, entry[2]}}
end

-- The server looks at ten for each that it may return.
local function claim_stale(cursor, most)
    local looked_at = 0
    repeat
        local missing = most - #claimed
        local found = redis.call('XAUTOCLAIM', stream, stream, ARGV[1], ARGV[2], cursor, 'COUNT', missing, 'JUSTID')
        for _, id in ipairs(found[2]) do claim(id) end
        cursor, looked_at = found[1], looked_at + 10 * missing
    until cursor == '0-0' or #claimed >= most or looked_at >= {LOOKED_AT}
    return cursor
end

local next_due = end_delays()
local cursor = claim_stale(ARGV[3], tonumber(ARGV[4]))
-- Reads nothing, and is a sign of life: before Redis 7.2 a read that waits is none.
redis.call('XREADGROUP', 'GROUP', stream, ARGV[1], 'COUNT', 1, 'STREAMS', stream, '{NEVER_REACHED}')
return {{cursor, next_due, claimed}}
"""
)

# Forgets consumers that hold nothing and were silent for ARGV[1] ms.
TIDY = Script.of(
    """
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], KEYS[1])) do
    local about = {}
    for i = 1, #consumer, 2 do about[consumer[i]] = consumer[i + 1] end
    if about.pending == 0 and about.idle > tonumber(ARGV[1]) then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], KEYS[1], about.name)
    end
end
return 0
"""
)

# Deletes delivered and acked messages of a stream that has no group but ours: another group may not have read them.
# Everything from the first pending or undelivered message on stays. Whole blocks go first, up to the limit; below the
# limit, an exact cut removes the little that is left. Returns how many messages the stream still has.
TRIM = Script.of(
    f"""
local function about(group)
    local about = {{}}
    for i = 1, #group, 2 do about[group[i]] = group[i + 1] end
    return about
end

local function trim(delivered)
    local pending = redis.call('XPENDING', KEYS[1], KEYS[1], '-', delivered, 1)[1]
    local kept = pending and pending[1] or delivered
    local gone = redis.call('XTRIM', KEYS[1], 'MINID', '~', kept, 'LIMIT', {TRIMMED})
    if gone > {TRIMMED // 2} then return end
    redis.call('XTRIM', KEYS[1], 'MINID', '=', kept)
    if not pending then redis.call('XDEL', KEYS[1], delivered) end
end

local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
if groups.err then return 0 end  -- it is gone, or no stream any more
local group = about(groups[1] or {{}})
if #groups == 1 and group.name == KEYS[1] then trim(group['last-delivered-id']) end
return redis.call('XLEN', KEYS[1])
"""
)

# Moves dead letters to the end of their queue, as if never delivered. KEYS: dlq, queue.
# ARGV: the last id of all that are moved, or '' and then ids…  Returns how many were moved.
REDRIVE = Script.of(
    _FIELDS
    + f"""
local letters = {{}}
if ARGV[1] ~= '' then
    letters = redis.call('XRANGE', KEYS[1], '-', ARGV[1], 'COUNT', {PAGE})
else
    for i = 2, #ARGV do letters[#letters + 1] = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1] end
end
for _, letter in ipairs(letters) do
    local fields = changed_fields(letter[2], {{reason = false, at = false, redeliveries = false}})
    redis.call('XADD', KEYS[2], '*', unpack(fields))
    redis.call('XACK', KEYS[1], KEYS[1], letter[1])
    redis.call('XDEL', KEYS[1], letter[1])
end
if #letters > 0 then redis.pcall('XGROUP', 'CREATE', KEYS[2], KEYS[2], '0') end
return #letters
"""
)
