-- What `create` and `change` share; it stands before each of them. `@` is the namespace.
--
-- No script is undone when it fails half way. So whatever may be refused is asked for before the first write, and the
-- first write is of a command that a server without memory refuses: from then on it lets a script finish.

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

-- The section has a broker and then a member, again and again.
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

-- A state is `<status>:<when it ended>`, the latter only if nothing but time keeps the run from being pruned.
local function parts(state)
    return string.match(state, '^([^:]*):(.*)$')
end
