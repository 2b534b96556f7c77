-- ARGV: engine, now, the time before which whoever was last heard of is forgotten, and that after which, for then it
-- was before the clock was set back; the layout. Returns who is left.

redis.call('ZADD', '@engines', ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', '@engines', '-inf', '(' .. ARGV[3])
redis.call('ZREMRANGEBYSCORE', '@engines', '(' .. ARGV[4], '+inf')
redis.call('SET', '@layout', ARGV[5], 'NX') -- after a FLUSHALL: what is written from then on is in it
return redis.call('ZRANGE', '@engines', 0, -1)
