-- Records an engine. ARGV: engine, now, the times before and after which records are deleted, the layout.
-- A record from the future was written before the clock was set back. Returns the engines that are left.

redis.call('ZADD', '@engines', ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', '@engines', '-inf', '(' .. ARGV[3])
redis.call('ZREMRANGEBYSCORE', '@engines', '(' .. ARGV[4], '+inf')
redis.call('SET', '@layout', ARGV[5], 'NX') -- after a FLUSHALL: what is written from then on is in it
return redis.call('ZRANGE', '@engines', 0, -1)
