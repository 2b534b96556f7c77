"""The servers of one test session: each started when it is first asked for, all stopped at the end.

All processes of a parallel run share the servers that take long to start: the first process that asks starts one, and
leaves its description in the folder of the run. On RabbitMQ each module of tests has a vhost of its own.
"""

import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

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
# For what takes long on RabbitMQ, and depends little on which it is.
REDIS_FIRST = ("redis", *(pytest.param(name, marks=pytest.mark.long) for name in ("rabbitmq", "nats")))
_MAKERS: dict[str, Callable[[], Server]] = {
    "rabbitmq": RabbitMQ,
    "redis": Valkey,
    "nats": Nats,
    "postgres": Postgres,
    "mongodb": Mongo,
}
_TOGETHER = ("rabbitmq", "mongodb")


class Fleet:
    def __init__(self, together: Path | None = None) -> None:
        """`together`: the folder that all processes of a test run share. Without it, servers are this process' own."""
        self._together = together
        self._vhosts = count(1)
        self._shared: dict[str, Server] = {}
        self._breakable: dict[str, Server] = {}
        self.skipped: dict[str, str] = {}  # and why
        self._slowness = 0.0

    def url(self, name: str) -> str:
        """Of a server that tests share and leave in peace."""
        return os.environ.get(f"ORACULO_TEST_{name.upper()}_URL") or self.server(name).url

    def server(self, name: str) -> Server:
        server = self._running(self._shared, name)
        if self._together and isinstance(server, RabbitMQ) and server.vhost == "/":
            server.enter_vhost(f"tests-{os.getpid()}-{next(self._vhosts)}")
        return server

    def end_module(self) -> None:
        """Forget what the tests of one module left on the RabbitMQ that all share."""
        server = self._shared.get("rabbitmq")
        if isinstance(server, RabbitMQ) and server.vhost != "/":
            server.leave_vhost()

    def breakable(self, name: str) -> Server:
        """One that a test may kill or freeze; the next one finds it running again."""
        return self._running(self._breakable, name)

    def mongo_slowness(self) -> float:
        """Return the factor by which tests of MongoDB multiply their time limits: 1 for a native server."""
        self._slowness = self._slowness or slowness(self.url("mongodb"))
        return self._slowness

    def stop(self) -> None:
        """Stop the servers of this process."""
        own = [server for name, server in self._shared.items() if not (self._together and name in _TOGETHER)]
        for server in (*own, *self._breakable.values()):
            server.stop()

    def stop_together(self) -> None:
        """Stop the servers of all processes."""
        assert self._together is not None
        for description in self._together.glob("*.pickle"):
            pickle.loads(description.read_bytes()).stop()

    def _running(self, servers: dict[str, Server], name: str) -> Server:
        if name in os.environ.get("ORACULO_TEST_SKIP", "").split(","):
            self.skipped[name] = "left out by ORACULO_TEST_SKIP"
        if name in self.skipped:
            pytest.skip(f"{name}: {self.skipped[name]}")
        try:
            if name not in servers:
                is_together = self._together and servers is self._shared and name in _TOGETHER
                servers[name] = self._joined(name) if is_together else _started(name)
            elif not servers[name].is_running:
                servers[name].start()
        except ServerMissing as missing:
            pytest.fail(
                f"{missing}\nTests need a real {name}; ORACULO_TEST_SKIP={name} goes without it.", pytrace=False
            )
        return servers[name]

    def _joined(self, name: str) -> Server:
        assert self._together is not None
        description = self._together / f"{name}.pickle"
        with _alone(self._together / f"{name}.lock"):
            if not description.exists():
                description.write_bytes(pickle.dumps(_started(name)))
        server: Server = pickle.loads(description.read_bytes())
        return server


def _started(name: str) -> Server:
    server = _MAKERS[name]()
    server.start()
    return server


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
