"""Redis Streams: connections and servers that break."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.memory import MemoryBroker
from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.broker_admin import DEAD_LETTER_BODY_BYTES
from oraculo.ports.clock import SystemClock
from tests.brokers import redis_streams_stage as stage
from tests.brokers.redis_streams_stage import (
    LEASE,
    PATIENCE,
    PROMPTLY,
    bodies,
    fresh_name,
    messages,
    seconds_of,
    started,
    state,
    succeeds,
    take,
    waiting,
)
from tests.receipts import takers
from tests.servers.process import Server, free_port
from tests.servers.proxy import Proxy
from tests.servers.valkey import Valkey
from tests.waiting import until

url, plain, queue, server = stage.url, stage.plain, stage.queue, stage.server  # fixtures


class TestLostConnections:
    async def test_a_cut_ends_a_take_at_once_and_a_new_consumer_gets_what_was_out(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with started(proxy.url) as broker:
                await publish_all(broker, messages(queue, 3))
                consumer = await broker.consume(queue, prefetch=10)
                taken = await take(consumer, 3)
                await consumer.ack(taken[:1])
                taking = await waiting(consumer)
                proxy.cut()
                took, error = await seconds_of(taking)
                assert isinstance(error, BrokerUnavailable)
                assert "lost" in str(error)
                assert took < PROMPTLY
                assert "lost" in str(broker.statuses()[0].trouble)
                with pytest.raises(BrokerUnavailable):
                    await consumer.take(1)
                again = await take(await broker.consume(queue, prefetch=10), 2, within=PROMPTLY)
                assert sorted(bodies(again)) == [1, 2]
                assert {each.redeliveries for each in again} == {1}
                assert broker.statuses()[0].trouble is None
                await consumer.ack(taken)
                await consumer.retry(taken[1], 0.0, "too late")
                assert (await state(broker, queue)).unacked == 2

    async def test_closing_a_lost_consumer_gives_back_too(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with started(proxy.url) as broker, started(url) as other:
                heir = await other.consume(queue, prefetch=10)
                await publish_all(broker, messages(queue, 1))
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
                    await until(lambda: broker.statuses()[0].trouble is not None, saying="trouble")
                    await publish_all(broker, messages(queue, 1))
                    assert broker.statuses()[0].trouble is None
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
                await publish_all(broker, messages(queue, 1))

    async def test_one_attempt_serves_all_who_ask_at_once(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with started(proxy.url) as broker:
                proxy.cut()
                await until(lambda: broker.statuses()[0].trouble is not None, saying="trouble")
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

    async def test_a_long_answer_over_a_slow_line_is_waited_for(self, url: str, queue: str) -> None:
        """For longer than the server may be silent, of which a piece of it takes a thirtieth."""
        body, dead = bytes(3_000_000), b"dead" * 750_000
        with Proxy(url) as proxy:
            async with started(url) as near, started(proxy.url, publish_timeout=1.5, lease=3 * LEASE) as broker:
                await near.publish([Outgoing(queue, body), Outgoing(queue, dead, reason="bad")])
                consumer = await broker.consume(queue, prefetch=1)
                proxy.delay = 0.05  # for each 64 kB, at most
                (delivery,) = await take(consumer, 1)
                assert (delivery.body, delivery.redeliveries) == (body, 0)
                (letter,) = await broker.dead_letters(queue, limit=1)
                assert (letter.body, letter.cut_from) == (dead[:DEAD_LETTER_BODY_BYTES], len(dead))

    async def test_over_a_line_as_slow_as_its_upkeep_is_frequent_it_reads(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with started(url) as near, started(proxy.url, lease=LEASE) as broker:
                consumer = await broker.consume(queue, prefetch=1)
                proxy.delay = 0.3 * LEASE  # each way; upkeep is due after half a lease
                await near.publish(messages(queue, 1))
                assert bodies(await take(consumer, 1, within=PROMPTLY)) == [0]

    async def test_a_consumer_without_room_is_not_taken_for_idle(self) -> None:
        with Valkey() as server, redis.Redis.from_url(server.url) as plain:
            async with started(server.url) as broker:
                await publish_all(broker, messages("q", 2))
                consumer = await broker.consume("q", prefetch=1)
                taken = await take(consumer, 1)
                plain.config_set("timeout", 2)
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                async with asyncio.timeout(PATIENCE):
                    assert await reader.read() == b""  # the server ends those that say nothing
                writer.close()
                assert not consumer.is_over
                await consumer.ack(taken)
                assert bodies(await take(consumer, 1)) == [1]

    async def test_a_message_for_a_waiter_that_is_gone_is_not_kept_from_others(
        self, url: str, queue: str, plain: Any
    ) -> None:
        """The server still keeps the read of a consumer that cannot hear it any more."""
        with Proxy(url) as proxy:
            async with started(url) as other, started(proxy.url, publish_timeout=0.5, connect_timeout=0.5) as broker:
                consumer = await broker.consume(queue, prefetch=10)
                taking = await waiting(consumer)
                while not await self._is_swallowed(proxy, other, queue, plain):
                    proxy.swallows = False  # its read had just ended: it hears of this one
                    await consumer.ack(await taking)
                    taking = await waiting(consumer)
                assert isinstance((await seconds_of(taking))[1], BrokerUnavailable)
                proxy.cut()
                proxy.swallows = False
                (again,) = await take(await broker.consume(queue, prefetch=10), 1)
                assert again.redeliveries == 1

    async def _is_swallowed(self, proxy: Proxy, other: RedisStreamsBroker, queue: str, plain: Any) -> bool:
        """Whether a message was delivered into the black hole."""
        proxy.swallows = True
        await other.publish(messages(queue, 1))
        return bool(plain.xpending(queue, queue)["pending"])


class TestServerFailures:
    async def test_after_kill_9_everything_unsettled_comes_again(self, server: Server) -> None:
        queue = fresh_name()
        async with started(server.url) as broker:
            await publish_all(broker, messages(queue, 5))
            consumer = await broker.consume(queue, prefetch=3)
            taken = await take(consumer, 3)
            await consumer.ack(taken[:1])
            taking = await waiting(await broker.consume(fresh_name(), prefetch=1))
            server.kill()
            assert isinstance((await seconds_of(taking))[1], BrokerUnavailable)
            with pytest.raises(BrokerUnavailable, match=str(server.port)):
                await publish_all(broker, messages(queue, 1))
            server.start()
            again = await take(await broker.consume(queue, prefetch=10), 4)
            assert sorted(bodies(again)) == [1, 2, 3, 4]
            assert {int(each.body): each.redeliveries for each in again} == {1: 1, 2: 1, 3: 0, 4: 0}
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
            assert "no answer" in str(broker.statuses()[0].trouble)
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
        await publish_all(broker, messages(queue, 1))
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
        assert f":{port}" in str(broker.statuses()[0].trouble)
        await broker.close()

    async def test_a_full_server_is_unavailable_and_can_still_be_emptied(self, server: Server) -> None:
        queue = fresh_name()
        with redis.Redis.from_url(server.url) as plain:
            async with started(server.url, lease=LEASE) as broker:
                await publish_all(broker, messages(queue, 3))
                consumer = await broker.consume(queue, prefetch=3)
                (delayed,) = await take(consumer, 1)
                await consumer.retry(delayed, 0.05, "later")
                plain.config_set("maxmemory", 1)
                try:
                    for count in (1, 2):
                        with pytest.raises(BrokerUnavailable, match="maxmemory"):
                            await publish_all(broker, messages(queue, count))
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

    @pytest.mark.parametrize(
        ("setting", "bad", "good", "why"),
        [("maxmemory", 1, 0, "maxmemory"), ("min-replicas-to-write", 1, 0, "replicas")],
    )
    async def test_a_server_that_takes_nothing_is_in_trouble_however_much_it_lets_read(
        self, server: Server, setting: str, bad: int, good: int, why: str
    ) -> None:
        queue = fresh_name()
        with redis.Redis.from_url(server.url) as plain:
            async with started(server.url) as broker:
                await publish_all(broker, messages(queue, 1))
                for is_well_again in (broker.check, lambda: broker.publish(messages(queue, 1))):
                    plain.config_set(setting, bad)
                    try:
                        with pytest.raises(BrokerUnavailable, match=why):
                            await publish_all(broker, messages(queue, 1))
                        await broker.start()
                        await state(broker, queue)
                        assert why in str(broker.statuses()[0].trouble)
                        with pytest.raises(BrokerUnavailable, match=why):
                            await broker.check()
                        await state(broker, queue)
                        assert why in str(broker.statuses()[0].trouble)
                    finally:
                        plain.config_set(setting, good)
                    await is_well_again()
                    assert broker.statuses()[0].trouble is None

    async def test_of_several_brokers_one_that_takes_nothing_is_passed_over_until_it_does(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where nobody may ask how it is."""
        for pause in ("PROBE_PAUSE", "PULSE"):
            monkeypatch.setattr(f"oraculo.brokers.failover.broker.{pause}", 0.02)
        queue = fresh_name()
        with redis.Redis.from_url(server.url) as plain:
            plain.execute_command("ACL", "SETUSER", "uninformed", "on", ">s", "~*", "&*", "+@all", "-info")
            first = RedisStreamsBroker(server.url.replace("redis://", "redis://uninformed:s@"))
            broker = FailoverBroker([first, MemoryBroker(SystemClock())])
            await broker.start()
            try:
                assert takers(await broker.publish(messages(queue, 1))) == ["redis"]
                plain.config_set("maxmemory", 1)
                assert takers(await broker.publish(messages(queue, 1))) == ["memory"]
                with pytest.raises(BrokerUnavailable, match="maxmemory"):
                    await first.check()
                plain.config_set("maxmemory", 0)
                await until(lambda: broker.statuses()[0].trouble is None, saying="the first broker")
                assert takers(await broker.publish(messages(queue, 1))) == ["redis"]
                assert [group["consumers"] for group in plain.xinfo_groups(queue)] == [0]
            finally:
                plain.config_set("maxmemory", 0)
                await broker.close()

    @pytest.mark.parametrize(
        ("limit", "policy", "is_told"),
        [("1gb", "allkeys-lru", True), (0, "allkeys-lru", False), ("1gb", "volatile-lru", False)],
    )
    async def test_a_server_that_evicts_queues_is_used_and_told_once(
        self, server: Server, limit: str | int, policy: str, is_told: bool
    ) -> None:
        with redis.Redis.from_url(server.url) as plain:
            plain.config_set("maxmemory", limit)
            plain.config_set("maxmemory-policy", policy)
            try:
                with capture_logs() as logs:
                    async with started(server.url) as broker:
                        assert ("set it to noeviction" in await broker.check()) is is_told
                        plain.client_kill_filter(_type="normal", skipme=True)
                        await broker.check()
                told = [log["reason"] for log in logs if log["event"] == "the broker may lose messages"]
                assert [policy in each for each in told] == [True] * is_told
            finally:
                plain.config_set("maxmemory", 0)
                plain.config_set("maxmemory-policy", "noeviction")

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
                await publish_all(broker, messages("q", 1))
                plain.replicaof("127.0.0.1", free_port())
                for count in (1, 2):
                    with pytest.raises(BrokerUnavailable, match="read-only"):
                        await publish_all(broker, messages("q", count))
                with pytest.raises(BrokerUnavailable, match="read-only"):
                    await broker.check()
                await broker.queues(["q"])
                assert "read-only" in str(broker.statuses()[0].trouble)
                plain.replicaof("NO", "ONE")
                await publish_all(broker, messages("q", 1))
                assert broker.statuses()[0].trouble is None

    async def test_the_check_tells_of_a_server_without_the_replicas_that_it_wants(self) -> None:
        with Valkey() as server, redis.Redis.from_url(server.url) as plain:
            async with started(server.url) as broker:
                plain.config_set("min-replicas-to-write", 1)
                for call in (lambda: broker.publish(messages("q", 1)), broker.check):
                    with pytest.raises(BrokerUnavailable, match=r"refuses to write.*replica"):
                        await call()
                plain.config_set("min-replicas-to-write", 0)
                assert await broker.check()

    async def test_a_key_that_is_no_stream_is_refused_in_words(self, url: str, plain: Any, queue: str) -> None:
        plain.set(queue, "mine")
        async with started(url) as broker:
            calls: list[Awaitable[object]] = [
                publish_all(broker, messages(queue, 1)),
                broker.consume(queue, prefetch=1),
                broker.declare([queue]),
                broker.queues([queue]),
            ]
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, BrokerError)
                assert not isinstance(outcome, BrokerUnavailable)
                assert "not a stream" in str(outcome)
            assert queue not in [found.queue for found in await broker.queues()]
