import pytest

# The suite ships with the package, and the stages are no test modules; without this their asserts would fail without
# showing what they compared.
pytest.register_assert_rewrite(
    "oraculo.testing.broker_dead_letters",
    "oraculo.testing.broker_stage",
    "oraculo.testing.broker_suite",
    "tests.brokers.nats_stage",
    "tests.brokers.rabbitmq_stage",
    "tests.brokers.redis_streams_stage",
)
