"""NATS JetStream: consumers that must not go deaf; connections, servers and processes that break."""

import asyncio
import gc
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from oraculo.brokers.nats import NatsBroker
from oraculo.brokers.nats.connection import Connection
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import BrokerStatus, Outgoing, publish_all
from tests.brokers import nats_stage as stage
from tests.brokers.nats_stage import (
    PATIENCE,
    PROMPT,
    BareNats,
    api,
    assert_fails_soon,
    bodies,
    drain,
    eventually,
    is_empty,
    numbered,
    plain_client,
    ready,
    running,
    stays_quiet,
    take,
)
from tests.receipts import takers
from tests.servers.fleet import Fleet
from tests.servers.nats import Nats
from tests.servers.proxy import Proxy
from tests.waiting import until

url, queue = stage.url, stage.queue  # fixtures


# -- deaf consumers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("while_waiting", [True, False])
async def test_a_consumer_deleted_on_the_server_is_noticed_and_made_again(
    url: str, queue: str, while_waiting: bool
) -> None:
    async with running(url, heartbeat=5.0) as broker, plain_client(url) as client:  # silence would tell later
        await publish_all(broker, numbered(queue, 2))
        consumer = await broker.consume(queue, prefetch=3)
        held = await take(consumer, 2)
        if not while_waiting:
            await api(client, f"CONSUMER.DELETE.{queue}.{queue}")
        taking = asyncio.create_task(consumer.take(1))
        if while_waiting:
            await asyncio.wait({taking}, timeout=0.1)
            await api(client, f"CONSUMER.DELETE.{queue}.{queue}")
        assert queue in await assert_fails_soon(taking, PROMPT)
        await assert_fails_soon(consumer.take(1), 0.1)
        await assert_fails_soon(consumer.ack(held), 0.1)
        assert broker.statuses()[0].trouble is not None
        assert bodies(await take(await broker.consume(queue, prefetch=2), 2, PROMPT)) == [b"0", b"1"]
        assert broker.statuses() == [BrokerStatus("nats", None)]


async def test_a_stream_deleted_on_the_server_is_noticed_and_made_again(url: str, queue: str) -> None:
    async with running(url, heartbeat=5.0) as broker, plain_client(url) as client:  # silence would tell later
        consumer = await broker.consume(queue, prefetch=1)
        taking = asyncio.create_task(consumer.take(1))
        await asyncio.wait({taking}, timeout=0.1)
        await api(client, f"STREAM.DELETE.{queue}")
        await assert_fails_soon(taking, PROMPT)
        consumer = await broker.consume(queue, prefetch=1)
        await publish_all(broker, [Outgoing(queue, b"new")])
        assert bodies(await take(consumer, 1, PROMPT)) == [b"new"]


async def test_publishing_to_a_stream_that_was_deleted_makes_it_again(url: str, queue: str) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue])
        await api(client, f"STREAM.DELETE.{queue}")
        await api(client, f"STREAM.DELETE.{queue}=dlq")
        await publish_all(broker, [*numbered(queue, 3), Outgoing(queue, b"bad", reason="r")])
        consumer = await broker.consume(queue, prefetch=3)
        assert bodies(await take(consumer, 3, PROMPT)) == [b"0", b"1", b"2"]
        assert len(await broker.dead_letters(queue, limit=2)) == 1


async def test_a_black_hole_is_noticed_by_its_silence(url: str, queue: str) -> None:
    with Proxy(url) as proxy:
        async with running(proxy.url, heartbeat=0.2) as broker:
            consumer = await broker.consume(queue, prefetch=1)
            taking = asyncio.create_task(consumer.take(1))
            await asyncio.wait({taking}, timeout=0.1)
            proxy.swallows = True
            assert "heartbeats" in await assert_fails_soon(taking, 2.0)
            proxy.swallows = False


async def test_a_subscription_that_waits_long_stays_alive(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pulls end and are made again."""
    monkeypatch.setattr("oraculo.brokers.nats.consumer.PULL_EXPIRES", 0.3)
    async with running(url, heartbeat=0.1) as broker:
        consumer = await broker.consume(queue, prefetch=5)
        await stays_quiet(consumer, 1.2)
        await publish_all(broker, numbered(queue, 5))
        assert len(await take(consumer, 5, PROMPT)) == 5


# -- connections and servers that break -----------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1000, 2])
async def test_a_slow_line_takes_its_time_until_it_falls_silent(
    url: str, queue: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oraculo.brokers.nats.publisher.WINDOW", window)
    batch = [Outgoing(queue, bytes(64 * 1024))] * 16
    with Proxy(url) as proxy:
        async with running(url) as near, running(proxy.url, publish_timeout=1.0) as broker:
            await broker.declare([queue])
            proxy.delay = 0.1  # for each 64 kB, at most
            began = time.monotonic()
            await asyncio.gather(broker.publish(batch[:10]), broker.publish(batch[10:]))
            assert time.monotonic() - began > 1.5, "the line was not slow"
            assert broker.statuses()[0].trouble is None
            assert await ready(near, queue, 16)
            publishing = asyncio.create_task(broker.publish(batch))

            async def has_begun() -> bool:
                (state,) = await near.queues([queue])
                return state.ready > 18

            await eventually(has_begun)
            proxy.swallows = True
            assert "did not confirm" in await assert_fails_soon(publishing, 3.0)
            proxy.cut()


async def test_confirms_that_drip_in_are_not_waited_for_without_end(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oraculo.brokers.nats.broker.LONGEST", 1)
    with Proxy(url) as proxy:
        async with running(proxy.url, publish_timeout=0.5) as broker:
            await broker.declare([queue])
            proxy.delay = 0.05
            publishing = broker.publish([Outgoing(queue, bytes(64 * 1024))] * 16)
            assert "did not confirm" in await assert_fails_soon(publishing, 0.8)


async def test_a_call_for_more_queues_than_a_slow_server_makes_in_its_time_takes_longer(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oraculo.brokers.nats.publisher.MADE_TOGETHER", 2)
    queues = [f"{queue}-{number}" for number in range(8)]
    async with running(url, publish_timeout=1.0) as broker:
        make = broker._maker.make

        async def make_slowly(connection: Connection, sources: Sequence[str], *others: Any) -> Any:
            await asyncio.sleep(0.15 * len(sources))
            return await make(connection, sources, *others)

        monkeypatch.setattr(broker._maker, "make", make_slowly)
        await publish_all(broker, [Outgoing(name, b"") for name in queues])
        assert [state.ready for state in await broker.queues(queues)] == [1] * 8
        await broker.remove(queues)


async def test_a_confirm_that_the_proof_of_life_overtook_is_waited_for(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large message takes its time to be stored, and the question behind it is answered at once."""
    replied, held = Connection._replied, list[Any]()

    def overtaken(self: Connection, subject: bytes, reply: bytes, data: bytes, *rest: Any) -> None:
        if b'"seq"' in data:
            held.append((self, subject, reply, data, *rest))
            return
        replied(self, subject, reply, data, *rest)
        while held:
            asyncio.get_running_loop().call_later(0.01, replied, *held.pop())

    monkeypatch.setattr(Connection, "_replied", overtaken)
    async with running(url, publish_timeout=1.5) as broker:
        await broker.declare([queue])
        assert takers(await broker.publish([Outgoing(queue, b"large")])) == ["nats"]
        assert broker.statuses() == [BrokerStatus("nats", None)]


async def test_a_cut_connection_is_told_at_once_and_what_was_held_comes_again_at_once(url: str, queue: str) -> None:
    with Proxy(url) as proxy:
        async with running(proxy.url) as broker:
            await publish_all(broker, numbered(queue, 10))
            consumer = await broker.consume(queue, prefetch=10)
            held = await take(consumer, 4)
            await consumer.ack(held[:1])
            await eventually(lambda: ready(broker, queue, 9))
            await take(consumer, 6)
            taking = asyncio.create_task(consumer.take(1))
            await asyncio.wait({taking}, timeout=0.05)
            proxy.cut()
            said = await assert_fails_soon(taking, 2.0)
            assert broker.statuses()[0].trouble == said
            await assert_fails_soon(consumer.ack(held), 0.1)
            heir = await broker.consume(queue, prefetch=10)
            assert broker.statuses()[0].trouble is None
            again = await take(heir, 9, PROMPT)
            assert sorted(bodies(again)) == [b"%d" % number for number in range(1, 10)]
            assert {each.redeliveries for each in again} == {1}
            await consumer.close()
            await heir.ack(again)
            await eventually(lambda: is_empty(broker, queue))


_ANA = 'authorization { user: ana, password: "s3cret" }'


@pytest.mark.parametrize(
    ("trouble", "jetstream", "told"),
    [(_ANA.replace("s3cret", "other"), True, "refused the credentials"), (_ANA, False, "has no JetStream")],
    ids=["password", "JetStream"],
)
async def test_a_server_that_let_us_in_before_and_does_not_now_is_away(
    queue: str, trouble: str, jetstream: bool, told: str
) -> None:
    """It is no fault of the message that was to be sent."""
    with BareNats(_ANA) as server:
        async with running(server.url.replace("//", "//ana:s3cret@")) as broker:
            server.restart_with(trouble, jetstream=jetstream)
            await until(lambda: broker.statuses()[0].trouble)
            assert told in await assert_fails_soon(broker.publish([Outgoing(queue, b"x")]), 2.0)
            server.restart_with(_ANA)
            await publish_all(broker, [Outgoing(queue, b"x")])


async def test_a_login_that_took_too_long_is_not_blamed_on_the_credentials() -> None:
    with BareNats(_ANA.replace("{", "{ timeout: 0.1,")) as server, Proxy(server.url) as proxy:
        proxy.delay = 0.3
        broker = NatsBroker(proxy.url.replace("//", "//ana:s3cret@"))
        said = await assert_fails_soon(broker.start(), 3.5)
        assert "Authentication Timeout" in said
        assert "credentials" not in said
        proxy.delay = 0.0

        async def is_reached() -> bool:  # also where this machine once takes longer than the server allows
            with suppress(BrokerUnavailable):
                return bool(await broker.check())
            return False

        await until(is_reached)
        await broker.close()


async def test_all_who_call_after_a_break_share_one_connection(url: str, queue: str) -> None:
    with Proxy(url) as proxy:
        async with running(proxy.url) as broker:
            await broker.declare([queue])
            proxy.cut()
            await until(lambda: broker.statuses()[0].trouble)
            await asyncio.gather(*(broker.publish(numbered(queue, 10)) for _ in range(20)))
            assert proxy.cut() == 2, "one connection has two halves"


async def test_a_publish_that_is_cut_off_says_so_and_the_next_one_works(url: str, queue: str) -> None:
    with Proxy(url) as proxy:
        async with running(proxy.url) as broker:
            await broker.declare([queue])
            proxy.swallows = True
            publishing = asyncio.create_task(broker.publish(numbered(queue, 100)))
            await asyncio.wait({publishing}, timeout=0.1)
            proxy.cut()
            proxy.swallows = False
            await assert_fails_soon(publishing, 2.0)
            await publish_all(broker, [Outgoing(queue, b"after")])


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_what_is_sent_before_a_break_was_heard_of_finds_the_broker_unavailable(
    url: str, queue: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def check() -> None:
        async with running(url) as broker:
            uses: list[Callable[[], Awaitable[object]]] = [
                lambda: broker.publish(numbered(queue, 1)),
                lambda: broker.consume(queue, prefetch=1),
                broker.queues,
            ]
            for use in uses:
                await broker.declare([queue])
                assert broker._connection is not None
                for writer in broker._connection._client._writers():
                    writer.transport.abort()
                await asyncio.sleep(0)  # the socket is closed now, and its reader comes next
                with pytest.raises(BrokerUnavailable, match="was lost: it was closed"):
                    await use()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(check())


async def test_everything_unsettled_survives_a_kill_of_the_server(fleet: Fleet, queue: str) -> None:
    server = fleet.breakable("nats")
    async with running(server.url, lease=2.0) as broker:
        await publish_all(broker, [*numbered(queue, 30), Outgoing(queue, b"bad", reason="why")])
        consumer = await broker.consume(queue, prefetch=20)
        held = await take(consumer, 10)
        await consumer.ack(held[:5])
        await eventually(lambda: ready(broker, queue, 25))
        taking = asyncio.create_task(drain(consumer))
        server.kill()
        await assert_fails_soon(taking, 2.0)
        await assert_fails_soon(broker.publish([Outgoing(queue, b"lost")]), 4.0)
        server.start()
        heir = await broker.consume(queue, prefetch=50)
        seen: set[bytes] = set()
        async with asyncio.timeout(PATIENCE):
            while len(seen) < 25:
                batch = await heir.take(50)
                seen.update(bodies(batch))
                await heir.ack(batch)
        assert seen >= {b"%d" % number for number in range(5, 30)}
        (letter,) = await broker.dead_letters(queue, limit=2)
        assert letter.reason == "why"
        assert broker.statuses() == [BrokerStatus("nats", None)]


async def test_a_server_that_came_back_empty_is_used_again(queue: str) -> None:
    with Nats() as server:
        async with running(server.url) as broker:
            await publish_all(broker, [Outgoing(queue, b"gone")])
            server.kill()
            shutil.rmtree(server.folder / "jetstream")
            server.start()
            await until(lambda: broker.statuses()[0].trouble)
            await publish_all(broker, [Outgoing(queue, b"new")])
            assert bodies(await take(await broker.consume(queue, prefetch=1), 1)) == [b"new"]
            assert broker.statuses() == [BrokerStatus("nats", None)]


async def test_a_queue_for_replies_has_no_dead_letters_until_it_is_sent_commands(url: str, queue: str) -> None:
    """They would stay behind when the client deletes its queue."""
    command, reply = Outgoing(queue, b"{}", key="k"), Outgoing(queue, b"{}", is_reply=True)
    async with running(url) as broker, plain_client(url) as client:
        for _ in range(2):
            await publish_all(broker, [reply])
            await api(client, f"STREAM.DELETE.{queue}")
        missing = await api(client, f"STREAM.INFO.{queue}=dlq")
        assert missing["error"]["code"] == 404
        await publish_all(broker, [command])
        assert (await api(client, f"STREAM.INFO.{queue}=dlq"))["config"]["subjects"] == [f"{queue}.dlq"]


async def test_a_frozen_server_blocks_nobody_for_longer_than_the_timeouts(fleet: Fleet, queue: str) -> None:
    server = fleet.breakable("nats")
    # Thawed, the server may give the next message to the connection that was given up: it comes back with its lease.
    async with running(server.url, publish_timeout=0.8, connect_timeout=0.5, heartbeat=0.2, lease=1.0) as broker:
        consumer = await broker.consume(queue, prefetch=1)
        taking = asyncio.create_task(consumer.take(1))
        await asyncio.wait({taking}, timeout=0.1)
        server.freeze()
        try:
            await assert_fails_soon(broker.publish([Outgoing(queue, bytes(1024 * 1024))] * 20), 1.5)
            await assert_fails_soon(taking, 1.5)
            await assert_fails_soon(broker.publish([Outgoing(queue, b"x")]), 1.5)
            await assert_fails_soon(broker.check(), 1.5)
            assert broker.statuses()[0].trouble is not None
        finally:
            server.thaw()
        await publish_all(broker, [Outgoing(queue, b"again")])
        assert broker.statuses()[0].trouble is None
        consumer = await broker.consume(queue, prefetch=100)
        async with asyncio.timeout(PATIENCE):
            while b"again" not in bodies(await consumer.take(100)):
                pass  # some of those that were not confirmed


async def test_closing_beside_a_frozen_server_is_quick_and_leaves_nothing(fleet: Fleet, queue: str) -> None:
    server = fleet.breakable("nats")
    broker = NatsBroker(server.url, publish_timeout=30.0)
    await broker.start()
    await publish_all(broker, numbered(queue, 5))
    consumer = await broker.consume(queue, prefetch=5)
    await take(consumer, 2)
    before = asyncio.all_tasks()
    server.freeze()
    try:
        publishing = asyncio.create_task(broker.publish([Outgoing(queue, bytes(1024 * 1024))] * 20))
        taking = asyncio.create_task(consumer.take(1))
        await asyncio.wait({publishing}, timeout=0.1)
        started = time.monotonic()
        await broker.close()
        assert time.monotonic() - started < 4.0
        (outcome,) = await asyncio.gather(publishing, return_exceptions=True)
        assert isinstance(outcome, BrokerUnavailable)
        await asyncio.gather(taking, return_exceptions=True)
    finally:
        server.thaw()
    assert asyncio.all_tasks() <= before
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_nothing_is_left_behind(url: str, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    """No task, no transport, no complaint of asyncio, however it ended."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    with Proxy(url) as proxy:
        async with running(proxy.url) as broker:
            consumer = await broker.consume(queue, prefetch=5)
            publishing = [asyncio.create_task(broker.publish(numbered(queue, 500))) for _ in range(5)]
            await take(consumer, 3)
            proxy.cut()
            await asyncio.gather(*publishing, return_exceptions=True)
            with suppress(BrokerUnavailable):
                await consumer.take(1)
            await publish_all(broker, [Outgoing(queue, b"x")])
            await broker.consume(queue, prefetch=5)
            proxy.refuses = True
            proxy.cut()
            await until(lambda: broker.statuses()[0].trouble)
            calls = [asyncio.create_task(broker.check()) for _ in range(3)]
            await asyncio.wait(calls, timeout=0.05)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {BrokerUnavailable}
    assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


# -- processes that are killed --------------------------------------------------------------------------------------


_TAKES_AND_HANGS = """
import asyncio, sys
from oraculo.brokers.nats import NatsBroker

async def main():
    broker = NatsBroker(sys.argv[1], lease=1.0)
    await broker.start()
    consumer = await broker.consume(sys.argv[2], prefetch=3)
    taken = []
    while len(taken) < 3:
        taken += await consumer.take(3)
    await consumer.ack(taken[:1])
    await broker.check()
    print("holding", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_what_a_killed_process_held_is_delivered_again(url: str, queue: str) -> None:
    async with running(url, lease=1.0) as broker:
        await publish_all(broker, numbered(queue, 3))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _TAKES_AND_HANGS, url, queue, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(PATIENCE):
                assert await process.stdout.readline() == b"holding\n"
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        again = await take(await broker.consume(queue, prefetch=3), 2, PROMPT)
        assert [(each.body, each.redeliveries) for each in again] == [(b"1", 1), (b"2", 1)]
