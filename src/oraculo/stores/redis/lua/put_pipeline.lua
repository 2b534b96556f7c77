-- ARGV: name, definition.

redis.call('HSET', '@pipelines', ARGV[1], ARGV[2])
return redis.call('INCR', '@pipelines:mark')
