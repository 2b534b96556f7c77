"""Redis Streams: the suite every broker passes, and what is its own."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.brokers.redis_streams.consumer import RedisConsumer
from oraculo.brokers.redis_streams.layout import NO_REASON
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings
from oraculo.ports.broker import Broker, Delivery, Outgoing, QueueState
from oraculo.testing.broker_suite import GARBAGE, BrokerSuite
from tests.servers.certificates import make_certificates
from tests.servers.fleet import Fleet
from tests.servers.process import Server, free_port
from tests.servers.proxy import Proxy
from tests.servers.valkey import Valkey
from tests.test_plain_workers import PLAIN, Start, installed, start  # noqa: F401 - fixtures
from tests.waiting import until

LEASE = 0.4  # where a test waits for one to run out
PATIENCE = 15.0
PROMPTLY = 6.0  # on a busy machine; without what is tested it would be the lease of a minute, or never
ENDS = ("", ".dlq", ":delayed")


class TestConformance(BrokerSuite):
    @pytest.fixture(autouse=True)
    def _server(self, fleet: Fleet) -> None:
        self.url = fleet.url("redis")

    async def make_broker(self) -> Broker:
        return RedisStreamsBroker(self.url, delivery_limit=self.delivery_limit)

    async def forget(self, queues: Sequence[str]) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.delete(*(queue + end for queue in queues for end in ENDS))


# What the tests are written with.


@pytest.fixture
def url(fleet: Fleet) -> str:
    return fleet.url("redis")


@pytest.fixture
def plain(url: str) -> Iterator[Any]:
    """A client that knows nothing of ORÁCULO."""
    with redis.Redis.from_url(url) as client:
        yield client


@pytest.fixture
def queue(plain: Any) -> Iterator[str]:
    name = fresh_name()
    yield name
    plain.delete(*(name + end for end in ENDS))


@pytest.fixture
def server(fleet: Fleet) -> Iterator[Server]:
    """One that may be killed, frozen or flushed."""
    server = fleet.breakable("redis")
    yield server
    if server.is_running:
        server.thaw()


def fresh_name() -> str:
    return f"test-{uuid.uuid4().hex}"


@asynccontextmanager
async def started(url: str, **options: Any) -> AsyncIterator[RedisStreamsBroker]:
    broker = RedisStreamsBroker(url, **options)
    try:
        await broker.start()
        yield broker
    finally:
        await broker.close()


async def take(consumer: RedisConsumer, count: int, *, within: float = PATIENCE) -> list[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(within):
        while len(taken) < count:
            taken += await consumer.take(count - len(taken))
    return taken


async def state(broker: RedisStreamsBroker, queue: str) -> QueueState:
    (found,) = await broker.queues([queue])
    return found


def messages(queue: str, count: int) -> list[Outgoing]:
    return [Outgoing(queue, b"%d" % number) for number in range(count)]


def bodies(deliveries: Sequence[Delivery]) -> list[int]:
    return [int(delivery.body) for delivery in deliveries]


async def waiting(consumer: RedisConsumer) -> "asyncio.Task[Sequence[Delivery]]":
    """A take that waits on the server by now."""
    taking = asyncio.create_task(consumer.take(10))
    await asyncio.wait({taking}, timeout=0.1)
    assert not taking.done()
    return taking


async def seconds_of(call: Awaitable[object]) -> tuple[float, BaseException | None]:
    """How long it took, and what it raised."""
    began = asyncio.get_running_loop().time()
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    return asyncio.get_running_loop().time() - began, outcome if isinstance(outcome, BaseException) else None


def succeeds(call: Callable[[], Awaitable[object]]) -> Callable[[], Any]:
    async def attempt() -> bool:
        try:
            await call()
        except BrokerUnavailable:
            return False
        return True

    return attempt


class TestPlainClients:
    async def test_what_one_publishes_is_delivered(self, url: str, plain: Any, queue: str) -> None:
        plain.xadd(queue, {"body": b"early"})
        async with started(url) as broker:
            consumer = await broker.consume(queue, prefetch=10)
            plain.xadd(queue, {"body": b"late"})
            taken = await take(consumer, 2)
            assert [(each.body, each.redeliveries) for each in taken] == [(b"early", 0), (b"late", 0)]
            await consumer.ack(taken)
            assert plain.xlen(queue) == 0

    async def test_one_consumes_what_is_published(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish(messages(queue, 2))
            ((_, entries),) = read_plain(plain, queue)
            assert [fields for _, fields in entries] == [{b"body": b"0"}, {b"body": b"1"}]
            assert (await state(broker, queue)).unacked == 2
            for entry, _ in entries:
                plain.xack(queue, queue, entry)
                plain.xdel(queue, entry)
            found = await state(broker, queue)
            assert (found.ready, found.unacked) == (0, 0)

    async def test_both_share_a_queue(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            consumer = await broker.consume(queue, prefetch=1)
            await broker.publish(messages(queue, 2))
            assert bodies(await take(consumer, 1)) == [0]
            ((_, entries),) = read_plain(plain, queue)
            assert [fields[b"body"] for _, fields in entries] == [b"1"]
            assert (await state(broker, queue)).consumers == 2

    async def test_what_one_acked_and_did_not_delete_is_not_ready(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish(messages(queue, 3))
            if "lag" not in plain.xinfo_groups(queue)[0]:
                pytest.skip("Redis tells what was never delivered since version 7")
            ((_, entries),) = read_plain(plain, queue, count=2)
            plain.xack(queue, queue, *(entry for entry, _ in entries))
            found = await state(broker, queue)
            assert (found.ready, found.unacked) == (1, 0)

    async def test_what_one_left_pending_is_claimed_when_its_lease_is_over(
        self, url: str, plain: Any, queue: str
    ) -> None:
        async with started(url, lease=LEASE) as broker:
            await broker.publish(messages(queue, 2))
            read_plain(plain, queue)
            taken = await take(await broker.consume(queue, prefetch=10), 2)
            assert [each.redeliveries for each in taken] == [1, 1]

    async def test_a_queue_may_have_a_lease_of_its_own(self, url: str, plain: Any, queue: str) -> None:
        async with started(url, lease=60, leases={queue: LEASE}) as broker:
            await broker.publish(messages(queue, 2))
            read_plain(plain, queue)
            taken = await take(await broker.consume(queue, prefetch=10), 2)
            assert [each.redeliveries for each in taken] == [1, 1]

    async def test_fields_of_others_are_carried_along(self, url: str, plain: Any, queue: str) -> None:
        fields = {b"body": b"x", b"colour": b"blue \xff"}
        async with started(url) as broker:
            plain.xadd(queue, fields)
            consumer = await broker.consume(queue, prefetch=1)
            for delay in (0.0, 0.01):
                await consumer.retry((await take(consumer, 1))[0], delay, "again")
            await consumer.dead_letter((await take(consumer, 1))[0], "bad")
            ((_, letter),) = plain.xrange(queue + ".dlq")
            assert letter.items() >= {**fields, b"reason": b"bad", b"redeliveries": b"2"}.items()
            await broker.redrive(queue)
            ((_, redriven),) = plain.xrange(queue)
            assert redriven == fields

    async def test_an_entry_without_a_body_goes_every_way(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            plain.xadd(queue, {"other": "field", "redeliveries": "-7x"})
            consumer = await broker.consume(queue, prefetch=1)
            (delivery,) = await take(consumer, 1)
            assert (delivery.body, delivery.redeliveries) == (b"", 0)
            await consumer.retry(delivery, 0.0, "again")
            await consumer.dead_letter((await take(consumer, 1))[0], "no body")
            (letter,) = await broker.dead_letters(queue, limit=5)
            assert (letter.body, letter.reason, letter.redeliveries) == (b"", "no body", 1)
            assert await broker.redrive(queue) == 1
            assert (await take(consumer, 1))[0].redeliveries == 0

    async def test_garbage_in_the_dead_letter_queue_is_shown_and_redriven(
        self, url: str, plain: Any, queue: str
    ) -> None:
        wrong = {"reason": b"\xff\xfe", "at": "yesterday", "redeliveries": "many"}
        for body in GARBAGE:
            plain.xadd(queue + ".dlq", {"body": body})
        plain.xadd(queue + ".dlq", {"body": b"wrong", **wrong})
        plain.xadd(queue + ".dlq", {"nothing": "known"}, id="*")
        async with started(url) as broker:
            letters = await broker.dead_letters(queue, limit=100)
            assert [letter.body for letter in letters] == [*GARBAGE, b"wrong", b""]
            assert {letter.reason for letter in letters[:-2]} == {NO_REASON}
            assert all(abs(letter.at - time.time()) < 60 for letter in letters)
            assert all(letter.redeliveries == 0 for letter in letters)
            assert (await state(broker, queue)).dead_letters == len(letters)
            assert await broker.redrive(queue, [letters[0].id]) == 1
            assert await broker.redrive(queue) == len(letters) - 1
            taken = await take(await broker.consume(queue, prefetch=100), len(letters))
            assert [each.body for each in taken] == [*GARBAGE, b"wrong", b""]


class TestPlainWorkers:
    """Those of the examples."""

    @pytest.mark.parametrize("name", ["redis_worker.py", "node_ioredis"])
    async def test_odd_commands_are_answered_or_buried_as_they_came(
        self,
        name: str,
        start: Start,  # noqa: F811 - a fixture
    ) -> None:
        command = {"correlation_id": "c", "tipo_evento": "iniciar_coleta", "payload": {}}
        odd = [GARBAGE[2], b'{"a": "\xff"}', json.dumps(command | {"responder_em": 7}).encode()]
        fine = [command | {"responder_em": None}, command | {"responder_em": "other"}, command]
        with Valkey() as server, redis.Redis.from_url(server.url) as plain:
            for body in [*odd, *(json.dumps(each).encode() for each in fine)]:
                plain.xadd("q", {"body": body})
            worker = start(name, server.url, "q")

            def is_done() -> bool:
                worker.expect_alive()
                return bool(plain.exists("q")) and plain.xlen("q") == 0

            await until(is_done, within=PATIENCE)
            assert [fields[b"body"] for _, fields in plain.xrange("q.dlq")] == odd
            assert (plain.xlen("resultados"), plain.xlen("other")) == (2, 1)

    @pytest.mark.parametrize("settled", [True, False])
    def test_what_another_has_claimed_is_passed_over(self, url: str, plain: Any, queue: str, settled: bool) -> None:
        spec = importlib.util.spec_from_file_location("redis_worker", PLAIN / "redis_worker.py")
        assert spec is not None
        assert spec.loader is not None
        worker = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(worker)
        plain.xgroup_create(queue, queue, "0", mkstream=True)
        plain.xadd(queue, {"body": b"{}"})
        plain.xreadgroup(queue, "me", {queue: ">"})
        read = worker.read

        def read_slowly(client: Any, queue: str, name: str, after: str) -> Any:
            if after == ">":
                raise EOFError
            found = read(client, queue, name, after)
            for entry, _ in found:
                plain.xclaim(queue, queue, "another", 0, [entry])
                if settled:
                    plain.xack(queue, queue, entry)
                    plain.xdel(queue, entry)
            return found

        worker.read = read_slowly  # type: ignore[attr-defined]
        with pytest.raises(EOFError):
            worker.main(url, queue, "me")
        assert plain.xlen(queue + ".dlq") == 0
        assert plain.xpending(queue, queue)["pending"] == (0 if settled else 1)


def read_plain(plain: Any, queue: str, *, count: int = 10) -> Any:
    """As a worker without the SDK does."""
    found = plain.xreadgroup(queue, "plain", {queue: ">"}, count=count)
    return [(name, entries) for name, entries in (found.items() if isinstance(found, dict) else found)]


class TestLostConnections:
    async def test_a_cut_ends_a_take_at_once_and_a_new_consumer_gets_what_was_out(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with started(proxy.url) as broker:
                await broker.publish(messages(queue, 3))
                consumer = await broker.consume(queue, prefetch=10)
                taken = await take(consumer, 3)
                await consumer.ack(taken[:1])
                taking = await waiting(consumer)
                proxy.cut()
                took, error = await seconds_of(taking)
                assert isinstance(error, BrokerUnavailable)
                assert "lost" in str(error)
                assert took < PROMPTLY
                assert "lost" in str(broker.links()[0].trouble)
                with pytest.raises(BrokerUnavailable):
                    await consumer.take(1)
                again = await take(await broker.consume(queue, prefetch=10), 2, within=PROMPTLY)
                assert sorted(bodies(again)) == [1, 2]
                assert {each.redeliveries for each in again} == {1}
                assert broker.links()[0].trouble is None
                await consumer.ack(taken)
                await consumer.retry(taken[1], 0.0, "too late")
                assert (await state(broker, queue)).unacked == 2

    async def test_closing_a_lost_consumer_gives_back_too(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with started(proxy.url) as broker, started(url) as other:
                heir = await other.consume(queue, prefetch=10)
                await broker.publish(messages(queue, 1))
                consumer = await broker.consume(queue, prefetch=10)
                await heir.close()
                await take(consumer, 1)
                proxy.cut()
                await consumer.close()
                (again,) = await take(await other.consume(queue, prefetch=10), 1, within=PROMPTLY)
                assert again.redeliveries == 1

    async def test_calls_come_back_by_themselves(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with started(proxy.url) as broker:
                for _ in range(3):
                    proxy.cut()
                    await until(lambda: broker.links()[0].trouble is not None, saying="trouble")
                    await broker.publish(messages(queue, 1))
                    assert broker.links()[0].trouble is None
                assert (await state(broker, queue)).ready == 3

    async def test_while_it_cannot_connect_every_call_says_so(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with started(proxy.url) as broker:
                proxy.refuses = True
                proxy.cut()
                calls: list[Awaitable[object]] = [
                    broker.publish(messages(queue, 1)),
                    broker.publish(messages(queue, 1)),
                    broker.declare([queue]),
                    broker.consume(queue, prefetch=1),
                    broker.queues(),
                    broker.dead_letters(queue, limit=1),
                    broker.redrive(queue),
                    broker.discard(queue, ["1-1"]),
                    broker.check(),
                ]
                for outcome in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(outcome, BrokerUnavailable)
                    assert f"127.0.0.1:{proxy.port}" in str(outcome)
                proxy.refuses = False
                await broker.publish(messages(queue, 1))

    async def test_one_attempt_serves_all_who_ask_at_once(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with started(proxy.url) as broker:
                proxy.cut()
                await until(lambda: broker.links()[0].trouble is not None, saying="trouble")
                await asyncio.gather(*(broker.publish(messages(queue, 1)) for _ in range(20)))
                assert proxy.cut() == 2  # the two halves of one connection

    async def test_a_black_hole_ends_a_take_in_time(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with started(proxy.url, publish_timeout=0.5, connect_timeout=0.5) as broker:
                consumer = await broker.consume(queue, prefetch=10)
                taking = await waiting(consumer)
                proxy.swallows = True
                took, error = await seconds_of(taking)
                assert isinstance(error, BrokerUnavailable)
                assert took < 1.0 + 0.5 + PROMPTLY

    async def test_a_message_for_a_waiter_that_is_gone_is_not_kept_from_others(self, url: str, queue: str) -> None:
        """The server still keeps the read of a consumer that cannot hear it any more."""
        with Proxy(url) as proxy:
            async with started(url) as other, started(proxy.url, publish_timeout=0.5, connect_timeout=0.5) as broker:
                taking = await waiting(await broker.consume(queue, prefetch=10))
                proxy.swallows = True
                await other.publish(messages(queue, 1))  # delivered into the black hole
                assert isinstance((await seconds_of(taking))[1], BrokerUnavailable)
                proxy.cut()
                proxy.swallows = False
                (again,) = await take(await broker.consume(queue, prefetch=10), 1)
                assert again.redeliveries == 1


class TestServerFailures:
    async def test_after_kill_9_everything_unsettled_comes_again(self, server: Server) -> None:
        queue = fresh_name()
        async with started(server.url) as broker:
            await broker.publish(messages(queue, 5))
            consumer = await broker.consume(queue, prefetch=3)
            taken = await take(consumer, 3)
            await consumer.ack(taken[:1])
            taking = await waiting(await broker.consume(fresh_name(), prefetch=1))
            server.kill()
            assert isinstance((await seconds_of(taking))[1], BrokerUnavailable)
            with pytest.raises(BrokerUnavailable, match=str(server.port)):
                await broker.publish(messages(queue, 1))
            server.start()
            again = await take(await broker.consume(queue, prefetch=10), 4)
            assert sorted(bodies(again)) == [1, 2, 3, 4]
            assert {int(each.body): each.redeliveries for each in again} == {1: 1, 2: 1, 3: 0, 4: 0}
            assert broker.links()[0].losses == 0
            assert broker.capabilities.durable

    async def test_a_frozen_server_holds_nobody_up(self, server: Server) -> None:
        queue = fresh_name()
        async with started(server.url, publish_timeout=0.5, connect_timeout=0.5) as broker:
            consumer = await broker.consume(queue, prefetch=10)
            taking = await waiting(consumer)
            server.freeze()
            for _ in range(2):  # the first on the connection that there is, the second on a new one
                took, error = await seconds_of(broker.publish(messages(queue, 1)))
                assert isinstance(error, BrokerUnavailable)
                assert took < 0.5 + 3.0
            assert "no answer" in str(broker.links()[0].trouble)
            assert isinstance((await seconds_of(taking))[1], BrokerUnavailable)
            server.thaw()
            await until(succeeds(lambda: broker.publish([Outgoing(queue, b"9")])), saying="publishing")
            fresh, seen = await broker.consume(queue, prefetch=10), list[int]()
            while 9 not in seen:  # what was published in vain may have come too
                seen += bodies(await take(fresh, 1))

    async def test_closing_takes_little_time_while_the_server_is_frozen(self, server: Server) -> None:
        queue, before = fresh_name(), asyncio.all_tasks()
        broker = RedisStreamsBroker(server.url, publish_timeout=0.5, connect_timeout=0.5)
        await broker.start()
        await broker.publish(messages(queue, 1))
        consumers = [await broker.consume(queue, prefetch=1) for _ in range(3)]
        await take(consumers[0], 1)
        taking = await waiting(consumers[1])
        server.freeze()
        took, error = await seconds_of(broker.close())
        assert error is None
        assert took < 0.5 + 3.0
        assert list(await taking) == []
        assert asyncio.all_tasks() == before

    async def test_a_server_that_cannot_be_had_is_named(self) -> None:
        port = free_port()
        broker = RedisStreamsBroker(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(BrokerUnavailable, match=f"127.0.0.1:{port}.*[Cc]onnection refused"):
            await broker.start()
        assert f":{port}" in str(broker.links()[0].trouble)
        await broker.close()

    async def test_a_full_server_is_unavailable_and_can_still_be_emptied(self, server: Server) -> None:
        queue = fresh_name()
        with redis.Redis.from_url(server.url) as plain:
            async with started(server.url, lease=LEASE) as broker:
                await broker.publish(messages(queue, 3))
                consumer = await broker.consume(queue, prefetch=3)
                (delayed,) = await take(consumer, 1)
                await consumer.retry(delayed, 0.05, "later")
                plain.config_set("maxmemory", 1)
                try:
                    with pytest.raises(BrokerUnavailable, match="maxmemory"):
                        await broker.publish(messages(queue, 1))
                    with pytest.raises(BrokerUnavailable, match="maxmemory"):
                        await broker.check()
                    taken = await take(consumer, 2)
                    with pytest.raises(BrokerUnavailable, match="maxmemory"):
                        await consumer.dead_letter(taken[0], "no room for it")
                    await consumer.ack(taken[1:])
                    assert plain.xlen(queue) == 1
                    consumer.lose("as if its connection were lost")
                    consumer = await broker.consume(queue, prefetch=3)
                    assert bodies(await take(consumer, 1)) == [1]
                finally:
                    plain.config_set("maxmemory", 0)
                again = await take(consumer, 2)
                assert {int(each.body): each.redeliveries for each in again} == {0: 1, 1: 2}

    async def test_a_server_with_too_many_clients_is_unavailable(self) -> None:
        with Valkey() as server, redis.Redis.from_url(server.url) as plain:
            async with started(server.url) as broker:
                plain.config_set("maxclients", 2)
                with pytest.raises(BrokerUnavailable, match=r"too many clients|max number of clients|was lost"):
                    await broker.consume("q", prefetch=1)
                plain.config_set("maxclients", 100)
                await broker.consume("q", prefetch=1)

    async def test_a_read_only_replica_is_unavailable(self) -> None:
        with Valkey() as replica, redis.Redis.from_url(replica.url) as plain:
            async with started(replica.url) as broker:
                await broker.publish(messages("q", 1))
                plain.replicaof("127.0.0.1", free_port())
                with pytest.raises(BrokerUnavailable, match="read-only"):
                    await broker.publish(messages("q", 1))
                with pytest.raises(BrokerUnavailable, match="read-only"):
                    await broker.check()
                plain.replicaof("NO", "ONE")
                await broker.publish(messages("q", 1))
                assert broker.links()[0].trouble is None

    async def test_a_key_that_is_no_stream_is_refused_in_words(self, url: str, plain: Any, queue: str) -> None:
        plain.set(queue, "mine")
        async with started(url) as broker:
            calls: list[Awaitable[object]] = [
                broker.publish(messages(queue, 1)),
                broker.consume(queue, prefetch=1),
                broker.declare([queue]),
                broker.queues([queue]),
            ]
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, BrokerError)
                assert not isinstance(outcome, BrokerUnavailable)
                assert "not a stream" in str(outcome)
            assert queue not in [found.queue for found in await broker.queues()]


class TestLosses:
    async def test_a_restart_without_an_append_only_file_counts_once(self) -> None:
        with Valkey(durable=False) as server:
            async with started(server.url) as broker:
                assert not broker.capabilities.durable
                for queue in ("a", "b"):
                    await broker.consume(queue, prefetch=1)
                server.kill()
                server.start()
                await until(succeeds(lambda: broker.publish(messages("a", 1))), saying="publishing")
                assert broker.links()[0].losses == 1
                for queue in ("a", "b"):
                    await broker.consume(queue, prefetch=1)
                assert broker.links()[0].losses == 1
                assert "append-only" in await broker.check()

    async def test_a_flush_counts_once_for_all_queues(self, server: Server) -> None:
        with redis.Redis.from_url(server.url) as plain:
            async with started(server.url) as broker:
                for losses in (1, 2):
                    queues = [fresh_name(), fresh_name()]
                    takes = [await waiting(await broker.consume(queue, prefetch=1)) for queue in queues]
                    plain.flushall()
                    await asyncio.gather(*(until(lambda queue=queue: plain.exists(queue)) for queue in queues))
                    assert broker.links()[0].losses == losses
                    await broker.publish([Outgoing(queue, b"1") for queue in queues])
                    async with asyncio.timeout(PATIENCE):
                        assert [len(taken) for taken in await asyncio.gather(*takes)] == [1, 1]

    async def test_queues_that_are_deleted_one_after_the_other_count_each(
        self, url: str, plain: Any, queue: str
    ) -> None:
        queues = [queue, queue + "-2"]
        async with started(url, lease=LEASE) as broker:
            takes = [await waiting(await broker.consume(each, prefetch=1)) for each in queues]
            for losses, each in enumerate(queues, 1):
                plain.delete(each)
                await until(lambda losses=losses: broker.links()[0].losses == losses, saying="the loss")
                for _ in range(3):  # rounds in which the other one shows that its queue is there
                    await until(lambda: max(idle_times(plain, queues[1])) > 50, saying="a wait")
                    await until(lambda: max(idle_times(plain, queues[1])) < 50, saying="a sign of life")
            for taking in takes:
                taking.cancel()
            await asyncio.gather(*takes, return_exceptions=True)
        plain.delete(queues[1])

    async def test_a_flush_while_nobody_was_connected_is_noticed(self, server: Server) -> None:
        queue = fresh_name()
        with Proxy(server.url) as proxy, redis.Redis.from_url(server.url) as plain:
            async with started(proxy.url) as broker:
                await broker.consume(queue, prefetch=1)
                proxy.cut()
                plain.flushall()
                await broker.consume(queue, prefetch=1)
                assert broker.links()[0].losses == 1


class TestDeafConsumers:
    """Whatever is done to it on the server, a consumer works again, with nothing but another consume at most."""

    @pytest.mark.parametrize(
        "harm",
        [
            lambda plain, queue: plain.xgroup_destroy(queue, queue),
            lambda plain, queue: plain.delete(queue),
            lambda plain, queue: plain.flushall(),
            lambda plain, queue: plain.script_flush(),
            lambda plain, queue: plain.rename(queue, queue + "-away"),
        ],
        ids=["group destroyed", "key deleted", "flushed", "scripts flushed", "renamed"],
    )
    async def test_it_heals_by_itself(self, server: Server, harm: Callable[[Any, str], object]) -> None:
        queue = fresh_name()
        with redis.Redis.from_url(server.url) as plain:
            async with started(server.url) as broker:
                consumer = await broker.consume(queue, prefetch=10)
                taking = await waiting(consumer)
                harm(plain, queue)
                plain.xadd(queue, {"body": b"7"})
                async with asyncio.timeout(PROMPTLY):
                    taken = await taking
                assert bodies(taken) == [7]
                await consumer.ack(taken)
                await broker.publish(messages(queue, 2))
                assert bodies(await take(consumer, 2)) == [0, 1]

    async def test_a_lost_group_loses_nothing_of_what_is_in_the_stream(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish(messages(queue, 4))
            consumer = await broker.consume(queue, prefetch=3)
            first, *held = await take(consumer, 3)
            await consumer.ack([first])
            plain.xgroup_destroy(queue, queue)
            await consumer.ack(held[:1])  # nothing is out any more: it must not touch what will be delivered again
            assert sorted(bodies(await take(consumer, 3))) == [1, 2, 3]
            await consumer.ack(held)
            assert (await state(broker, queue)).unacked == 3

    @pytest.mark.parametrize("how", ["kill", "unblock", "unblock with an error"])
    async def test_a_wait_that_an_operator_ends(self, url: str, plain: Any, queue: str, how: str) -> None:
        async with started(url) as broker:
            consumer = await broker.consume(queue, prefetch=10)
            taking = await waiting(consumer)
            (client,) = [each for each in plain.client_list() if each["name"] in own_consumers(plain, queue)]
            if how == "kill":
                plain.client_kill_filter(_id=client["id"])
                took, error = await seconds_of(taking)
                assert isinstance(error, BrokerUnavailable)
                assert took < PROMPTLY
                consumer = await broker.consume(queue, prefetch=10)
                taking = await waiting(consumer)
            else:
                plain.client_unblock(client["id"], error="error" in how)
            await broker.publish(messages(queue, 1))
            async with asyncio.timeout(PROMPTLY):
                assert bodies(await taking) == [0]

    async def test_a_queue_that_becomes_something_else_is_told(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            taking = await waiting(await broker.consume(queue, prefetch=1))
            plain.delete(queue)
            plain.set(queue, "mine")
            _, error = await seconds_of(taking)
            assert isinstance(error, BrokerError)
            assert "not a stream" in str(error)


def own_consumers(plain: Any, queue: str) -> list[str]:
    return [each["name"].decode() for each in plain.xinfo_consumers(queue, queue)]


class TestLeases:
    async def test_what_is_not_settled_in_time_goes_to_another(self, url: str, queue: str) -> None:
        async with started(url, lease=LEASE) as broker, started(url, lease=LEASE) as other:
            await broker.publish(messages(queue, 2))
            stuck = await broker.consume(queue, prefetch=10)
            stale = await take(stuck, 2)
            heir = await other.consume(queue, prefetch=10)
            again = await take(heir, 2)
            assert {each.redeliveries for each in again} == {1}
            await stuck.ack(stale[:1])
            await stuck.dead_letter(stale[1], "too late")
            found = await state(broker, queue)
            assert (found.unacked, found.dead_letters) == (2, 0)
            await heir.ack(again)
            found = await state(broker, queue)
            assert (found.ready, found.unacked) == (0, 0)

    async def test_extending_keeps_it(self, url: str, queue: str) -> None:
        lease = 4 * LEASE  # long enough for a busy machine to extend it in time
        async with started(url, lease=lease) as broker:
            await broker.publish(messages(queue, 2))
            busy = await broker.consume(queue, prefetch=10)
            kept, left = await take(busy, 2)
            taking = asyncio.create_task(take(await broker.consume(queue, prefetch=10), 1))
            while not taking.done():
                await busy.extend([kept])
                await asyncio.wait({taking}, timeout=lease / 16)
            assert bodies(await taking) == [int(left.body)]
            await busy.ack([kept])
            assert (await state(broker, queue)).unacked == 1

    async def test_extending_takes_nothing_from_another(self, url: str, queue: str) -> None:
        async with started(url, lease=LEASE) as broker:
            await broker.publish(messages(queue, 1))
            stuck, heir = [await broker.consume(queue, prefetch=10) for _ in range(2)]
            stale = await take(stuck, 1)
            again = await take(heir, 1)
            await stuck.extend(stale)
            await heir.ack(again)
            assert (await state(broker, queue)).unacked == 0

    async def test_running_out_too_often_ends_in_quarantine(self, url: str, queue: str) -> None:
        async with started(url, lease=LEASE, delivery_limit=2) as broker:
            await broker.publish(messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=10)
            assert [each.redeliveries for each in await take(consumer, 2)] == [0, 1]
            taking = asyncio.create_task(consumer.take(1))
            await until(shows(broker, queue, dead_letters=1), saying="the dead letter")
            (letter,) = await broker.dead_letters(queue, limit=5)
            assert "2 times" in letter.reason
            assert "lease" in letter.reason
            assert letter.redeliveries == 1
            await consumer.close()
            await taking

    async def test_a_consumer_full_of_what_it_forgot_is_not_deaf(self, url: str, queue: str) -> None:
        async with started(url, lease=LEASE) as broker:
            await broker.publish(messages(queue, 2))
            consumer = await broker.consume(queue, prefetch=2)
            stale = await take(consumer, 2)
            again = await take(consumer, 2)
            assert [each.redeliveries for each in again] == [1, 1]
            await consumer.ack(stale)
            assert (await state(broker, queue)).unacked == 2

    async def test_what_somebody_deleted_from_under_a_consumer_is_forgotten(
        self, url: str, plain: Any, queue: str
    ) -> None:
        async with started(url, lease=LEASE) as broker:
            await broker.publish(messages(queue, 3))
            taken = await take(await broker.consume(queue, prefetch=10), 3)
            ids = [entry for entry, _ in plain.xrange(queue)]
            plain.xdel(queue, *ids[:2])
            again = await take(await broker.consume(queue, prefetch=10), 1)
            assert bodies(again) == bodies(taken[2:])
            await until(shows(broker, queue, unacked=1), saying="the deleted ones forgotten")

    async def test_another_process_that_was_killed_loses_nothing(self, url: str, queue: str, tmp_path: Path) -> None:
        async with started(url, lease=LEASE) as broker:
            await broker.publish(messages(queue, 3))
            script = tmp_path / "victim.py"
            script.write_text(VICTIM)
            victim = await asyncio.create_subprocess_exec(
                sys.executable, str(script), url, queue, stdout=asyncio.subprocess.PIPE
            )
            assert victim.stdout is not None
            async with asyncio.timeout(PATIENCE):
                assert (await victim.stdout.readline()).strip() == b"3"
            os.kill(victim.pid, signal.SIGKILL)
            await victim.wait()
            again = await take(await broker.consume(queue, prefetch=10), 3)
            assert sorted(bodies(again)) == [0, 1, 2]
            assert {each.redeliveries for each in again} == {1}

    async def test_names_of_consumers_that_are_long_gone_are_deleted(self, url: str, plain: Any, queue: str) -> None:
        async with started(url, lease=LEASE / 10) as broker:
            await broker.publish(messages(queue, 1))
            plain.xgroup_createconsumer(queue, queue, "gone")
            read_plain(plain, queue)
            consumer = await broker.consume(queue, prefetch=1)
            await until(lambda: sorted(idle_times(plain, queue))[1] > LEASE * 1000, saying="two idle names")
            assert b"gone" in idle_names(plain, queue)
            await consumer.close()
            await broker.consume(queue, prefetch=1)
            names = idle_names(plain, queue)
            assert b"gone" not in names
            assert b"plain" in names  # it holds a message

    async def test_consumers_that_are_long_silent_are_not_counted(self, url: str, plain: Any, queue: str) -> None:
        async with started(url, lease=LEASE) as broker:
            await broker.publish(messages(queue, 1))
            read_plain(plain, queue)
            assert (await state(broker, queue)).consumers == 1
            await until(shows(broker, queue, consumers=0), saying="the silent one not counted")


VICTIM = """
import asyncio, sys
from oraculo.brokers.redis_streams import RedisStreamsBroker

async def main(url, queue):
    broker = RedisStreamsBroker(url)
    await broker.start()
    print(len(await (await broker.consume(queue, prefetch=10)).take(3)), flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


def shows(broker: RedisStreamsBroker, queue: str, **expected: int) -> Callable[[], Any]:
    async def look() -> bool:
        found = await state(broker, queue)
        return all(getattr(found, name) == value for name, value in expected.items())

    return look


def idle_times(plain: Any, queue: str) -> list[int]:
    """Of its consumers, in ms; of one that is not there, none."""
    try:
        return [each["idle"] for each in plain.xinfo_consumers(queue, queue)] or [0]
    except redis.ResponseError:
        return [0]


def idle_names(plain: Any, queue: str) -> set[bytes]:
    return {each["name"] for each in plain.xinfo_consumers(queue, queue)}


class TestDelays:
    async def test_a_delayed_message_survives_the_process_that_delayed_it(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish(messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry((await take(consumer, 1))[0], 0.3, "later")
        async with started(url) as other:
            found = await state(other, queue)
            assert (found.ready, found.delayed) == (1, 1)
            (again,) = await take(await other.consume(queue, prefetch=1), 1)
            assert (again.body, again.redeliveries) == (b"0", 1)

    async def test_it_reaches_a_consumer_that_waits_already(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish(messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            (delivery,) = await take(consumer, 1)
            taking = await waiting(await broker.consume(queue, prefetch=1))
            await consumer.retry(delivery, 0.05, "later")
            async with asyncio.timeout(PROMPTLY):
                assert bodies(await taking) == [0]

    async def test_many_that_are_due_at_once_all_come(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish(messages(queue, 250))
            consumer = await broker.consume(queue, prefetch=250)
            delayed = await take(consumer, 250)
            await asyncio.gather(*(consumer.retry(each, 0.05, "later") for each in delayed))
            again = await take(consumer, 250)
            assert sorted(bodies(again)) == list(range(250))
            await consumer.ack(again)
            found = await state(broker, queue)
            assert (found.ready, found.unacked) == (0, 0)

    async def test_it_is_no_queue_of_its_own(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish(messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry((await take(consumer, 1))[0], 60.0, "later")
            assert [found.queue for found in await broker.queues() if found.queue.startswith(queue)] == [queue]

    async def test_waiting_for_one_keeps_its_place_in_the_limit(self, url: str, queue: str) -> None:
        async with started(url, delivery_limit=2) as broker:
            await broker.publish(messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            for reason in ("first", "second"):
                await consumer.retry((await take(consumer, 1))[0], 0.02, reason)
            (letter,) = await broker.dead_letters(queue, limit=5)
            assert (letter.reason, letter.redeliveries) == ("second", 1)


class TestQuarantine:
    async def test_closing_too_often_ends_there(self, url: str, queue: str) -> None:
        async with started(url, delivery_limit=2) as broker:
            await broker.publish(messages(queue, 250))
            for _ in range(2):
                consumer = await broker.consume(queue, prefetch=250)
                await take(consumer, 250)
                await consumer.close()
            letters = await broker.dead_letters(queue, limit=1000)
            assert [int(letter.body) for letter in letters] == list(range(250))
            assert "closed" in letters[0].reason
            found = await state(broker, queue)
            assert (found.ready, found.unacked, found.dead_letters) == (0, 0, 250)

    async def test_a_letter_given_back_by_a_consumer_of_the_dlq_keeps_reason_and_count(
        self, url: str, queue: str
    ) -> None:
        async with started(url, delivery_limit=1) as broker:
            await broker.publish([Outgoing(queue, b"0", reason="why")])
            (before,) = await broker.dead_letters(queue, limit=5)
            for _ in range(3):
                consumer = await broker.consume(queue + ".dlq", prefetch=1)
                await consumer.retry((await take(consumer, 1))[0], 0.0, "not yet")
                await take(consumer, 1)
                await consumer.close()
            (after,) = await broker.dead_letters(queue, limit=5)
            assert (after.reason, after.at, after.redeliveries) == (before.reason, before.at, before.redeliveries)

    async def test_a_reason_may_quote_half_a_character(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish([Outgoing(queue, b"0", reason="bad: \ud800"), *messages(queue, 1)])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.dead_letter((await take(consumer, 1))[0], "bad: \ud800")
            assert [letter.reason for letter in await broker.dead_letters(queue, limit=5)] == ["bad: ?", "bad: ?"]

    async def test_a_letter_buried_again_has_the_new_reason(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish([Outgoing(queue, b"0", reason="old")])
            consumer = await broker.consume(queue + ".dlq", prefetch=1)
            await consumer.dead_letter((await take(consumer, 1))[0], "new")
            (letter,) = await broker.dead_letters(queue, limit=5)
            assert letter.reason == "new"

    async def test_paging_goes_on_behind_a_letter_that_is_gone(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish([Outgoing(queue, b"%d" % number, reason="bad") for number in range(3)])
            first, *rest = await broker.dead_letters(queue, limit=10)
            await broker.discard(queue, [first.id])
            assert await broker.dead_letters(queue, limit=10, after=first.id) == rest
            largest = "18446744073709551615-18446744073709551615"
            assert await broker.dead_letters(queue, limit=10, after=largest) == []

    @pytest.mark.parametrize("after", ["nonsense", "", "1", "1-", "-1", "1-x", "99999999999999999999-0", "1-1\n"])
    async def test_a_page_behind_no_id_at_all_is_refused(self, url: str, queue: str, after: str) -> None:
        async with started(url) as broker:
            with pytest.raises(BrokerError, match="after"):
                await broker.dead_letters(queue, limit=10, after=after)

    async def test_redriving_what_a_consumer_of_the_dlq_holds_takes_it_from_it(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish([Outgoing(queue, b"0", reason="bad")])
            consumer = await broker.consume(queue + ".dlq", prefetch=1)
            held = await take(consumer, 1)
            assert await broker.redrive(queue) == 1
            await consumer.retry(held[0], 0.0, "too late")
            found = await state(broker, queue)
            assert (found.ready, found.dead_letters) == (1, 0)

    async def test_thousands_are_redriven_once_each(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish([Outgoing(queue, b"%d" % number, reason="bad") for number in range(2500)])
            first, *_ = await broker.dead_letters(queue, limit=1)
            assert await broker.redrive(queue, [first.id, first.id]) == 1
            assert await broker.redrive(queue) == 2499
            taken = await take(await broker.consume(queue, prefetch=2500), 2500)
            assert bodies(taken) == list(range(2500))


class TestSharing:
    async def test_many_thousand_messages_pass_between_two_brokers_once_each(self, url: str, queue: str) -> None:
        count, seen = 20_000, list[int]()

        async def work(consumer: RedisConsumer) -> None:
            while batch := await consumer.take(300):
                seen.extend(bodies(batch))
                await consumer.ack(batch)

        async with started(url) as broker, started(url) as other:
            consumers = [await each.consume(queue, prefetch=1000) for each in (broker, other)]
            workers = [asyncio.create_task(work(consumer)) for consumer in consumers]
            for start in range(0, count, 1000):
                await broker.publish([Outgoing(queue, b"%d" % number) for number in range(start, start + 1000)])
            await until(lambda: len(seen) >= count, within=60, saying="all messages")
            for consumer in consumers:
                await consumer.close()
            await asyncio.gather(*workers)
            assert sorted(seen) == list(range(count))
            found = await state(broker, queue)
            assert (found.ready, found.unacked) == (0, 0)

    async def test_one_batch_reaches_many_queues(self, url: str, plain: Any) -> None:
        names = [fresh_name() for _ in range(300)]
        async with started(url) as broker:
            await broker.publish([Outgoing(name, b"%d" % number) for number in range(3) for name in names])
            found = await broker.queues(names)
            assert [(each.queue, each.ready) for each in found] == [(name, 3) for name in names]
            assert bodies(await take(await broker.consume(names[-1], prefetch=5), 3)) == [0, 1, 2]
        plain.delete(*names)

    async def test_deliveries_are_counted_across_consumers_and_connections(self, url: str, queue: str) -> None:
        async with started(url) as publisher:
            await publisher.publish(messages(queue, 1))
        for redeliveries in range(4):
            async with started(url) as broker:
                consumer = await broker.consume(queue, prefetch=1)
                (delivery,) = await take(consumer, 1)
                assert delivery.redeliveries == redeliveries
                if redeliveries % 2:
                    await consumer.retry(delivery, 0.0, "again")

    async def test_a_queue_that_is_named_like_something_of_another_is_no_trouble(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.declare([f"{queue}.delayed"])
            await broker.publish([Outgoing(queue, b"0"), Outgoing(f"{queue}.delayed", b"1")])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry((await take(consumer, 1))[0], 0.05, "later")
            assert bodies(await take(consumer, 1)) == [0]
            assert bodies(await take(await broker.consume(f"{queue}.delayed", prefetch=1), 1)) == [1]

    async def test_only_queues_are_told(self, url: str, plain: Any, queue: str) -> None:
        others = {f"{queue}-{kind}": kind for kind in ("string", "stream", "group")}
        plain.set(f"{queue}-string", "x")
        plain.xadd(f"{queue}-stream", {"x": "y"})
        plain.xgroup_create(f"{queue}-group", "another", "0", mkstream=True)
        plain.xgroup_create(queue, queue, "0", mkstream=True)
        async with started(url) as broker:
            told = [found.queue for found in await broker.queues() if found.queue.startswith(queue)]
            assert told == [queue]
        plain.delete(*others)

    async def test_a_batch_with_one_bad_queue_is_refused_and_the_rest_taken(
        self, url: str, plain: Any, queue: str
    ) -> None:
        bad = fresh_name()
        plain.set(bad, "mine")
        async with started(url) as broker:
            with pytest.raises(BrokerError, match="not a stream"):
                await broker.publish([Outgoing(bad, b"0"), *messages(queue, 2)])
            assert (await state(broker, queue)).ready == 2
        plain.delete(bad)


class WithoutAuth(Valkey):
    """Answers `ERR unknown command 'AUTH', with args beginning with: …`, as a proxy or an old server does."""

    def command(self) -> list[str]:
        return [*super().command(), "--rename-command", "AUTH", ""]


class TestAccess:
    async def test_tls(self, url: str, queue: str, tmp_path: Path) -> None:
        certificates = make_certificates(tmp_path)
        with Proxy(url, certificates) as proxy:
            secure = proxy.url.replace("redis://", "rediss://")
            async with started(f"{secure}?ssl_ca_certs={certificates.authority}") as broker:
                await broker.publish(messages(queue, 1))
                consumer = await broker.consume(queue, prefetch=1)
                await consumer.ack(await take(consumer, 1))
            stranger = RedisStreamsBroker(secure)
            with pytest.raises(BrokerError, match=f"certificate of 127.0.0.1:{proxy.port} is not trusted"):
                await stranger.start()
            await stranger.close()
            without = RedisStreamsBroker(proxy.url, connect_timeout=0.5)
            with pytest.raises(BrokerUnavailable, match=str(proxy.port)):
                await without.start()
            await without.close()

    async def test_tls_to_a_server_that_has_none(self, url: str) -> None:
        broker = RedisStreamsBroker(url.replace("redis://", "rediss://"), connect_timeout=1.0)
        with pytest.raises(BrokerError, match=r"127\.0\.0\.1"):
            await broker.start()
        await broker.close()

    async def test_passwords_and_users(self) -> None:
        with Valkey(password="s3cret/ü") as server, redis.Redis(port=server.port, password="s3cret/ü") as plain:
            plain.acl_setuser("worker", enabled=True, passwords=["+p@ss"], keys=["*"], commands=["+@all"])
            place = f"127.0.0.1:{server.port}/0"
            for login in (":s3cret%2F%C3%BC@", "worker:p%40ss@"):
                async with started(f"redis://{login}{place}") as broker:
                    await broker.publish(messages("q", 1))
            for login, what in ((":wrong@", "password"), ("worker:wrong@", "password"), ("", "wants a password")):
                stranger = RedisStreamsBroker(f"redis://{login}{place}")
                with pytest.raises(BrokerError, match=what) as caught:
                    await stranger.start()
                assert not isinstance(caught.value, BrokerUnavailable)
                assert "p@ss" not in str(caught.value)
                await stranger.close()

    async def test_a_server_that_repeats_what_it_was_told_makes_no_password_known(self) -> None:
        with WithoutAuth() as server:
            broker = RedisStreamsBroker(f"redis://ana:s3cr3t@127.0.0.1:{server.port}/0")
            with pytest.raises(BrokerError, match="refused the user or the password") as caught:
                await broker.start()
            assert "s3cr3t" not in f"{caught.value} {broker.links()}"
            await broker.close()

    async def test_a_password_that_changes_later_gives_no_message_up(self) -> None:
        with Valkey(password="old") as server, redis.Redis(port=server.port, password="old") as plain:
            async with started(server.url) as broker:
                plain.config_set("requirepass", "new")
                plain.client_kill_filter(_type="normal", skipme=True)
                await until(lambda: broker.links()[0].trouble is not None, saying="trouble")
                with pytest.raises(BrokerUnavailable, match="password"):
                    await broker.publish(messages("q", 1))

    @pytest.mark.parametrize("more", [["+info"], []], ids=["with info", "without info"])
    async def test_a_user_without_rights_of_an_operator_gives_back_too(self, more: list[str]) -> None:
        with Valkey() as server, redis.Redis(port=server.port) as plain:
            rights = ["+@all", "-@dangerous", *more]
            plain.acl_setuser("worker", enabled=True, passwords=["+pass"], keys=["*"], commands=rights)
            async with started(f"redis://worker:pass@127.0.0.1:{server.port}") as broker:
                await broker.publish(messages("q", 1))
                consumer = await broker.consume("q", prefetch=2)
                await take(consumer, 1)
                taking = await waiting(consumer)
                heir = await broker.consume("q", prefetch=2)
                await consumer.close()
                assert list(await taking) == []
                (again,) = await take(heir, 1, within=PROMPTLY)
                assert again.redeliveries == 1
                assert str(server.port) in await broker.check()

    async def test_the_database_is_that_of_the_path(self, server: Server) -> None:
        queue = fresh_name()
        with redis.Redis(port=server.port, db=3) as plain:
            async with started(f"redis://127.0.0.1:{server.port}/3") as broker:
                await broker.publish(messages(queue, 1))
                assert plain.xlen(queue) == 1
                assert bodies(await take(await broker.consume(queue, prefetch=1), 1)) == [0]
        missing = RedisStreamsBroker(f"redis://127.0.0.1:{server.port}/999")
        with pytest.raises(BrokerError, match="database 999"):
            await missing.start()
        await missing.close()

    @pytest.mark.parametrize("end", ["/zero", "/-1", "/0?colour=blue", "?ssl_ca_certs=x"])
    def test_a_url_with_a_fault_is_refused_at_once(self, end: str) -> None:
        with pytest.raises(InvalidSettings, match="redis://localhost"):
            RedisStreamsBroker(f"redis://localhost{end}")

    @pytest.mark.parametrize(
        "login", ["u:hid/den@h", "u:1hid/den@h", ":12/hidden@h", "u:12#hidden@h", "u:12?hidden@h", ":hid[den@h"]
    )
    def test_a_password_that_was_not_encoded_is_not_told(self, login: str) -> None:
        with pytest.raises(InvalidSettings, match="percent-encoded") as caught:
            RedisStreamsBroker(f"redis://{login}")
        assert "hid" not in str(caught.value)
        assert caught.value.__context__ is None or caught.value.__suppress_context__

    async def test_something_that_is_no_redis_is_told(self) -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            writer.close()

        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        broker = RedisStreamsBroker(f"redis://127.0.0.1:{port}")
        with pytest.raises(BrokerUnavailable, match="does not speak Redis"):
            await broker.start()
        await broker.close()
        listener.close()


class TestLife:
    async def test_the_check_names_server_version_and_place(self, url: str) -> None:
        async with started(url) as broker:
            assert (await broker.check()).startswith(("Valkey ", "Redis "))
            assert url.partition("//")[2].partition("/")[0].rpartition("@")[2] in await broker.check()

    async def test_it_connects_only_when_it_is_started(self) -> None:
        broker = RedisStreamsBroker(f"redis://127.0.0.1:{free_port()}")
        with pytest.raises(BrokerUnavailable, match="start"):
            await broker.publish(messages("q", 1))
        assert "start" in str(broker.links()[0].trouble)
        await broker.close()

    async def test_closing_leaves_nothing_behind(self, url: str, plain: Any, queue: str) -> None:
        before = asyncio.all_tasks()
        async with started(url) as broker:
            await broker.publish(messages(queue, 2))
            consumers = [await broker.consume(queue, prefetch=1) for _ in range(3)]
            await take(consumers[0], 1)
            abandoned = asyncio.create_task(consumers[1].take(1))  # nobody looks at what it was given
            await asyncio.wait({abandoned}, timeout=PATIENCE)
            taking = await waiting(consumers[2])
        assert list(await taking) == []
        assert asyncio.all_tasks() == before
        assert plain.xinfo_consumers(queue, queue) == []
        assert plain.xpending(queue, queue)["pending"] == 0
        assert plain.xlen(queue) == 2
        assert not [each for each in plain.client_list() if each["name"].startswith("oraculo-")]

    async def test_what_arrives_for_a_cancelled_take_is_kept_or_given_back(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            consumer = await broker.consume(queue, prefetch=10)
            taking = await waiting(consumer)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            await broker.publish(messages(queue, 1))
            await until(shows(broker, queue, unacked=1), saying="the delivery")
            assert bodies(await take(consumer, 1)) == [0]
            taking = await waiting(consumer)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            await broker.publish(messages(queue, 1))
            await until(shows(broker, queue, unacked=2), saying="the delivery")
            await consumer.close()
            again = await take(await broker.consume(queue, prefetch=10), 2, within=PROMPTLY)
            assert {each.redeliveries for each in again} == {1}

    async def test_what_is_given_back_does_not_go_to_the_wait_of_whoever_gives_it(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish(messages(queue, 3))
            consumer = await broker.consume(queue, prefetch=10)
            await take(consumer, 3)
            taking = await waiting(consumer)
            await consumer.close()
            assert list(await taking) == []
            again = await take(await broker.consume(queue, prefetch=10), 3, within=PROMPTLY)
            assert {each.redeliveries for each in again} == {1}

    async def test_a_broker_can_be_started_again(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.publish(messages(queue, 1))
            await broker.close()
            await broker.start()
            assert bodies(await take(await broker.consume(queue, prefetch=1), 1)) == [0]

    async def test_bodies_of_json_come_as_they_were(self, url: str, queue: str) -> None:
        body = json.dumps({"correlation_id": "c", "payload": {"texto": "coleção"}}).encode()
        async with started(url) as broker:
            await broker.publish([Outgoing(queue, body)])
            assert (await take(await broker.consume(queue, prefetch=1), 1))[0].body == body
