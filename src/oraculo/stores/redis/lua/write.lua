-- The part that `create` and `change` share; it is put before each. `@` is the namespace.
--
-- No script is undone when it fails half way. So everything that may be refused is checked before the first write, and
-- a full server refuses the first write: after it, the server lets the script finish.

local at -- where in ARGV the next section begins: a count, and then as many arguments
local MOST = 4000 -- arguments of one command: Lua cannot unpack many more

local function section(command, key)
    local last = at + ARGV[at]
    for first = at + 1, last, MOST do
        redis.call(command, key, unpack(ARGV, first, math.min(first + MOST - 1, last)))
    end
    at = last + 1
end

local function slot(broker)
    local found = redis.call('HGET', '@brokers', broker)
    if not found then
        found = redis.call('HLEN', '@brokers') + 1
        redis.call('HSET', '@brokers', broker, found)
    end
    return found
end

-- The section alternates between a broker and a member.
local function hold(n)
    local last = at + ARGV[at]
    local bases, entries = {}, {}
    for i = at + 1, last, 2 do
        local broker = ARGV[i]
        bases[broker] = bases[broker] or slot(broker) * 2 ^ 40
        entries[#entries + 1] = bases[broker] + n
        entries[#entries + 1] = ARGV[i + 1]
        if #entries == MOST or i + 1 == last then
            redis.call('ZADD', '@held', unpack(entries))
            entries = {}
        end
    end
    at = last + 1
end

-- Sections: fields of the run; timers set, cleared; commands to send, not to send; held by a broker, not held.
local function write(run, n)
    section('HSET', run)
    section('ZADD', '@due')
    section('ZREM', '@due')
    section('ZADD', '@unsent')
    section('ZREM', '@unsent')
    hold(n)
    section('ZREM', '@held')
end

-- A state is `<status>:<time of the end>`. The time is there only if the run may be pruned once it is old enough.
local function parts(state)
    return string.match(state, '^([^:]*):(.*)$')
end
