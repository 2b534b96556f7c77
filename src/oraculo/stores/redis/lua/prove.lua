-- Runs every command of the other scripts and reads on keys of its own, and leaves nothing behind. It fails where the
-- server cannot run one now, or does not permit it. A full server refuses the first write.

local hash, zset, list, text = '@proof:hash', '@proof:zset', '@proof:list', '@proof:text'

local commands = {
    {'HSET', hash, 'a', '1'},
    {'HGET', hash, 'a'},
    {'HMGET', hash, 'a'},
    {'HGETALL', hash},
    {'HLEN', hash},
    {'HVALS', hash},
    {'HDEL', hash, 'a'},

    {'ZADD', zset, 1, 'a'},
    {'ZSCORE', zset, 'a'},
    {'ZCARD', zset},
    {'ZCOUNT', zset, 1, 1},
    {'ZRANGE', zset, 0, 0},
    {'ZRANGEBYLEX', zset, '-', '+'},
    {'ZRANGEBYSCORE', zset, 1, 1},
    {'ZREVRANGEBYSCORE', zset, 1, 1},
    {'ZREM', zset, 'b'},
    {'ZREMRANGEBYSCORE', zset, 1, 1},

    {'RPUSH', list, 'a'},
    {'LRANGE', list, 0, 0},

    {'SET', text, '1'},
    {'INCR', text},
    {'GET', text},

    {'UNLINK', hash, zset, list, text},
}

for _, command in ipairs(commands) do
    local reply = redis.pcall(unpack(command))
    if type(reply) == 'table' and reply.err then
        -- Redis 7.0 and older do not name the command.
        if string.find(reply.err, "can't run this command", 1, true) then
            return redis.error_reply("NOPERM this user has no permissions to run the '" .. string.lower(command[1]) .. "' command")
        end
        return reply
    end
end
return 1
