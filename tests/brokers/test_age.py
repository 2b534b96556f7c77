"""Servers that are too old are told of by every adapter's check."""

from typing import Any

import pytest

from oraculo.brokers.age import warning_of_age
from oraculo.brokers.nats import NatsBroker
from oraculo.brokers.nats import broker as nats
from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.brokers.rabbitmq import broker as rabbitmq
from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.brokers.redis_streams import broker as redis_streams
from tests.servers.fleet import Fleet

ADAPTERS = {
    "rabbitmq": (rabbitmq, RabbitMQBroker),
    "redis": (redis_streams, RedisStreamsBroker),
    "nats": (nats, NatsBroker),
}


@pytest.mark.parametrize("version", ["3.10.0", "3.10", "3.100.1", "4.0.5", "v9", "of an unknown version", ""])
def test_what_is_new_enough_or_cannot_be_read_is_no_reason_to_warn(version: str) -> None:
    assert not warning_of_age(version, (3, 10))


@pytest.mark.parametrize("version", ["3.9.99", "3.8.9", "2.10.1", "3.9-rc.1"])
def test_what_is_too_old_is_told_with_what_is_needed(version: str) -> None:
    assert warning_of_age(version, (3, 10)) == "; it is too old: 3.10 or newer is needed"


@pytest.mark.parametrize("name", ADAPTERS)
async def test_the_check_of_a_server_warns_only_of_one_that_is_too_old(
    fleet: Fleet, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, adapter = ADAPTERS[name]
    broker: Any = adapter(fleet.url(name))
    await broker.start()
    try:
        assert "too old" not in await broker.check()
        monkeypatch.setattr(module, "OLDEST", (99, 1))
        assert "; it is too old: 99.1 or newer is needed" in await broker.check()
    finally:
        await broker.close()
