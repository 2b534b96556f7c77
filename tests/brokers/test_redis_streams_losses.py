"""Redis Streams: what is lost with a server, and consumers that must not go deaf."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis

from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Outgoing, publish_all
from tests.brokers import redis_streams_stage as stage
from tests.brokers.redis_streams_stage import (
    LEASE,
    PATIENCE,
    PROMPTLY,
    bodies,
    fresh_name,
    idle_times,
    messages,
    own_consumers,
    seconds_of,
    started,
    state,
    succeeds,
    take,
    waiting,
)
from tests.servers.process import Server
from tests.servers.proxy import Proxy
from tests.servers.valkey import Valkey
from tests.waiting import until

url, plain, queue, server = stage.url, stage.plain, stage.queue, stage.server  # fixtures


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
                assert broker.statuses()[0].losses == 1
                for queue in ("a", "b"):
                    await broker.consume(queue, prefetch=1)
                assert broker.statuses()[0].losses == 1
                assert "append-only" in await broker.check()

    async def test_a_replica_that_takes_the_place_of_its_master_counts_once(self) -> None:
        with Valkey() as master, Valkey() as replica, redis.Redis.from_url(replica.url) as plain:
            async with started(master.url) as broker:
                await broker.consume("q", prefetch=1)
                with redis.Redis.from_url(master.url) as other:
                    other.config_set("repl-diskless-sync-delay", 0)
                plain.replicaof("127.0.0.1", master.port)
                await until(lambda: plain.info("replication")["master_link_status"] == "up", saying="the replica")
                master.kill()
                await until(lambda: broker.statuses()[0].trouble is not None, saying="trouble")
                plain.config_set("port", master.port)  # as an address does that follows the master
                with pytest.raises(BrokerUnavailable, match="read-only"):
                    await publish_all(broker, messages("q", 1))
                assert broker.statuses()[0].losses == 0
                plain.replicaof("NO", "ONE")
                await publish_all(broker, messages("q", 1))
                await broker.consume("q", prefetch=1)
                assert broker.statuses()[0].losses == 1

    async def test_where_info_is_not_granted_a_loss_is_told_by_what_was_added_last(self, server: Server) -> None:
        with redis.Redis.from_url(server.url) as plain, Proxy(server.url) as proxy:
            plain.execute_command("ACL", "SETUSER", "uninformed", "on", ">s", "~*", "&*", "+@all", "-info")
            async with started(proxy.url.replace("redis://", "redis://uninformed:s@")) as broker:
                assert not broker.capabilities.durable
                queue = fresh_name()
                await publish_all(broker, messages(queue, 3))
                snapshot = plain.dump(queue)
                await publish_all(broker, messages(queue, 1))
                await self._connect_again(proxy, broker)
                assert broker.statuses()[0].losses == 0, "a blip, or an idle connection that the server closed"
                plain.restore(queue, 0, snapshot, replace=True)
                for _ in range(2):
                    await self._connect_again(proxy, broker)
                    assert broker.statuses()[0].losses == 1
                await publish_all(broker, messages(queue, 1))
                plain.delete(queue)
                await self._connect_again(proxy, broker)
                assert broker.statuses()[0].losses == 2
                assert "grant +info" in await broker.check()
            plain.acl_deluser("uninformed")

    async def test_where_info_is_not_granted_a_reply_queue_that_its_client_deletes_is_no_loss(
        self, server: Server
    ) -> None:
        with redis.Redis.from_url(server.url) as plain, Proxy(server.url) as proxy:
            plain.execute_command("ACL", "SETUSER", "uninformed", "on", ">s", "~*", "&*", "+@all", "-info")
            async with started(proxy.url.replace("redis://", "redis://uninformed:s@")) as broker:
                queue, reply = fresh_name(), fresh_name()
                await publish_all(broker, messages(queue, 1))
                await publish_all(broker, [Outgoing(reply, b"{}", is_reply=True)])
                plain.delete(reply)
                await self._connect_again(proxy, broker)
                assert broker.statuses()[0].losses == 0
                plain.delete(queue)
                await self._connect_again(proxy, broker)
                assert broker.statuses()[0].losses == 1, "what was added before the reply"
            plain.acl_deluser("uninformed")

    async def _connect_again(self, proxy: Proxy, broker: RedisStreamsBroker) -> None:
        proxy.cut()
        await until(succeeds(broker.check), saying="a new connection")

    async def test_a_flush_counts_once_for_all_queues(self, server: Server) -> None:
        with redis.Redis.from_url(server.url) as plain:
            async with started(server.url) as broker:
                for losses in (1, 2):
                    queues = [fresh_name(), fresh_name()]
                    takes = [await waiting(await broker.consume(queue, prefetch=1)) for queue in queues]
                    plain.flushall()
                    await asyncio.gather(*(until(lambda queue=queue: plain.exists(queue)) for queue in queues))
                    assert broker.statuses()[0].losses == losses
                    await publish_all(broker, [Outgoing(queue, b"1") for queue in queues])
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
                await until(lambda losses=losses: broker.statuses()[0].losses == losses, saying="the loss")
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
                assert broker.statuses()[0].losses == 1


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
                await publish_all(broker, messages(queue, 2))
                assert bodies(await take(consumer, 2)) == [0, 1]

    async def test_a_lost_group_loses_nothing_of_what_is_in_the_stream(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 4))
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
            await publish_all(broker, messages(queue, 1))
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
