-- ARGV: engine, now, the time before which whoever was last heard of is forgotten. Returns who is left.

redis.call('ZADD', '@engines', ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', '@engines', '-inf', '(' .. ARGV[3])
return redis.call('ZRANGE', '@engines', 0, -1)
