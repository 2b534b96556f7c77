"""Real servers for the tests and the benchmarks, started on private ports and stopped by pid.

A URL in the environment (`ORACULO_TEST_RABBITMQ_URL`, `…_REDIS_URL`, `…_NATS_URL`, `…_POSTGRES_URL`, `…_MONGODB_URL`)
replaces the one that would be started. A server that cannot be had fails the run, unless `ORACULO_TEST_SKIP` names it;
the summary then says so.
"""
