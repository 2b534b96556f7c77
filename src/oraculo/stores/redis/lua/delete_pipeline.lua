-- ARGV: name. Returns whether it was there.

local gone = redis.call('HDEL', '@pipelines', ARGV[1])
if gone == 1 then redis.call('INCR', '@pipelines:mark') end
return gone
