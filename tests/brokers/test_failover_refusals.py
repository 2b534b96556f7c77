"""Fail-over between brokers that refuse, are full, cannot be read, or have a queue that is down."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from oraculo.brokers.failover import FailoverBroker
from oraculo.clients.subscription import Subscription
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge, QueueDown, QueueFull, QueueUnavailable
from oraculo.ports.broker import (
    Broker,
    BrokerStatus,
    Consumer,
    Delivery,
    NotMoved,
    Outgoing,
    Receipt,
    ensure_taken,
    publish_all,
)
from tests.brokers import failover_stage as stage
from tests.brokers.failover_stage import Crammed, Named, Refusing, Two, Unreadable, troubles
from tests.receipts import places_down, publish_but, reasons, takers
from tests.waiting import until

impatient, two = stage.impatient, stage.two  # fixtures


@pytest.fixture
async def refusing() -> AsyncIterator[tuple[FailoverBroker, Refusing, Named]]:
    first, second = Refusing("first"), Named("second")
    first.refused = frozenset({"q"})
    both = FailoverBroker([first, second])
    await both.start()
    yield both, first, second
    await both.close()


async def test_one_that_refuses_a_queue_does_not_keep_the_others_and_is_told_as_deaf_on_it(
    refusing: tuple[FailoverBroker, Refusing, Named],
) -> None:
    both, first, second = refusing
    await both.declare(["q"])
    consumer = await both.consume("q", prefetch=5)
    assert [link.deaf for link in both.statuses()] == [("q",), ()]
    assert takers(await both.publish([Outgoing("q", b"over the second")])) == ["second"]
    assert [delivery.body for delivery in await consumer.take(5)] == [b"over the second"]
    first.refused = frozenset()
    await until(lambda: both.statuses()[0].deaf == (), saying="the first to be asked again")
    await publish_all(first, [Outgoing("q", b"over the first")])
    async with asyncio.timeout(10):
        assert [delivery.body for delivery in await consumer.take(5)] == [b"over the first"]
    assert [state.consumers for state in await second.queues(["q"])] == [1]


@pytest.mark.parametrize(("second_says", "may_come"), [("wrong password", False), (None, True)])
async def test_a_start_that_all_refuse_is_refused_and_one_that_may_come_is_worth_a_retry(
    second_says: str | None, may_come: bool
) -> None:
    async def refuse() -> None:
        raise BrokerError("wrong password")

    first, second = Named("first"), Named("second")
    first.start = refuse  # type: ignore[method-assign]
    if second_says is None:
        second.away = "off"
    else:
        second.start = refuse  # type: ignore[method-assign]
    with pytest.raises(BrokerError, match="no broker works: first: wrong password; second: ") as told:
        await FailoverBroker([first, second]).start()
    assert isinstance(told.value, BrokerUnavailable) is may_come


async def test_what_is_too_large_for_one_is_not_refused_for_good_while_another_is_away(two: Two) -> None:
    async def too_large(messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        raise MessageTooLarge("9 bytes are too many", 9, 8)

    both, first, second = two
    first.publish = second.publish = too_large  # type: ignore[method-assign]
    with pytest.raises(MessageTooLarge):
        await publish_all(both, [Outgoing("q", bytes(9))])
    first.away = "pulled out"
    await until(lambda: troubles(both)["first"], saying="the first to be away")
    with pytest.raises(BrokerError, match="too many") as told:
        await publish_all(both, [Outgoing("q", bytes(9))])
    assert not isinstance(told.value, MessageTooLarge)


@pytest.mark.parametrize("too_large_for", ["first", "second"])
async def test_what_is_too_large_for_one_and_refused_otherwise_by_the_other_may_be_taken_yet(
    two: Two, too_large_for: str
) -> None:
    async def too_large(messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        raise MessageTooLarge("9 bytes are too many", 9, 8)

    async def refuses(messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        raise BrokerError("not allowed")

    both, first, second = two
    calls = (too_large, refuses) if too_large_for == "first" else (refuses, too_large)
    first.publish, second.publish = calls  # type: ignore[method-assign]
    with pytest.raises(BrokerError, match="not allowed"):
        await publish_all(both, [Outgoing("q", bytes(9))])


async def test_what_is_too_large_for_one_is_taken_by_the_other_that_is_found_well_meanwhile(two: Two) -> None:
    both, first, second = two
    second.away = "off"
    await until(lambda: troubles(both)["second"] == "off")

    async def too_large(messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        second.away = None
        await until(lambda: troubles(both)["second"] is None)
        raise MessageTooLarge("9 bytes are too many", 9, 8)

    first.publish = too_large  # type: ignore[method-assign]
    assert takers(await both.publish([Outgoing("q", bytes(9))])) == ["second"]


async def test_one_that_cannot_be_read_is_told_with_the_reason_and_asked_last_until_it_can() -> None:
    first = Unreadable("first")
    both = FailoverBroker([first, Named("second")])
    await both.start()
    with capture_logs() as logs:
        await both.consume("q", prefetch=5)
        for refusals in range(2, 7):  # consumers are made again and again, and none is believed
            await until(lambda: first.refusals >= refusals, saying="the next to fail")  # noqa: B023
            assert both.statuses()[0].unread == (("q", "not permitted"),)
            assert both.statuses()[0].deaf == ("q",)
            assert takers(await both.publish([Outgoing("commands", b"1")])) == ["second"]
        first.forbidden = "no such queue"
        await until(lambda: both.statuses()[0].unread == (("q", "no such queue"),), saying="the new reason")
    assert [log["reason"] for log in logs] == ["not permitted", "no such queue"]
    assert takers(await both.publish([Outgoing("answers", b"1", prefer="first")])) == ["first"]
    first.forbidden = None
    await until(lambda: not both.statuses()[0].deaf, saying="a consumer that waits in peace to be believed")
    assert takers(await both.publish([Outgoing("commands", b"1")])) == ["first"]
    await both.close()


async def test_one_that_cannot_be_read_is_used_while_there_is_no_other() -> None:
    first, second = Unreadable("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    await both.consume("q", prefetch=5)
    await until(lambda: both.statuses()[0].deaf, saying="it to be found out")
    await second.leave()
    assert takers(await both.publish([Outgoing("commands", b"1")])) == ["first"]
    await both.close()


async def test_a_queue_that_none_lets_us_read_is_refused_and_if_one_is_away_it_is_not_yet(
    refusing: tuple[FailoverBroker, Refusing, Named],
) -> None:
    both, _, second = refusing
    await second.leave()
    with pytest.raises(BrokerUnavailable, match="read q: first: not allowed; second: pulled out"):
        await both.consume("q", prefetch=1)
    await both.close()
    alone = Refusing("alone")
    alone.refused = frozenset({"q"})
    one = FailoverBroker([alone])
    await one.start()
    with pytest.raises(BrokerError, match="read q: alone: not allowed") as caught:
        await one.consume("q", prefetch=1)
    assert not isinstance(caught.value, BrokerUnavailable)
    await one.close()


class Strict(Named):
    """Whatever is to be settled is refused; it lets go of it all the same, as when a lease ends."""

    async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
        consumer = await super().consume(queue, prefetch=prefetch)
        ack = consumer.ack

        async def refuse(settled: Delivery | Sequence[Any], *_: object) -> None:
            some = [settled] if isinstance(settled, Delivery) else settled
            await ack([each if isinstance(each, Delivery) else each[0] for each in some])
            raise BrokerError("not allowed")

        consumer.ack = consumer.retry = consumer.dead_letter = consumer.dead_letter_all = refuse
        return consumer


async def settle(consumer: Consumer, how: str, deliveries: Sequence[Delivery]) -> None:
    match how:
        case "ack":
            await consumer.ack(deliveries)
        case "retry":
            await consumer.retry(deliveries[0], 0.0, "again")
        case "dead_letter":
            await consumer.dead_letter(deliveries[0], "bad")
        case _:
            await consumer.dead_letter_all([(each, "bad") for each in deliveries])


@pytest.mark.parametrize("how", ["ack", "retry", "dead_letter", "dead_letter_all"])
async def test_what_may_not_be_settled_leaves_room_for_the_next(how: str) -> None:
    alone = Strict("alone")
    one = FailoverBroker([alone])
    await one.start()
    await publish_all(one, [Outgoing("q", b"refused"), Outgoing("q", b"next")])
    consumer = await one.consume("q", prefetch=1)
    refused = await consumer.take(1)
    with pytest.raises(BrokerError, match="not allowed"):
        await settle(consumer, how, refused)
    async with asyncio.timeout(5):
        assert [delivery.body for delivery in await consumer.take(1)] == [b"next"]
    await one.close()


@pytest.mark.parametrize("how", ["ack", "dead_letter_all"])
async def test_what_one_does_not_let_us_settle_keeps_nothing_of_another_unsettled(how: str) -> None:
    first, second = Strict("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    consumer = await both.consume("q", prefetch=2)
    await publish_all(first, [Outgoing("q", b"refused")])
    taken = [*await consumer.take(1)]
    await publish_all(second, [Outgoing("q", b"good")])
    taken += await consumer.take(1)
    with pytest.raises(BrokerError, match="not allowed"):
        await settle(consumer, how, taken)
    assert [(state.ready, state.unacked) for state in await second.queues(["q"])] == [(0, 0)]
    await both.close()


@pytest.mark.parametrize("how", ["dead_letter", "dead_letter_all"])
async def test_a_dead_letter_that_one_cannot_put_away_is_told_comes_again_and_takes_nothing_from_another(
    how: str,
) -> None:
    first, second = Crammed("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    consumer = await both.consume("q", prefetch=3)
    await publish_all(first, [Outgoing("q", b"bad")])
    taken = [*await consumer.take(1)]
    await publish_all(second, [Outgoing("q", b"also bad"), Outgoing("q", b"good")])
    while len(taken) < 3:
        taken += await consumer.take(2)
    with pytest.raises(NotMoved, match="no room for dead letters"):
        await settle(consumer, how, taken[:2])
    first.is_crammed = False
    async with asyncio.timeout(5):
        [again] = await consumer.take(1)
    assert (again.body, again.redeliveries) == (b"bad", 1)
    await consumer.dead_letter(again, "bad")
    await consumer.ack(taken)
    assert await both.dead_letters("q", limit=5)
    [state] = await second.queues(["q"])
    assert (state.ready + state.unacked, state.dead_letters) == (0, how == "dead_letter_all")
    await both.close()


async def test_a_dead_letter_that_can_be_put_nowhere_is_tried_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oraculo.brokers.failover.consumer.FAILED_PAUSE", 0.05)
    first = Crammed("first")
    both = FailoverBroker([first, Named("second")])
    await both.start()
    consumer = await both.consume("q", prefetch=3)
    await publish_all(first, [Outgoing("q", b"bad")])
    began = asyncio.get_running_loop().time()
    for _ in range(4):
        async with asyncio.timeout(5):
            [again] = await consumer.take(1)
        with pytest.raises(NotMoved):
            await consumer.dead_letter(again, "bad")
    assert asyncio.get_running_loop().time() - began >= 3 * 0.05
    await both.close()


async def test_whoever_cannot_put_a_dead_letter_away_goes_on_with_what_else_it_holds() -> None:
    first, second, told = Crammed("first"), Named("second"), list[str]()
    both = FailoverBroker([first, second])
    await both.start()
    subscription = Subscription(await both.consume("q", prefetch=2), "q", lambda *trouble: told.append(trouble[1]))
    await publish_all(first, [Outgoing("q", b"bad")])
    [bad] = await subscription.take(1)
    await publish_all(second, [Outgoing("q", b"good")])
    [good] = await subscription.take(1)
    assert not await subscription.dead_letter(bad, "bad")
    assert told == ["a dead letter could not be put away; it comes again"]
    assert (subscription.closed, subscription.holds(bad), subscription.holds(good)) == (False, False, True)
    await subscription.ack([good])
    assert [(state.ready, state.unacked) for state in await second.queues(["q"])] == [(0, 0)]
    await both.close()


async def test_leases_that_one_cannot_renew_are_told_once_those_of_the_others_are(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, first, second = two
    consumer = await both.consume("q", prefetch=3)
    await publish_all(first, [Outgoing("q", b"")])
    taken = [*await consumer.take(1)]
    await publish_all(second, [Outgoing("q", b"")])
    taken += await consumer.take(1)
    renewed = list[str]()
    for member, inner in consumer._inner.items():

        async def extend(_: object, name: str = member.name) -> None:
            renewed.append(name)
            if name == "first":
                raise BrokerUnavailable("first is away")

        monkeypatch.setattr(inner, "extend", extend)
    with pytest.raises(BrokerUnavailable, match="first is away"):
        await consumer.extend(taken)
    assert renewed == ["first", "second"]
    await publish_all(first, [Outgoing("q", b"which nobody took yet")])
    await until(lambda: consumer._waiting)
    await consumer.extend(taken[1:])
    assert renewed[2:] == ["second", "first"]


async def test_what_all_of_them_refuse_is_refused(refusing: tuple[FailoverBroker, Refusing, Named]) -> None:
    both, _, second = refusing
    await second.leave()
    with pytest.raises(BrokerError, match="not allowed"):
        await publish_all(both, [Outgoing("q", b"")])
    with pytest.raises(BrokerError, match="not allowed") as told:
        await both.declare(["q"])
    assert not isinstance(told.value, BrokerUnavailable)


class Full(Named):
    """It has no room in the queue `full`, and its queue `down` does not work."""

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        faults: dict[str, BrokerError] = {
            "full": QueueFull(f"{self.name} has no room"),
            "down": QueueDown(f"{self.name} has no room"),
        }
        return await publish_but(super().publish, messages, lambda message: faults.get(message.queue))

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        raise QueueFull(f"{self.name} has no room")


async def depths(broker: Broker, *queues: str) -> dict[str, int]:
    return {state.queue: state.ready for state in await broker.queues(queues)}


async def test_a_broker_with_a_full_queue_is_not_left_for_another() -> None:
    """Its owner set the limit; and all groups are published, whatever became of the one before."""
    first, second = Full("first"), Full("second")
    both = FailoverBroker([first, second])
    await both.start()
    batch = [
        Outgoing("full", b"0"),
        Outgoing("q", b"1"),
        Outgoing("full", b"2", prefer="second"),
        Outgoing("q", b"3", prefer="second"),
    ]
    receipts = await both.publish(batch)
    assert re.search("first has no room; second has no room", reasons(receipts))
    assert takers(receipts) == [None, "first", None, "second"]
    assert troubles(both) == {"first": None, "second": None}
    assert [await depths(one, "q", "full") for one in (first, second)] == [{"q": 1}, {"q": 1}]
    receipts = await both.publish(batch[:2])
    assert takers(receipts) == [None, "first"]
    with pytest.raises(QueueUnavailable, match="second has no room"):
        await both.redrive("full")
    assert troubles(both) == {"first": None, "second": None}
    await both.close()


DOWN = [Outgoing("q", b"0"), Outgoing("down", b"1"), Outgoing("q", b"2"), Outgoing("down", b"3")]


async def test_what_is_for_a_queue_that_is_down_goes_to_the_next_and_the_rest_stays() -> None:
    first, second = Full("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    assert takers(await both.publish(DOWN)) == ["first", "second", "first", "second"]
    assert troubles(both) == {"first": None, "second": None}
    assert await depths(first, "q", "down") == {"q": 2}
    assert await depths(second, "q", "down") == {"down": 2}
    receipts = await both.publish([*DOWN, Outgoing("full", b"4")])
    assert takers(receipts) == ["first", "second", "first", "second", None]
    await both.close()


class Stuck(Full):
    """It says of itself that `down` is."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[str] = []

    def statuses(self) -> Sequence[BrokerStatus]:
        return [BrokerStatus(self.name, self.away, stuck=(("down", "no majority"),))]

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        self.asked += [message.queue for message in messages]
        return await super().publish(messages)


async def test_a_queue_that_is_known_to_be_down_is_asked_last() -> None:
    first, second = Stuck("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    letter = Outgoing("down", b"4", reason="r")  # which goes to another queue
    receipts = await both.publish([*DOWN, letter, Outgoing("full", b"5")])
    assert takers(receipts) == ["first", "second", "first", "second", "second", None]
    assert first.asked == ["q", "q", "down", "full"]
    await second.leave()
    for _ in range(2):  # the other breaks in the attempt, and is out then
        first.asked.clear()
        receipts = await both.publish(DOWN[1:])
        assert takers(receipts) == [None, "first", None]
        assert places_down(receipts) == {0, 2}
        assert first.asked == ["q", "down", "down"]
    with pytest.raises(QueueUnavailable):
        ensure_taken(await both.publish([DOWN[1]]))
    await both.close()


async def test_it_says_why_when_a_queue_is_down_at_one_and_the_others_are_lost() -> None:
    first, second = Stuck("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    await first.leave()
    await second.leave()
    with pytest.raises(BrokerUnavailable, match="pulled out"):
        await publish_all(both, [Outgoing("down", b"1")])
    await both.close()


async def test_of_two_groups_what_the_first_took_is_told_though_none_takes_the_second() -> None:
    class OnlyOnce(Named):
        async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
            vias = await super().publish(messages)
            await self.leave()
            return vias

    both = FailoverBroker([OnlyOnce("first")])
    await both.start()
    receipts = await both.publish([Outgoing("q", b"1"), Outgoing("q", b"2", prefer="second")])
    assert re.search("pulled out", reasons(receipts))
    assert takers(receipts) == ["first", None]
    await both.close()


class Never(Named):
    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        raise BrokerError("never")


class Picky(Named):
    """Takes all but what is too large."""

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        def fault_of(message: Outgoing) -> BrokerError | None:
            return BrokerError("too large") if len(message.body) >= 10 else None

        return await publish_but(super().publish, messages, fault_of)


async def test_what_one_refuses_is_taken_by_the_next() -> None:
    both = FailoverBroker([first := Full("first"), second := Picky("second"), third := Named("third")])
    await both.start()
    too_large = Outgoing("down", bytes(10))
    assert takers(await both.publish([too_large, *DOWN])) == ["third", "first", "second", "first", "second"]
    assert await depths(first, "q", "down") == {"q": 2}
    assert await depths(second, "q", "down") == {"down": 2}
    assert await depths(third, "q", "down") == {"down": 1}
    assert troubles(both) == {"first": None, "second": None, "third": None}
    await both.close()


@pytest.mark.parametrize("next_one", [Full, Never, None], ids=["is down there too", "is refused there", "none works"])
async def test_what_is_known_to_be_taken_is_told_though_no_broker_takes_the_rest(next_one: type[Named] | None) -> None:
    """Or it would be sent again."""
    first, second = Full("first"), (next_one or Named)("second")
    both = FailoverBroker([first, second])
    await both.start()
    if next_one is None:
        await second.leave()
    receipts = await both.publish(DOWN)
    assert re.search("first has no room", reasons(receipts))
    assert takers(receipts) == ["first", None, "first", None]
    assert places_down(receipts) == {1, 3}
    assert await depths(first, "q", "down") == {"q": 2}
    await both.close()


async def test_who_reads_does_not_knock_at_one_that_is_away(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe does, for all of them: there may be many queues."""
    both, first, _ = two
    consume, asked = first.consume, list[str]()

    async def counted(queue: str, *, prefetch: int) -> Consumer:
        asked.append(queue)
        consumer: Consumer = await consume(queue, prefetch=prefetch)
        return consumer

    monkeypatch.setattr(first, "consume", counted)
    await both.consume("q", prefetch=1)
    await first.leave()
    await until(lambda: troubles(both)["first"], saying="the first to be away")
    probed, tried = first.starts, len(asked)
    await until(lambda: first.starts >= probed + 10, saying="many probes")
    assert len(asked) <= tried + 1  # one may have been on its way


async def test_an_answer_goes_back_by_the_broker_that_brought_its_command(two: Two) -> None:
    both, first, second = two
    consumer = await both.consume("commands", prefetch=5)
    await publish_all(second, [Outgoing("commands", b"do it")])
    [command] = await consumer.take(5)
    assert command.via == "second"
    await publish_all(both, [Outgoing("answers", b"done", prefer=command.via), Outgoing("answers", b"unasked")])
    assert [state.ready for state in await second.queues(["answers"])] == [1]
    assert [state.ready for state in await first.queues(["answers"])] == [1]
    await second.leave()
    await publish_all(both, [Outgoing("answers", b"done again", prefer="second")])
    assert [state.ready for state in await first.queues(["answers"])] == [2]


async def test_starting_at_once_from_many_sides_leaves_nothing_behind_after_the_close(two: Two) -> None:
    both, first, _ = two
    await both.close()
    await asyncio.gather(*(both.start() for _ in range(5)))
    await both.close()
    started = first.starts
    await asyncio.sleep(0.2)  # ten times the pause of a probe: one that was left behind would show
    assert first.starts == started
    assert all(link.trouble for link in both.statuses())


async def test_what_waits_for_room_keeps_its_lease() -> None:
    first, second = Named("first", lease=0.3), Named("second", lease=0.3)
    both = FailoverBroker([first, second])
    await both.start()
    consumer = await both.consume("q", prefetch=1)
    await asyncio.gather(first.publish([Outgoing("q", b"a")]), second.publish([Outgoing("q", b"b")]))
    [held] = await consumer.take(1)
    await until(lambda: len(consumer._out) == 2, saying="both to be here")
    for _ in range(8):
        await asyncio.sleep(0.1)  # the passing of the lease
        await consumer.extend([held])
    states = [*await first.queues(["q"]), *await second.queues(["q"])]
    assert [(state.ready, state.unacked) for state in states] == [(0, 1), (0, 1)]
    await both.close()


async def test_a_check_is_content_with_one_and_does_not_wait_for_a_frozen_one(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, first, _ = two
    monkeypatch.setattr("oraculo.brokers.failover.broker.CHECK_PATIENCE", 0.05)
    monkeypatch.setattr(first, "check", asyncio.Event().wait)
    async with asyncio.timeout(2):
        assert "memory" in await both.check()
