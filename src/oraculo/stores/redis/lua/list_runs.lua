-- Lists runs, newest first. ARGV: the number they must be below, how many to look at, how many to find, the field to
-- return, how many indexes to walk, then these (a run is in at most one). Runs must also be in one of the indexes after
-- these, if there are any.
-- Returns the number below which to go on ('': no more), then number, id and field of each run.

local before, looked_at, most, field = '(' .. ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local walked, others, sizes = {}, {}, {0, 0}
for i = 6, #ARGV do
    local is_walked = i < 6 + ARGV[5]
    table.insert(is_walked and walked or others, ARGV[i])
    local side = is_walked and 1 or 2
    sizes[side] = sizes[side] + redis.call('ZCARD', ARGV[i])
end
if #others > 0 and sizes[2] < sizes[1] then walked, others = others, walked end

local seen, is_cut = {}, false
for _, index in ipairs(walked) do
    local part = redis.call('ZREVRANGEBYSCORE', index, before, '-inf', 'WITHSCORES', 'LIMIT', 0, looked_at)
    for i = 1, #part, 2 do seen[#seen + 1] = {part[i], part[i + 1]} end
    is_cut = is_cut or #part == 2 * looked_at
end
if #walked > 1 then table.sort(seen, function(a, b) return tonumber(a[2]) > tonumber(b[2]) end) end

local function is_wanted(id)
    for _, index in ipairs(others) do
        if redis.call('ZSCORE', index, id) then return true end
    end
    return #others == 0
end

local last = math.min(#seen, looked_at)
local found, count = {(is_cut or #seen > last) and seen[last][2] or ''}, 0
for place = 1, last do
    local id, n = seen[place][1], seen[place][2]
    if is_wanted(id) then
        found[#found + 1] = n
        found[#found + 1] = id
        found[#found + 1] = redis.call('HGET', '@run:' .. id, field)
        count = count + 1
        if count == most then
            found[1] = n
            break
        end
    end
end
return found
