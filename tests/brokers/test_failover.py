"""Fail-over between brokers: who is sent to, who is heard, who comes back."""

import asyncio
from collections.abc import Sequence

import pytest

from oraculo.brokers.failover import FailoverBroker
from oraculo.errors import BrokerError, BrokerUnavailable, QueueDown, QueueFull, QueueUnavailable
from oraculo.ports.broker import Broker, Consumer, Outgoing, publish_all
from oraculo.ports.broker_admin import QueueState
from oraculo.testing.broker_suite import BrokerSuite
from tests.brokers import failover_stage as stage
from tests.brokers.failover_stage import Named, Two, Unreadable, troubles
from tests.receipts import takers
from tests.waiting import until

impatient, two = stage.impatient, stage.two  # fixtures


class TestFailover(BrokerSuite):
    async def make_broker(self) -> Broker:
        return FailoverBroker([Named(name, self.delivery_limit) for name in ("first", "second")])


class TestFailoverWithTheFirstGone(BrokerSuite):
    async def make_broker(self) -> Broker:
        first = Named("first", self.delivery_limit)
        first.away = "never there"
        return FailoverBroker([first, Named("second", self.delivery_limit)])


async def test_messages_go_to_the_first_that_works_and_to_the_first_again_once_it_is_back(two: Two) -> None:
    both, first, _ = two
    assert takers(await both.publish([Outgoing("q", b"1")])) == ["first"]
    await first.leave()
    assert takers(await both.publish([Outgoing("q", b"2")])) == ["second"]
    assert troubles(both) == {"first": "pulled out", "second": None}
    first.come_back()
    await until(lambda: troubles(both)["first"] is None, saying="the first is used again")
    assert takers(await both.publish([Outgoing("q", b"3")])) == ["first"]


async def test_all_that_work_are_listened_to(two: Two) -> None:
    both, first, second = two
    consumer = await both.consume("q", prefetch=10)
    await publish_all(second, [Outgoing("q", b"from the second")])
    await publish_all(first, [Outgoing("q", b"from the first")])
    taken = [*await consumer.take(1), *await consumer.take(1)]
    assert {delivery.body for delivery in taken} == {b"from the second", b"from the first"}
    assert len({delivery.token for delivery in taken}) == 2
    await consumer.ack(taken)
    states = [*await first.queues(["q"]), *await second.queues(["q"])]
    assert all(state.ready + state.unacked == 0 for state in states)


async def test_a_consumer_outlives_its_broker_and_hears_it_again_when_it_is_back(two: Two) -> None:
    both, first, _ = two
    consumer = await both.consume("q", prefetch=10)
    await publish_all(both, [Outgoing("q", b"before")])
    [held] = await consumer.take(10)
    await first.leave()
    await publish_all(both, [Outgoing("q", b"meanwhile")])
    [other] = await consumer.take(10)
    assert other.body == b"meanwhile"
    await consumer.ack([held, other])  # the first of them is the lost broker's: that does nothing, and does not raise
    first.come_back()
    async with asyncio.timeout(10):
        [again] = await consumer.take(10)
    assert (again.body, again.redeliveries) == (b"before", 1)


async def test_no_more_is_handed_out_than_the_prefetch_however_many_brokers_have_more(two: Two) -> None:
    both, first, second = two
    consumer = await both.consume("q", prefetch=4)
    some = [Outgoing("q", b"%d" % number) for number in range(4)]
    await asyncio.gather(first.publish(some), second.publish(some))
    await until(lambda: len(consumer._waiting) == 8, saying="both to have brought theirs")
    assert [len(await consumer.take(3)), len(await consumer.take(9))] == [3, 1]


async def test_a_consumer_that_fails_is_closed_so_that_what_it_held_comes_again() -> None:
    first = Unreadable("first")
    one, first.forbidden = FailoverBroker([first]), None
    await one.start()
    consumer = await one.consume("q", prefetch=3)
    await publish_all(one, [Outgoing("q", b"held")])
    await consumer.take(1)
    first.forbidden = "not permitted any more"
    await publish_all(one, [Outgoing("q", b"brought by the take that waits")])
    await until(lambda: first.refusals, saying="the next take to be refused")
    first.forbidden = None
    async with asyncio.timeout(5):
        assert [each.redeliveries for each in [*await consumer.take(1), *await consumer.take(1)]] == [1, 1]
    await one.close()


async def test_settling_what_a_lost_broker_had_delivered_touches_nothing_of_another(two: Two) -> None:
    both, first, second = two
    consumer = await both.consume("q", prefetch=10)
    await publish_all(first, [Outgoing("q", b"lost")])
    [lost] = await consumer.take(1)
    await publish_all(second, [Outgoing("q", b"kept")])
    [kept] = await consumer.take(1)
    await first.leave()
    await until(lambda: len(consumer._out) == 1)
    await consumer.dead_letter(lost, "too late")
    await consumer.retry(lost, 0.0, "too late")
    await consumer.extend([lost, kept])
    [state] = await second.queues(["q"])
    assert (state.unacked, state.dead_letters) == (1, 0)


async def test_a_queue_whose_reader_is_busy_is_made_on_a_broker_that_comes_back_empty(two: Two) -> None:
    """A plain producer may publish there meanwhile, and without the queue RabbitMQ drops that in silence."""
    both, first, _ = two
    consumer = await both.consume("q", prefetch=1)
    await publish_all(both, [Outgoing("q", b"long")])
    [_] = await consumer.take(1)
    await first.leave()
    await until(lambda: troubles(both)["first"] is not None)
    await first.remove(["q"])
    first.come_back()
    await until(lambda: first.queues(["q"]), saying="the queue to be there again")


async def test_a_queue_that_could_not_be_read_is_told_of_no_more_once_its_consumer_is_closed(two: Two) -> None:
    both, _, _ = two
    member = both._members[0]
    consumer = await both.consume("replies", prefetch=1)
    member.note_unread("replies", BrokerError("no right"), was_read=False)
    assert member.is_deaf
    await consumer.close()
    assert not member.is_deaf


async def test_a_broker_that_refuses_or_never_makes_a_queue_comes_back_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Choosy(Named):
        async def declare(self, queues: Sequence[str]) -> None:
            if "refused" in queues:
                raise BrokerError("not allowed")
            if "endless" in queues:
                await asyncio.Event().wait()
            await super().declare(queues)

    monkeypatch.setattr("oraculo.brokers.failover.broker.PROBE_PATIENCE", 0.05)
    first = Choosy("first")
    both = FailoverBroker([first, Named("second")])
    await both.start()
    await first.leave()
    await until(lambda: troubles(both)["first"] is not None)
    for queue in ("refused", "endless", "late"):
        await both.consume(queue, prefetch=1)
    first.come_back()
    await until(lambda: first.queues(["late"]), saying="the last queue to be made on the first")
    assert troubles(both)["first"] is None
    assert takers(await both.publish([Outgoing("q", b"1")])) == ["first"]
    await both.close()


async def test_a_fault_of_an_adapter_is_the_trouble_of_its_broker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stumble(*_: object, **__: object) -> None:
        raise AttributeError("'list' object has no attribute 'get'")

    first = Named("first")
    both = FailoverBroker([first, Named("second")])
    with monkeypatch.context() as stumbling:
        stumbling.setattr(first, "start", stumble)
        await both.start()
        assert troubles(both) == {
            "first": "AttributeError: 'list' object has no attribute 'get'",
            "second": None,
        }
    await until(lambda: troubles(both)["first"] is None, saying="the first to be used")
    with monkeypatch.context() as stumbling:
        stumbling.setattr(first, "check", stumble)
        await until(lambda: troubles(both)["first"] is not None, saying="the fault to be found by the pulse")
    await until(lambda: troubles(both)["first"] is None, saying="the first to be used again")
    with monkeypatch.context() as stumbling:
        stumbling.setattr(first, "consume", stumble)
        consumer = await both.consume("q", prefetch=1)
        assert both.statuses()[0].deaf == ("q",)
    await publish_all(first, [Outgoing("q", b"heard")])
    async with asyncio.timeout(10):
        assert [delivery.body for delivery in await consumer.take(1)] == [b"heard"]
    await both.close()


async def test_a_broker_that_hangs_is_found_out_by_its_pulse(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    both, first, _ = two
    monkeypatch.setattr("oraculo.brokers.failover.broker.PROBE_PATIENCE", 0.05)
    frozen = asyncio.Event()

    async def hang() -> str:
        await frozen.wait()
        return "thawed"

    monkeypatch.setattr(first, "check", hang)
    await until(lambda: troubles(both)["first"] is not None, saying="the frozen one is passed over")
    assert troubles(both)["first"] == "no answer to a probe"
    assert takers(await both.publish([Outgoing("q", b"1")])) == ["second"]
    frozen.set()
    await until(lambda: troubles(both)["first"] is None)


async def test_a_subscription_that_is_given_up_leaves_no_consumer_behind(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody reads would be given messages all the same."""
    both, first, second = two

    async def hang(queue: str, *, prefetch: int) -> Consumer:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(second, "consume", hang)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await both.consume("q", prefetch=10)
    assert not any(state.consumers for state in await first.queues(["q"]))


async def test_without_any_broker_it_says_why_of_each(two: Two) -> None:
    both, first, second = two
    await first.leave()
    await second.leave()
    for call in (both.publish([Outgoing("q", b"")]), both.queues(), both.consume("q", prefetch=1)):
        with pytest.raises(BrokerUnavailable):
            await call
    with pytest.raises(BrokerUnavailable, match="first: pulled out; second: pulled out"):
        await both.check()


async def test_a_check_that_none_answers_says_so_of_each(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    both, *each = two
    monkeypatch.setattr("oraculo.brokers.failover.broker.CHECK_PATIENCE", 0.05)
    for one in each:
        monkeypatch.setattr(one, "check", asyncio.Event().wait)
    with pytest.raises(BrokerUnavailable, match="first: no answer in time; second: no answer in time"):
        await both.check()


async def test_it_starts_with_one_of_them_and_not_with_none() -> None:
    first, second = Named("first"), Named("second")
    first.away = second.away = "off"
    both = FailoverBroker([first, second])
    with pytest.raises(BrokerUnavailable, match="first: off; second: off"):
        await both.start()
    second.come_back()
    await both.start()
    assert troubles(both) == {"first": "off", "second": None}
    await both.close()


async def test_when_none_could_be_started_whoever_calls_is_told_why_of_each() -> None:
    first, second = Named("first"), Named("second")
    first.away, second.away = "no route", "no such host"
    both = FailoverBroker([first, second])
    with pytest.raises(BrokerUnavailable):
        await both.start()
    for call in (both.publish([Outgoing("q", b"")]), both.consume("q", prefetch=1), both.check()):
        with pytest.raises(BrokerUnavailable, match="first: no route; second: no such host"):
            await call


async def test_dead_letters_of_all_brokers_are_shown_paged_and_moved_by_ids_that_name_their_broker(two: Two) -> None:
    both, first, second = two
    for broker in (first, second):
        letters = [Outgoing("q", f"{broker.name} {n}".encode(), reason="why") for n in range(3)]
        await publish_all(broker, letters)
    seen, after = [], None
    while page := await both.dead_letters("q", limit=2, after=after):
        assert len(page) <= 2
        seen += page
        after = page[-1].id
    assert [letter.body for letter in seen] == [
        f"{name} {n}".encode() for name in ("first", "second") for n in range(3)
    ]
    assert len({letter.id for letter in seen}) == 6
    assert await both.discard("q", [seen[0].id, seen[5].id, "first:no-such", "nobody:1", "odd"]) == 2
    assert await both.redrive("q", [seen[1].id, seen[4].id]) == 2
    assert await both.redrive("q") == 2
    assert [state.ready for state in await both.queues(["q"])] == [4]
    with pytest.raises(BrokerError, match="not the id"):
        await both.dead_letters("q", limit=1, after="odd")


async def test_dead_letters_are_shown_though_one_broker_cannot_tell_of_its_own(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, first, second = two

    async def cannot_tell(*_: object, **__: object) -> None:
        raise QueueDown("its queue has no leader")

    for look in ("dead_letters", "look_through"):
        monkeypatch.setattr(first, look, cannot_tell)
    with pytest.raises(QueueUnavailable, match="no leader"):
        await both.dead_letters("q", limit=5)
    await publish_all(second, [Outgoing("q", b"1", reason="why")])
    assert [letter.body for letter in await both.dead_letters("q", limit=5)] == [b"1"]
    seen = list[bytes]()
    await both.look_through("q", lambda letter: seen.append(letter.body))
    assert seen == [b"1"]
    with pytest.raises(QueueUnavailable, match="no leader"):
        await both.look_through("q", lambda letter: seen.append(letter.body), ["first:1"])
    assert troubles(both) == {"first": None, "second": None}


@pytest.mark.parametrize("which", ["all", "those named"])
async def test_a_full_queue_keeps_no_dead_letter_of_another_broker_from_being_sent_again(
    two: Two, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, first, second = two

    async def has_no_room(*_: object) -> int:
        raise QueueFull("first has no room")

    monkeypatch.setattr(first, "redrive", has_no_room)
    for broker in (first, second):
        await publish_all(broker, [Outgoing("q", b"", reason="why")])
    ids = [letter.id for letter in await both.dead_letters("q", limit=5)]
    with pytest.raises(QueueUnavailable, match="first has no room"):
        await both.redrive("q", None if which == "all" else ids)
    assert [(state.ready, state.dead_letters) for state in await second.queues(["q"])] == [(1, 0)]
    assert troubles(both) == {"first": None, "second": None}


async def test_what_one_broker_does_not_tell_is_not_known_of_the_whole(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, first, second = two
    await second.declare(["q"])

    async def untold(_names: Sequence[str] | None = None) -> list[QueueState]:
        return [QueueState("q", 1, None, 0, 1)]

    monkeypatch.setattr(first, "queues", untold)
    [state] = await both.queues(["q"])
    assert (state.ready, state.unacked) == (1, None)
    assert {name: at.unacked for name, at in state.at.items()} == {"first": None, "second": 0}


async def test_a_queue_is_told_of_as_a_whole_and_as_each_broker_has_it(two: Two) -> None:
    both, first, second = two
    await publish_all(first, [Outgoing("q", b"1"), Outgoing("q", b"2", reason="why")])
    await publish_all(second, [Outgoing("q", b"3")])
    await second.consume("q", prefetch=1)
    [state] = await both.queues(["q"])
    assert (state.ready + state.unacked, state.dead_letters, state.consumers) == (2, 1, 1)
    assert {name: (at.dead_letters, at.consumers) for name, at in state.at.items()} == {
        "first": (1, 0),
        "second": (0, 1),
    }
