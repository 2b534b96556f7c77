"""Redis Streams close to the `maxmemory` of a server that evicts nothing: what is taken, what is told of the rest, and
what is kept for answers, by which commands leave."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest
import redis

from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.memory import MemoryBroker
from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.brokers.redis_streams import room as memory
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.clock import SystemClock
from tests.brokers import redis_streams_stage as stage
from tests.brokers.redis_streams_stage import fresh_name, started
from tests.receipts import places_down, reasons, takers
from tests.servers.process import Server
from tests.waiting import until

server = stage.server  # a fixture
LIMIT = 8 * 1024 * 1024
KEPT = LIMIT // memory.KEPT_SHARE
LARGE = b"x" * 20_000
HUGE = b"x" * 400_000  # more than the server may find when it no longer counts what it had read of the last calls


class Full(NamedTuple):
    """A server whose memory is limited, a client that knows nothing of ORÁCULO, and our broker."""

    plain: Any
    broker: RedisStreamsBroker

    def leave(self, room: int) -> None:
        self.plain.config_set("maxmemory", self.plain.info("memory")["used_memory"] + room)

    @property
    def free(self) -> int:
        about = self.plain.info("memory")
        return int(about["maxmemory"] - about["used_memory"])

    @property
    def trouble(self) -> str | None:
        return self.broker.statuses()[0].trouble


@asynccontextmanager
async def limited(server: Server, limit: int = 0, user: str = "") -> AsyncIterator[Full]:
    with redis.Redis.from_url(server.url) as plain:
        plain.execute_command("FLUSHALL", "SYNC")  # else it is freed little by little
        plain.config_set("maxmemory", limit)
        try:
            async with started(server.url.replace("redis://", f"redis://{user}")) as broker:
                yield Full(plain, broker)
        finally:
            plain.config_set("maxmemory", 0)
            plain.execute_command("FLUSHALL", "SYNC")  # else it is freed little by little


def commands(queue: str, count: int, body: bytes = LARGE) -> list[Outgoing]:
    return [Outgoing(queue, body, leaves_room=True)] * count


async def offered(broker: Any, messages: Sequence[Outgoing]) -> Sequence[str | None]:
    """What took each of them, after one try."""
    try:
        return takers(await broker.publish(messages))
    except BrokerUnavailable:
        return [None] * len(messages)


async def filled(full: Full, queue: str) -> None:
    """With commands, until it takes none, and none that is huge."""
    while any(await offered(full.broker, commands(queue, 4))):
        pass
    assert await offered(full.broker, commands(queue, 1, HUGE)) == [None]


@pytest.mark.parametrize("leaves_room", [False, True])
@pytest.mark.parametrize("queues", [1, 40])
async def test_of_a_call_that_fits_in_part_nothing_is_sent_twice(
    server: Server, queues: int, leaves_room: bool
) -> None:
    """To one queue it is a transaction, to many it is none."""
    names = [fresh_name() for _ in range(queues)]
    left = [
        Outgoing(name, b"%02d" % number + LARGE, leaves_room=leaves_room)
        for number, name in enumerate(names * (40 // queues))
    ]
    async with limited(server) as full:
        await full.broker.declare(names)
        full.leave(400_000)
        receipts = await full.broker.publish(left)
        assert re.search("maxmemory", reasons(receipts))
        assert 0 < takers(receipts).count(None) < 40
        assert places_down(receipts) == {place for place, via in enumerate(takers(receipts)) if via is None}
        assert sum(full.plain.xlen(name) for name in names) == 40 - takers(receipts).count(None)
        left = [message for message, via in zip(left, takers(receipts), strict=True) if via is None]
        full.plain.config_set("maxmemory", 0)
        assert takers(await full.broker.publish(left)) == ["redis"] * len(left)
        bodies = [fields[b"body"] for name in names for _, fields in full.plain.xrange(name)]
        assert len(set(bodies)) == len(bodies) == 40


async def test_where_nobody_may_ask_how_much_is_left_commands_are_taken_one_by_one(server: Server) -> None:
    queue = fresh_name()
    with redis.Redis.from_url(server.url) as plain:
        plain.execute_command("ACL", "SETUSER", "uninformed", "on", ">s", "~*", "&*", "+@all", "-info")
    async with limited(server, user="uninformed:s@") as full:
        await full.broker.declare([queue])
        full.leave(400_000)
        taken = await offered(full.broker, commands(queue, 40))
        assert 0 < full.plain.xlen(queue) == len([via for via in taken if via]) < 40


async def test_commands_leave_room_for_answers_however_often_they_are_tried(server: Server) -> None:
    queue, answers = fresh_name(), fresh_name()
    async with limited(server, LIMIT) as full:
        for count in (40, 1, 40, 4, 1):
            while any(await offered(full.broker, commands(queue, count))):
                pass
            assert KEPT * 0.9 < full.free < KEPT + len(HUGE)
        assert takers(await full.broker.publish([Outgoing(answers, LARGE * 2)] * 5)) == ["redis"] * 5


async def test_it_is_in_trouble_until_it_takes_what_is_as_large(server: Server) -> None:
    queue, other = fresh_name(), fresh_name()
    async with limited(server, LIMIT) as full:
        await filled(full, queue)
        for _ in range(2):
            await offered(full.broker, commands(queue, 4))
            assert "maxmemory" in str(full.trouble)
            await publish_all(full.broker, [Outgoing(other, b"an answer")])
            await full.broker.declare([fresh_name()])
            assert "maxmemory" in str(full.trouble)
        for is_well_again in (full.broker.check, lambda: publish_all(full.broker, commands(queue, 1, HUGE))):
            await filled(full, queue)
            full.plain.xtrim(queue, 100, approximate=False)
            assert "maxmemory" in str(full.trouble)
            await is_well_again()
            assert full.trouble is None


async def test_it_is_well_once_there_is_room_though_no_command_ever_comes_again(server: Server) -> None:
    """The runs may have ended meanwhile. A canary is published now and then."""
    queue = fresh_name()
    async with limited(server, LIMIT) as full:
        await filled(full, queue)
        await publish_all(full.broker, [Outgoing(queue, b"canary")])
        assert "maxmemory" in str(full.trouble)
        full.plain.config_set("maxmemory", 4 * LIMIT)

        async def is_well() -> bool:
            await publish_all(full.broker, [Outgoing(queue, b"canary")])
            return full.trouble is None

        await until(is_well, within=5, saying="it to be well")


async def test_a_message_that_is_too_large_for_it_makes_no_outage_that_never_ends(server: Server) -> None:
    queue = fresh_name()
    async with limited(server, LIMIT) as full:
        assert await offered(full.broker, commands(queue, 1, b"x" * (LIMIT - KEPT))) == [None]
        assert "maxmemory" in str(full.trouble)
        await full.broker.check()
        assert full.trouble is None
        assert await offered(full.broker, commands(queue, 1)) == ["redis"]


async def test_a_message_larger_than_what_is_left_is_not_even_tried(server: Server) -> None:
    """Refused, it would fill the server for a while all the same, and answers would be refused with it."""
    queue = fresh_name()
    async with limited(server, LIMIT) as full:
        await publish_all(full.broker, commands(queue, 1, b"small"))
        refusals = full.plain.info("errorstats").get("errorstat_OOM", {"count": 0})["count"]
        assert await offered(full.broker, commands(queue, 1, b"x" * (LIMIT - KEPT))) == [None]
        assert full.plain.info("errorstats").get("errorstat_OOM", {"count": 0})["count"] == refusals


async def test_another_refusal_than_that_of_memory_ends_though_little_is_left(server: Server) -> None:
    queue = fresh_name()
    async with limited(server, LIMIT) as full:
        await publish_all(full.broker, commands(queue, 1))
        full.plain.replicaof("127.0.0.1", "1")
        assert await offered(full.broker, [Outgoing(queue, b"answer")]) == [None]
        full.plain.replicaof("NO", "ONE")
        full.leave(50_000)  # less than is kept

        async def is_over() -> bool:
            with suppress(BrokerUnavailable):
                await full.broker.check()
            return full.trouble is None

        await until(is_over)


async def test_in_a_call_of_both_kinds_what_was_not_taken_is_not_told_as_taken(server: Server) -> None:
    queue, answers = fresh_name(), fresh_name()
    async with limited(server, 8 * LIMIT) as full:
        await publish_all(full.broker, commands(queue, 1, b"small"))
        full.leave(300_000)
        taken = await offered(full.broker, [*commands(queue, 40), Outgoing(answers, LARGE)])
        assert taken.count("redis") == full.plain.xlen(answers) + full.plain.xlen(queue) - 1
        assert None in taken


async def test_what_plain_workers_acked_and_did_not_delete_makes_room(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oraculo.brokers.redis_streams.trimming.TRIMMED_EVERY", 0.0)
    queue = fresh_name()
    async with limited(server, LIMIT) as full:
        await filled(full, queue)
        there = full.plain.xlen(queue)
        full.plain.xreadgroup(queue, "plain", {queue: ">"}, count=there, noack=True)
        assert takers(await full.broker.publish(commands(queue, 10))) == ["redis"] * 10
        assert full.plain.xlen(queue) == 10


async def test_a_server_that_evicts_is_full_at_its_limit_alone(server: Server) -> None:
    queue = fresh_name()
    async with limited(server) as full:
        full.plain.config_set("maxmemory-policy", "volatile-lru")
        full.plain.set("cached", "x", ex=1000)  # without any it would evict nothing
        try:
            full.leave(KEPT // 4)
            assert takers(await full.broker.publish(commands(queue, 2))) == ["redis"] * 2
        finally:
            full.plain.delete("cached")
            full.plain.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize(
    ("policy", "held", "evicts"),
    [
        (b"noeviction", b"keys=9,expires=9,avg_ttl=0", False),
        (b"allkeys-lru", b"keys=9,expires=0,avg_ttl=0", True),
        (b"volatile-lru", b"keys=9,expires=9,avg_ttl=0", True),
        (b"volatile-lru", b"keys=9,expires=0,avg_ttl=0", False),
    ],
)
def test_a_server_evicts_where_its_policy_finds_something_to_evict(policy: bytes, held: bytes, evicts: bool) -> None:
    assert memory.evicts({b"maxmemory_policy": policy, b"db0": held}) is evicts


async def test_of_several_brokers_the_next_takes_what_this_has_no_room_for(server: Server) -> None:
    queue = fresh_name()
    async with limited(server, LIMIT) as full:
        broker = FailoverBroker([RedisStreamsBroker(server.url), MemoryBroker(SystemClock())])
        await broker.start()
        try:
            vias: list[str | None] = []
            while "memory" not in vias:
                vias += await offered(broker, commands(queue, 40))
            assert None not in vias
            assert full.plain.xlen(queue) == vias.count("redis") > 0
        finally:
            await broker.close()
