-- Does what the other scripts and the store's own reads do, on keys of its own, and leaves nothing behind: whatever the
-- server cannot do now, or does not permit to this user, stops it. The first write is one that a server without memory
-- refuses.

local hash, zset, list, text = '@proof:hash', '@proof:zset', '@proof:list', '@proof:text'

redis.call('HSET', hash, 'a', '1')
redis.call('HGET', hash, 'a')
redis.call('HMGET', hash, 'a')
redis.call('HGETALL', hash)
redis.call('HLEN', hash)
redis.call('HVALS', hash)
redis.call('HDEL', hash, 'a')

redis.call('ZADD', zset, 1, 'a')
redis.call('ZSCORE', zset, 'a')
redis.call('ZCARD', zset)
redis.call('ZCOUNT', zset, 1, 1)
redis.call('ZRANGE', zset, 0, 0)
redis.call('ZRANGEBYLEX', zset, '-', '+')
redis.call('ZRANGEBYSCORE', zset, 1, 1)
redis.call('ZREVRANGEBYSCORE', zset, 1, 1)
redis.call('ZREM', zset, 'b')
redis.call('ZREMRANGEBYSCORE', zset, 1, 1)

redis.call('RPUSH', list, 'a')
redis.call('LRANGE', list, 0, 0)

redis.call('SET', text, '1')
redis.call('INCR', text)
redis.call('GET', text)

redis.call('UNLINK', hash, zset, list, text)
return 1
