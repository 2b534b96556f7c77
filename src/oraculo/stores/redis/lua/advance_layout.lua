-- Changes the layout's number from ARGV[1] (0: none) to ARGV[2]. Returns 1, or 0 when another process was faster.

if (redis.call('GET', '@layout') or '0') ~= ARGV[1] then return 0 end
redis.call('SET', '@layout', ARGV[2])
return 1
