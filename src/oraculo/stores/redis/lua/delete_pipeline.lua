-- ARGV: name. Returns 1 when it existed.

local gone = redis.call('HDEL', '@pipelines', ARGV[1])
if gone == 1 then redis.call('INCR', '@pipelines:mark') end
return gone
