"""The stream under pika, on both event loops: whatever the peer does, it is told at once and in words."""

import asyncio
import socket
from typing import Any, cast

import pytest

from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.brokers.rabbitmq.transport import LoopServices
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import publish_all
from tests.brokers import event_loops
from tests.brokers import rabbitmq_stage as stage
from tests.brokers.event_loops import Run
from tests.brokers.rabbitmq_stage import assert_nothing_is_left, fresh_name, messages, published, running, silent_server
from tests.servers.fleet import Fleet
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ
from tests.waiting import until

nothing_goes_unheard = stage.nothing_goes_unheard
run = event_loops.run  # a fixture


@pytest.mark.parametrize("greeting", [b"", b"220 mail.example ESMTP\r\n"], ids=["silent", "speaks first"])
def test_a_peer_that_closes_at_once_is_told_so(run: Run, greeting: bytes) -> None:
    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    async def check() -> None:
        peer = await asyncio.start_server(close, "127.0.0.1", 0)
        broker = RabbitMQBroker(f"amqp://127.0.0.1:{peer.sockets[0].getsockname()[1]}", connect_timeout=30)
        for _ in range(5):  # what the loop sees first is a matter of luck
            with pytest.raises(BrokerUnavailable, match=r"it closed the connection|Connection reset by peer"):
                await broker.start()
        await broker.close()
        peer.close()
        await assert_nothing_is_left()

    run(check())


def test_a_tls_connection_that_is_cut_is_made_again(run: Run, fleet: Fleet) -> None:
    """The peer is gone without the good-bye that TLS asks for, as when it is killed."""
    server = cast("RabbitMQ", fleet.server("rabbitmq"))

    async def check(proxy: Proxy) -> None:
        queue = fresh_name()
        async with running(proxy.url) as broker:
            await publish_all(broker, messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.take(1)
            await asyncio.to_thread(proxy.cut)
            with pytest.raises(BrokerUnavailable, match="is lost"):
                await asyncio.wait_for(consumer.take(1), 10)
            await published(broker, messages(queue, 1))
            again = await broker.consume(queue, prefetch=10)
            assert await again.take(10)

    with Proxy(server.tls_url) as proxy:
        run(check(proxy))


@pytest.mark.parametrize("turns", range(4))
def test_an_attempt_that_is_given_up_leaves_no_socket(run: Run, turns: int) -> None:
    """pika hears nothing of it, or has it whole."""

    class Protocol:
        def connection_made(self, transport: object) -> None: ...
        def connection_lost(self, error: object) -> None: ...
        def eof_received(self) -> None: ...

    async def check() -> None:
        peer = silent_server()
        sock = socket.create_connection(peer.getsockname())
        sock.setblocking(False)
        outcomes: list[Any] = []
        services = LoopServices(asyncio.get_running_loop())
        attempt = services.create_streaming_connection(Protocol, sock, outcomes.append)
        for _ in range(turns):
            await asyncio.sleep(0)
        assert attempt.cancel() is not bool(outcomes)
        if outcomes:
            outcomes[0][0].abort()
        await until(lambda: sock.fileno() < 0, saying="the socket to be closed")
        assert len(outcomes) <= 1
        peer.close()
        await assert_nothing_is_left()

    run(check())
