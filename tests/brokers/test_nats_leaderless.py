"""Queues whose stream has no leader, as in a cluster that keeps one copy of each and has lost a node: nobody answers
for them, and the server, and all other queues, work on. (test_nats_cluster.py has a real one.)"""

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from oraculo.brokers.nats import NatsBroker
from oraculo.brokers.nats.connection import Connection
from oraculo.brokers.nats.layout import stream_of
from oraculo.brokers.nats.replies import Request
from oraculo.errors import QueueUnavailable
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.wire.naming import dlq_of
from tests.brokers import nats_stage as stage
from tests.brokers.nats_stage import eventually, plain_client, running, take
from tests.receipts import reasons, takers

url, queue = stage.url, stage.queue  # fixtures

NOWHERE = "nowhere"
# Of a call, in seconds. The server has six tenths of it to show that it is well, and a machine may stand still for one.
TIMEOUT = 2.0


@pytest.fixture
async def dead(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[set[str]]:
    """Queues of which nobody answers, from the moment that they are put in here."""
    names: set[str] = set()
    asking = Connection._asking

    def is_of_a_dead_one(request: Request) -> bool:
        if not request.subject.startswith("$JS.API."):
            return request.subject in names
        return not set(map(stream_of, names)).isdisjoint(request.subject.split("."))

    @contextmanager
    def asking_nowhere(self: Connection, requests: Sequence[Request], read: Any) -> Iterator[Any]:
        sent = [each._replace(subject=NOWHERE) if is_of_a_dead_one(each) else each for each in requests]
        with asking(self, sent, read) as replies:
            yield replies

    monkeypatch.setattr(Connection, "_asking", asking_nowhere)
    async with plain_client(url) as listener:  # who says nothing; where nobody listened, the server would say so
        await listener.subscribe(NOWHERE)
        await listener.flush()
        yield names


def expect_well(broker: NatsBroker) -> None:
    assert broker.statuses()[0].trouble is None


async def test_it_is_neither_missing_nor_a_trouble_of_the_broker(url: str, queue: str, dead: set[str]) -> None:
    other = f"{queue}.other"
    async with running(url, publish_timeout=TIMEOUT) as broker:
        await broker.declare([queue])
        dead |= {queue, dlq_of(queue)}
        with pytest.raises(QueueUnavailable, match=queue):
            await broker.queues([queue])
        assert not list(await broker.queues([other]))
        with pytest.raises(QueueUnavailable, match=queue):
            await broker.consume(queue, prefetch=1)
        for letters in (broker.dead_letters(queue, limit=1), broker.redrive(queue), broker.discard(queue, ["1"])):
            with pytest.raises(QueueUnavailable, match=queue):
                await letters
        with pytest.raises(QueueUnavailable, match=queue):
            await broker.remove([queue])
        receipts = await broker.publish([Outgoing(queue, b"x"), Outgoing(other, b"x")])
        assert takers(receipts) == [None, "nats"]
        expect_well(broker)


async def test_it_keeps_no_other_from_being_declared(
    url: str, queue: str, dead: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oraculo.brokers.nats.broker.MADE_TOGETHER", 1)
    async with running(url, publish_timeout=TIMEOUT) as broker:
        dead.add(queue)
        with pytest.raises(QueueUnavailable, match=queue):
            await broker.declare([queue, f"{queue}.other"])
        assert [state.queue for state in await broker.queues([f"{queue}.other"])] == [f"{queue}.other"]
        expect_well(broker)


async def test_many_of_them_hold_up_no_other(url: str, queue: str, dead: set[str]) -> None:
    """They are waited for together."""
    names = [f"{queue}.{number}" for number in range(20)]
    async with running(url) as broker:
        await broker.declare(names)
    async with running(url, publish_timeout=TIMEOUT) as broker:
        dead |= set(names[::2])
        receipts = await broker.publish([Outgoing(name, b"x") for name in names])
        assert takers(receipts) == [None, "nats"] * 10
        assert [state.queue for state in await broker.queues(names)] == names[1::2]
        expect_well(broker)


async def test_one_whose_quarantine_alone_has_no_leader_works(
    url: str, queue: str, dead: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oraculo.brokers.nats.known_queues.STUCK_FOR", 0.1)
    async with running(url) as broker:
        await broker.declare([queue])
    async with running(url, publish_timeout=TIMEOUT) as broker:
        dead.add(dlq_of(queue))
        assert takers(await broker.publish([Outgoing(queue, b"x")])) == ["nats"]
        consumer = await broker.consume(queue, prefetch=1)
        (held,) = await take(consumer, 1)
        with pytest.raises(QueueUnavailable):
            await consumer.dead_letter(held, "no good")
        dead.clear()

        async def is_buried() -> bool:
            with suppress(QueueUnavailable):
                await consumer.dead_letter(held, "no good")
                return True
            return False

        await eventually(is_buried)
        assert [letter.reason for letter in await broker.dead_letters(queue, limit=5)] == ["no good"]
        expect_well(broker)


async def test_how_much_lies_in_it_is_not_guessed(url: str, queue: str, dead: set[str]) -> None:
    """Its quarantine works, and that is not to look as if the queue were empty."""
    other = f"{queue}.other"
    async with running(url, publish_timeout=TIMEOUT) as broker:
        await publish_all(broker, [Outgoing(queue, b"x"), Outgoing(other, b"x")])
        dead.add(queue)
        assert [(state.queue, state.ready) for state in await broker.queues([queue, other])] == [(other, 1)]


async def test_one_that_the_list_misses_is_left_out_and_not_asked_for_again(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that takes a cluster four seconds. A page has three streams here."""
    ask, asked, missed = Connection.ask, list[int](), set[str]()

    async def three(self: Connection, verb: str, what: Any = None) -> Any:
        assert verb == "STREAM.LIST"
        every, total = list[Any](), 1
        while len(every) < total:
            page = await ask(self, verb, {"offset": len(every)})
            total = page["total"]
            every += page["streams"]
        asked.append(what["offset"])
        some = every[what["offset"] : what["offset"] + 3]
        there = [each for each in some if each["config"]["name"] not in missed]
        missing = [each["config"]["name"] for each in some if each not in there]
        return {"total": len(every), "limit": 3, "offset": what["offset"], "streams": there, "missing": missing}

    async with running(url) as broker:
        await broker.declare([queue, f"{queue}.a", f"{queue}.b", f"{queue}.c"])
        monkeypatch.setattr(Connection, "ask", three)
        missed.add(stream_of(f"{queue}.b"))
        listed = {state.queue for state in await broker.queues()}
        assert {name for name in listed if name.startswith(queue)} == {queue, f"{queue}.a", f"{queue}.c"}
        assert asked == [*range(0, asked[-1] + 1, 3)]


async def test_what_comes_after_a_silent_queue_is_left_for_the_next_call(
    url: str, queue: str, dead: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each window would be waited for as long."""
    monkeypatch.setattr("oraculo.brokers.nats.publisher.WINDOW", 2)
    other = f"{queue}.other"
    async with running(url, publish_timeout=TIMEOUT) as broker:
        await broker.declare([queue, other])
        dead.add(queue)
        receipts = await broker.publish([Outgoing(queue, b"x"), Outgoing(other, b"x")] * 5)
        assert re.search("was not asked in time", reasons(receipts))
        assert takers(receipts) == [None, "nats", *[None] * 8]
        expect_well(broker)
