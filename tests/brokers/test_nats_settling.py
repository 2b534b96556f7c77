"""NATS JetStream: leases, counts and limits, and deliveries that move."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from oraculo.brokers.nats.layout import stream_of
from oraculo.errors import BrokerError, BrokerUnavailable, QueueFull
from oraculo.ports.broker import Broker, Outgoing, publish_all
from oraculo.wire.naming import dlq_name, dlq_of
from tests.brokers import nats_stage as stage
from tests.brokers.nats_stage import (
    PROMPT,
    api,
    bodies,
    drain,
    eventually,
    have_letters,
    is_empty,
    numbered,
    plain_client,
    ready,
    running,
    stays_quiet,
    take,
)
from tests.waiting import until

url, queue = stage.url, stage.queue  # fixtures


async def test_a_queue_may_have_a_lease_of_its_own(url: str, queue: str) -> None:
    leases = {queue: 0.5}
    async with running(url, lease=60, leases=leases) as broker, running(url, lease=60, leases=leases) as other:
        first = await broker.consume(queue, prefetch=10)
        await publish_all(broker, [Outgoing(queue, b"{}")])
        await first.take(10)
        second = await other.consume(queue, prefetch=10)
        assert [delivery.body for delivery in await asyncio.wait_for(second.take(10), 10)] == [b"{}"]


async def test_an_unsettled_delivery_comes_again_after_its_lease_and_is_no_longer_ours(url: str, queue: str) -> None:
    async with running(url, lease=0.5) as broker, running(url, lease=0.5) as other:
        await publish_all(broker, [Outgoing(queue, b"slow")])
        consumer = await broker.consume(queue, prefetch=1)
        (stale,) = await take(consumer, 1)
        lapsed_at = asyncio.get_running_loop().time() + 0.5  # JetStream's lease began before it was read here
        (again,) = await take(await other.consume(queue, prefetch=1), 1)
        assert (again.body, again.redeliveries) == (b"slow", 1)
        await until(lambda: asyncio.get_running_loop().time() > lapsed_at)
        await consumer.ack([stale])
        await consumer.retry(stale, 0.0, "too late")
        await consumer.dead_letter(stale, "too late")
        (state,) = await broker.queues([queue])
        assert state.ready + state.unacked == 1
        assert state.dead_letters == 0


async def test_an_extended_delivery_does_not_come_again(url: str, queue: str) -> None:
    async with running(url, lease=1.5) as broker, running(url, lease=1.5) as other:
        await publish_all(broker, [Outgoing(queue, b"long work")])
        consumer = await broker.consume(queue, prefetch=1)
        held = await take(consumer, 1)
        waiting = asyncio.create_task(take(await other.consume(queue, prefetch=1), 1))
        for _ in range(10):
            await asyncio.wait({waiting}, timeout=0.3)
            await consumer.extend(held)
        assert not waiting.done()
        await consumer.ack(held)
        await eventually(lambda: is_empty(broker, queue))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_what_waits_behind_a_busy_caller_is_not_given_to_others(url: str, queue: str) -> None:
    """The prefetch is fetched, and the caller handles one message for longer than the lease."""
    async with running(url, lease=1.5, heartbeat=0.1) as broker, running(url, lease=1.5) as other:
        await publish_all(broker, numbered(queue, 3))
        consumer = await broker.consume(queue, prefetch=3)
        busy = await take(consumer, 1)
        waiting = asyncio.create_task(take(await other.consume(queue, prefetch=1), 1))
        for _ in range(10):
            await asyncio.wait({waiting}, timeout=0.3)
            await consumer.extend(busy)
        assert not waiting.done()
        rest = await take(consumer, 2)
        assert [(each.body, each.redeliveries) for each in rest] == [(b"1", 0), (b"2", 0)]
        await consumer.ack([*busy, *rest])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_lapsed_delivery_makes_room_for_others(url: str, queue: str) -> None:
    async with running(url, lease=0.4, heartbeat=0.1) as broker:
        await publish_all(broker, numbered(queue, 2))
        consumer = await broker.consume(queue, prefetch=1)
        assert bodies(await take(consumer, 1)) == [b"0"]
        assert {each.body for _ in range(2) for each in await take(consumer, 1)} <= {b"0", b"1"}


async def test_what_lapsed_before_anybody_took_it_is_asked_for_again(url: str, queue: str) -> None:
    """As when the process stood still for longer than the lease."""
    async with running(url, lease=1.0) as broker:
        consumer = await broker.consume(queue, prefetch=2)
        waiting = asyncio.create_task(consumer.take(1))
        await until(lambda: consumer._requested == 2, saying="two to be asked for")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await publish_all(broker, numbered(queue, 2))
        await until(lambda: len(consumer._buffer) == 2, saying="both to come")
        consumer._leases.update(dict.fromkeys(consumer._leases, 0.0))
        again = {(each.body, each.redeliveries) for each in await take(consumer, 2, PROMPT)}
        assert again == {(b"0", 1), (b"1", 1)}  # not as they came first: by now those may be another's


async def test_a_delivery_whose_lease_ended_while_it_could_not_be_moved_is_let_go(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url, lease=1.0, heartbeat=0.1) as broker:
        refused = asyncio.Event()

        async def bury(_: object) -> None:
            await refused.wait()
            raise BrokerUnavailable("JetStream is not available now")

        monkeypatch.setattr(broker, "store_dead_letters", bury)
        await publish_all(broker, [Outgoing(queue, b"bad")])
        consumer = await broker.consume(queue, prefetch=1)
        (stale,) = await take(consumer, 1)
        moving = asyncio.create_task(consumer.dead_letter(stale, "why"))
        again = await take(consumer, 1)
        refused.set()
        with pytest.raises(BrokerUnavailable):
            await moving
        await consumer.ack([stale])
        await consumer.extend([stale])
        await consumer.ack(again)
        await publish_all(broker, [Outgoing(queue, b"next")])
        assert bodies(await take(consumer, 1, PROMPT)) == [b"next"], "its place is free again"


async def test_a_message_whose_quarantine_is_full_makes_no_queue_deaf(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url, delivery_limit=1) as broker:
        await publish_all(broker, [Outgoing(queue, b"worn")])
        before = await broker.consume(queue, prefetch=1)
        await take(before, 1)
        await before.close()  # so that it was delivered as often as it may be

        async def bury(letters: Sequence[object]) -> list[QueueFull]:
            return [QueueFull("the dead letters are full") for _ in letters]

        monkeypatch.setattr(broker, "store_dead_letters", bury)
        await publish_all(broker, [Outgoing(queue, b"good")])
        consumer = await broker.consume(queue, prefetch=10)
        assert bodies(await take(consumer, 1)) == [b"good"]


async def test_one_that_its_quarantine_refuses_holds_up_no_other_that_is_buried_with_it(url: str, queue: str) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue])
        stream = stream_of(dlq_name(queue))
        config = (await api(client, f"STREAM.INFO.{stream}"))["config"]
        assert "error" not in await api(client, f"STREAM.UPDATE.{stream}", {**config, "max_msg_size": 1000})
        await publish_all(broker, [Outgoing(queue, body) for body in (b"0", bytes(2000), b"2")])
        consumer = await broker.consume(queue, prefetch=3)
        taken = await take(consumer, 3)
        with pytest.raises(BrokerError, match="message size exceeds maximum allowed"):
            await consumer.dead_letter_all([(delivery, "bad") for delivery in taken])
        assert [letter.body for letter in await broker.dead_letters(queue, limit=4)] == [b"0", b"2"]
        await consumer.ack([taken[1]])
        assert await eventually(lambda: is_empty(broker, queue))


async def test_a_delivery_that_is_being_moved_keeps_its_place(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url) as broker:
        goes_on, bury = asyncio.Event(), broker.store_dead_letters

        async def slow(letters: Any) -> Any:
            await goes_on.wait()
            return await bury(letters)

        monkeypatch.setattr(broker, "store_dead_letters", slow)
        await publish_all(broker, numbered(queue, 2))
        consumer = await broker.consume(queue, prefetch=1)
        (delivery,) = await take(consumer, 1)
        moving = asyncio.create_task(consumer.dead_letter(delivery, "why"))
        await stays_quiet(consumer)
        await consumer.ack([delivery])  # too late: it is on its way
        goes_on.set()
        await moving
        assert bodies(await take(consumer, 1, PROMPT)) == [b"1"]
        assert [letter.body for letter in await broker.dead_letters(queue, limit=2)] == [b"0"]


async def test_deliveries_are_counted_across_consumers_and_connections(url: str, queue: str) -> None:
    async with running(url) as broker:
        await publish_all(broker, [Outgoing(queue, b"again")])
    for redeliveries in range(4):
        async with running(url) as broker:
            (delivery,) = await take(await broker.consume(queue, prefetch=1), 1, PROMPT)
            assert (delivery.body, delivery.redeliveries) == (b"again", redeliveries)


async def test_one_that_nobody_ever_settles_ends_in_the_dlq(url: str, queue: str) -> None:
    """Nobody calls retry: it is given back by consumers that close, and by leases that end."""
    async with running(url, delivery_limit=3, lease=0.3) as broker:
        await publish_all(broker, [Outgoing(queue, b"poison"), Outgoing(queue, b"other")])
        seen = []
        for closes in (True, False, True):
            consumer = await broker.consume(queue, prefetch=1)
            (delivery,) = await take(consumer, 1)
            seen.append((delivery.body, delivery.redeliveries))
            await (consumer.close() if closes else take(await broker.consume(queue, prefetch=1), 1))
        heir = await broker.consume(queue, prefetch=2)
        left = asyncio.create_task(drain(heir))
        letters = await eventually(lambda: have_letters(broker, queue, 2))
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert {letter.body for letter in letters} == {b"poison", b"other"}
        assert {letter.reason for letter in letters} == {"delivered 3 times and never settled"}
        assert {letter.redeliveries for letter in letters} == {2}
        assert await is_empty(broker, queue)


async def test_what_the_quarantine_does_not_take_stays_in_its_queue(url: str, queue: str) -> None:
    """The quarantine was made by others, for small messages only."""
    dlq = {"name": f"{queue}=dlq", "subjects": [dlq_of(queue)], "retention": "workqueue", "max_msg_size": 200}
    async with running(url, delivery_limit=1) as broker, plain_client(url) as client:
        assert "error" not in await api(client, f"STREAM.CREATE.{queue}=dlq", dlq)
        await publish_all(broker, [Outgoing(queue, bytes(300))])
        consumer = await broker.consume(queue, prefetch=1)
        (delivery,) = await take(consumer, 1)
        for settling in (consumer.dead_letter(delivery, "bad"), consumer.retry(delivery, 0.0, "bad")):
            with pytest.raises(BrokerError, match="message size") as caught:
                await settling
            assert not isinstance(caught.value, BrokerUnavailable)
        assert await ready(broker, queue, 1)
        await consumer.close()
        heir = await broker.consume(queue, prefetch=1)
        await publish_all(broker, [Outgoing(queue, b"small")])
        assert bodies(await take(heir, 1, PROMPT)) == [b"small"], "it is in nobody's way"
        assert await ready(broker, queue, 2)


async def test_one_that_its_quarantine_refuses_holds_up_no_other_that_was_delivered_too_often(
    url: str, queue: str
) -> None:
    """JetStream drops the copy of what is sent there again, but not for ever."""
    dlq = {"name": f"{queue}=dlq", "subjects": [dlq_of(queue)], "retention": "workqueue", "max_msg_size": 200}
    async with running(url, delivery_limit=1) as broker, plain_client(url) as client:
        assert "error" not in await api(client, f"STREAM.CREATE.{queue}=dlq", dlq)
        await publish_all(broker, [Outgoing(queue, body) for body in (b"0", bytes(300), b"2")])
        before = await broker.consume(queue, prefetch=3)
        await take(before, 3)
        await before.close()
        heir = await broker.consume(queue, prefetch=3)
        waiting = asyncio.create_task(heir.take(1))
        letters = await eventually(lambda: have_letters(broker, queue, 2))
        assert {letter.body for letter in letters} == {b"0", b"2"}
        assert await eventually(lambda: ready(broker, queue, 1))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_thousands_that_wait_for_a_delay_hold_up_no_other(url: str, queue: str) -> None:
    """JetStream counts them as unsettled, and by default stops a consumer at a thousand."""
    async with running(url) as broker:
        await publish_all(broker, numbered(queue, 1500))
        consumer = await broker.consume(queue, prefetch=1500)
        for delivery in await take(consumer, 1500):
            await consumer.retry(delivery, 60.0, "later")
        await publish_all(broker, [Outgoing(queue, b"quick")])
        assert bodies(await take(consumer, 1, PROMPT)) == [b"quick"]
        (state,) = await broker.queues([queue])
        assert (state.ready, state.unacked) == (1500, 1)


async def test_two_brokers_share_a_queue(url: str, queue: str) -> None:
    handled: list[bytes] = []

    async def work(broker: Broker) -> None:
        consumer = await broker.consume(queue, prefetch=20)
        while batch := await consumer.take(20):
            handled.extend(bodies(batch))
            await consumer.ack(batch)

    async with running(url) as one, running(url) as two:
        workers = [asyncio.create_task(work(broker)) for broker in (one, two)]
        await publish_all(one, numbered(queue, 2000))
        await until(lambda: len(handled) >= 2000)
        await eventually(lambda: is_empty(one, queue))
        for broker in (one, two):
            await broker.close()
        await asyncio.gather(*workers)
    assert sorted(handled) == sorted(b"%d" % number for number in range(2000))


async def test_a_move_that_is_done_twice_makes_no_duplicate(url: str, queue: str) -> None:
    """The letter was confirmed, and the process died before the ack: it comes again, and is moved again."""
    async with running(url, lease=0.4) as broker, plain_client(url) as client:
        await publish_all(broker, [Outgoing(queue, b"bad")])
        consumer = await broker.consume(queue, prefetch=1)
        (delivery,) = await take(consumer, 1)
        consumer.connection.send = lambda *_: None  # type: ignore[method-assign] # no ack is sent any more
        await consumer.dead_letter(delivery, "broken")
        async with running(url, lease=0.4) as heir:
            successor = await heir.consume(queue, prefetch=1)
            await successor.dead_letter((await take(successor, 1))[0], "broken")
            assert len(await heir.dead_letters(queue, limit=5)) == 1
            await eventually(lambda: is_empty(heir, queue))
        assert (await api(client, f"STREAM.INFO.{queue}=dlq"))["state"]["last_seq"] == 1
