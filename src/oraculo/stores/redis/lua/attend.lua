-- ARGV: engine, now, the time before which whoever was last heard of is forgotten, the layout. Returns who is left.

redis.call('ZADD', '@engines', ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', '@engines', '-inf', '(' .. ARGV[3])
redis.call('SET', '@layout', ARGV[4], 'NX') -- after a FLUSHALL: what is written from then on is in it
return redis.call('ZRANGE', '@engines', 0, -1)
