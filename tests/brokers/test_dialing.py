"""Brokers under a name with several addresses, of which the first says nothing; on both event loops."""

import asyncio
import gc
import socket
import threading
from typing import Any

import pytest

from oraculo.brokers.nats import NatsBroker
from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.clients.dialing import dialed
from tests.brokers import event_loops
from tests.brokers.event_loops import Run
from tests.servers.fleet import Fleet
from tests.servers.names import NAME, give_addresses, silent_address
from tests.servers.process import free_port

run = event_loops.run  # a fixture


@pytest.mark.parametrize(("kind", "make"), [("redis", RedisStreamsBroker), ("nats", NatsBroker)])
def test_the_address_that_answers_is_found(
    run: Run, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, kind: str, make: Any
) -> None:
    url = fleet.url(kind)

    async def check() -> None:
        with silent_address() as silent:
            give_addresses(monkeypatch, silent, ("127.0.0.1", fleet.server(kind).port))
            broker = make(url.replace("127.0.0.1", NAME))
            await broker.start()
            assert NAME in await broker.check()
            await broker.close()

    run(check())


def test_an_attempt_leaves_nothing_behind(
    run: Run, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    async def check() -> None:
        with silent_address() as silent, socket.create_server(("127.0.0.1", 0)) as server:
            give_addresses(monkeypatch, silent, server.getsockname())
            with await dialed(NAME, 0) as found:
                assert found.getpeername() == server.getsockname()
                assert found.proto == socket.IPPROTO_TCP  # else asyncio would send small things late
            give_addresses(monkeypatch, silent, silent)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(dialed(NAME, 0), 0.3)  # when both are tried
            give_addresses(monkeypatch, ("127.0.0.1", free_port()), ("127.0.0.1", free_port()))
            with pytest.raises(ConnectionRefusedError):
                await dialed(NAME, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    gc.collect()
    recwarn.clear()  # of what earlier tests left
    run(check())
    gc.collect()
    assert not [str(warning.message) for warning in recwarn]


def test_names_that_nobody_tells_of_keep_no_other_from_being_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold their threads long after they were given up: the event loop has few."""
    answered, real = threading.Event(), socket.getaddrinfo

    def resolve(host: Any, *args: Any, **wanted: Any) -> Any:
        if host == "silent.test" and not wanted.get("flags"):
            answered.wait(10)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real(host, *args, **wanted)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    async def check() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            silent = [asyncio.wait_for(dialed("silent.test", port), 0.1) for _ in range(40)]
            assert {type(each) for each in await asyncio.gather(*silent, return_exceptions=True)} == {TimeoutError}
            for host in ("localhost", "127.0.0.1"):
                (await asyncio.wait_for(dialed(host, port), 2)).close()

    try:
        run(check())
    finally:
        answered.set()
