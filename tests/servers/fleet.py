"""The servers of one test session: each started when it is first asked for, all stopped at the end."""

import os
from collections.abc import Callable

import pytest

from tests.servers.mongo import Mongo, slowness
from tests.servers.nats import Nats
from tests.servers.postgres import Postgres
from tests.servers.process import Server, ServerMissing
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.valkey import Valkey

BROKERS = ("rabbitmq", "redis", "nats")
# For what depends little on which it is: the others are for the long form.
ONE_BROKER = (BROKERS[0], *(pytest.param(name, marks=pytest.mark.long) for name in BROKERS[1:]))
_MAKERS: dict[str, Callable[[], Server]] = {
    "rabbitmq": RabbitMQ,
    "redis": Valkey,
    "nats": Nats,
    "postgres": Postgres,
    "mongodb": Mongo,
}


class Fleet:
    def __init__(self) -> None:
        self._shared: dict[str, Server] = {}
        self._breakable: dict[str, Server] = {}
        self.skipped: dict[str, str] = {}  # and why
        self._slowness = 0.0

    def url(self, name: str) -> str:
        """Of a server that tests share and leave in peace."""
        return os.environ.get(f"ORACULO_TEST_{name.upper()}_URL") or self.server(name).url

    def server(self, name: str) -> Server:
        return self._running(self._shared, name)

    def breakable(self, name: str) -> Server:
        """One that a test may kill or freeze; the next one finds it running again."""
        return self._running(self._breakable, name)

    def mongo_slowness(self) -> float:
        """Return the factor by which tests of MongoDB multiply their time limits: 1 for a native server."""
        self._slowness = self._slowness or slowness(self.url("mongodb"))
        return self._slowness

    def stop(self) -> None:
        for server in (*self._shared.values(), *self._breakable.values()):
            server.stop()

    def _running(self, servers: dict[str, Server], name: str) -> Server:
        if name in os.environ.get("ORACULO_TEST_SKIP", "").split(","):
            self.skipped[name] = "left out by ORACULO_TEST_SKIP"
        if name in self.skipped:
            pytest.skip(f"{name}: {self.skipped[name]}")
        try:
            if name not in servers:
                server = servers[name] = _MAKERS[name]()
                server.start()
            elif not servers[name].is_running:
                servers[name].start()
        except ServerMissing as missing:
            pytest.fail(
                f"{missing}\nTests need a real {name}; ORACULO_TEST_SKIP={name} goes without it.", pytrace=False
            )
        return servers[name]
