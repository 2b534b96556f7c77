"""Several brokers behind one: the conformance suite on two at once, and what happens when one goes away."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from structlog.testing import capture_logs

from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.memory import MemoryBroker
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Broker, Delivery, Link, NotTaken, Outgoing
from oraculo.ports.clock import SystemClock
from oraculo.testing.broker_suite import BrokerSuite
from tests.waiting import until


class Named(MemoryBroker):
    """A broker that can be pulled out and put back. It forgets nothing meanwhile, as a durable one would."""

    def __init__(self, name: str, delivery_limit: int = 20, lease: float | None = None) -> None:
        super().__init__(SystemClock(), delivery_limit=delivery_limit, lease=lease)
        self._name = name
        self.starts = 0
        self.away: str | None = None
        self.losses = 0

    @property
    def name(self) -> str:
        return self._name

    def links(self) -> Sequence[Link]:
        return [Link(self._name, self.away, self.losses)]

    async def start(self) -> None:
        self.starts += 1
        self._expect_here()
        await super().start()

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        self._expect_here()
        return await super().publish(messages)

    async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
        self._expect_here()
        return await super().consume(queue, prefetch=prefetch)

    async def check(self) -> str:
        self._expect_here()
        return await super().check()

    def _expect_here(self) -> None:
        if self.away is not None:
            raise BrokerUnavailable(self.away)

    async def leave(self) -> None:
        """Its consumers are lost, and nobody can reach it."""
        self.away = "pulled out"
        await self.lose_consumers()

    async def lose_consumers(self) -> None:
        assert self._depot is not None
        for queue in list(self._depot.queues.values()):
            for consumer in list(queue.consumers):
                await consumer.close()

    def come_back(self) -> None:
        self.away = None


class TestFailover(BrokerSuite):
    async def make_broker(self) -> Broker:
        return FailoverBroker([Named(name, self.delivery_limit) for name in ("first", "second")])


class TestFailoverWithTheFirstGone(BrokerSuite):
    async def make_broker(self) -> Broker:
        first = Named("first", self.delivery_limit)
        first.away = "never there"
        return FailoverBroker([first, Named("second", self.delivery_limit)])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("broker.PROBE_PAUSE", "broker.LONGEST_PROBE_PAUSE", "broker.PULSE", "consumer.FAILED_PAUSE"):
        monkeypatch.setattr(f"oraculo.brokers.failover.{name}", 0.02)
    monkeypatch.setattr("oraculo.brokers.failover.consumer.RESUBSCRIBE_PAUSE", 0.02)
    monkeypatch.setattr("oraculo.core.unread._LONGER", 0.2)


@pytest.fixture
async def two() -> AsyncIterator[tuple[FailoverBroker, Named, Named]]:
    first, second = Named("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    yield both, first, second
    await both.close()


Two = tuple[FailoverBroker, Named, Named]


def troubles(broker: Broker) -> dict[str, str | None]:
    return {link.name: link.trouble for link in broker.links()}


async def test_messages_go_to_the_first_that_works_and_to_the_first_again_once_it_is_back(two: Two) -> None:
    both, first, _ = two
    assert await both.publish([Outgoing("q", b"1")]) == ["first"]
    await first.leave()
    assert await both.publish([Outgoing("q", b"2")]) == ["second"]
    assert troubles(both) == {"first": "pulled out", "second": None}
    first.come_back()
    await until(lambda: troubles(both)["first"] is None, saying="the first is used again")
    assert await both.publish([Outgoing("q", b"3")]) == ["first"]


async def test_all_that_work_are_listened_to(two: Two) -> None:
    both, first, second = two
    consumer = await both.consume("q", prefetch=10)
    await second.publish([Outgoing("q", b"from the second")])
    await first.publish([Outgoing("q", b"from the first")])
    taken = [*await consumer.take(1), *await consumer.take(1)]
    assert {delivery.body for delivery in taken} == {b"from the second", b"from the first"}
    assert len({delivery.token for delivery in taken}) == 2
    await consumer.ack(taken)
    states = [*await first.queues(["q"]), *await second.queues(["q"])]
    assert all(state.ready + state.unacked == 0 for state in states)


async def test_a_consumer_outlives_its_broker_and_hears_it_again_when_it_is_back(two: Two) -> None:
    both, first, _ = two
    consumer = await both.consume("q", prefetch=10)
    await both.publish([Outgoing("q", b"before")])
    [held] = await consumer.take(10)
    await first.leave()
    await both.publish([Outgoing("q", b"meanwhile")])
    [other] = await consumer.take(10)
    assert other.body == b"meanwhile"
    await consumer.ack([held, other])  # the first of them is the lost broker's: that does nothing, and does not raise
    first.come_back()
    async with asyncio.timeout(10):
        [again] = await consumer.take(10)
    assert (again.body, again.redeliveries) == (b"before", 1)


async def test_settling_what_a_lost_broker_had_delivered_touches_nothing_of_another(two: Two) -> None:
    both, first, second = two
    consumer = await both.consume("q", prefetch=10)
    await first.publish([Outgoing("q", b"lost")])
    [lost] = await consumer.take(1)
    await second.publish([Outgoing("q", b"kept")])
    [kept] = await consumer.take(1)
    await first.leave()
    await until(lambda: len(consumer._out) == 1)
    await consumer.dead_letter(lost, "too late")
    await consumer.retry(lost, 0.0, "too late")
    await consumer.extend([lost, kept])
    [state] = await second.queues(["q"])
    assert (state.unacked, state.dead_letters) == (1, 0)


async def test_queues_that_were_declared_while_a_broker_was_away_are_there_when_it_is_back(two: Two) -> None:
    both, first, _ = two
    await first.leave()
    with pytest.raises(BrokerUnavailable):
        await first.publish([Outgoing("x", b"")])
    await both.publish([Outgoing("x", b"")])
    await both.declare(["late"])
    first.come_back()
    await until(lambda: troubles(both)["first"] is None)
    assert [state.queue for state in await first.queues(["late"])] == ["late"]


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
    await both.declare(["refused", "endless", "late"])
    first.come_back()
    await until(lambda: first.queues(["late"]), saying="the last queue to be made on the first")
    assert troubles(both)["first"] is None
    assert await both.publish([Outgoing("q", b"1")]) == ["first"]
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
        assert both.links()[0].deaf == ("q",)
    await first.publish([Outgoing("q", b"heard")])
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
    assert await both.publish([Outgoing("q", b"1")]) == ["second"]
    frozen.set()
    await until(lambda: troubles(both)["first"] is None)


async def test_without_any_broker_it_says_why_of_each(two: Two) -> None:
    both, first, second = two
    await first.leave()
    await second.leave()
    for call in (both.publish([Outgoing("q", b"")]), both.queues(), both.consume("q", prefetch=1)):
        with pytest.raises(BrokerUnavailable):
            await call
    with pytest.raises(BrokerUnavailable, match="first: pulled out; second: pulled out"):
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


async def test_dead_letters_of_all_brokers_are_shown_paged_and_moved_by_ids_that_name_their_broker(two: Two) -> None:
    both, first, second = two
    for broker in (first, second):
        letters = [Outgoing("q", f"{broker.name} {n}".encode(), reason="why") for n in range(3)]
        await broker.publish(letters)
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


async def test_losses_are_passed_on(two: Two) -> None:
    both, first, _ = two
    first.losses = 3
    assert [link.losses for link in both.links()] == [3, 0]


# -- refusals, preferences, leases ------------------------------------------------------------------------------------


class Refusing(Named):
    """Says no to whatever is about these queues, while it can be reached."""

    refused: frozenset[str] = frozenset()

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        self._refuse(*(message.queue for message in messages))
        return await super().publish(messages)

    async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
        self._refuse(queue)
        return await super().consume(queue, prefetch=prefetch)

    async def declare(self, queues: Sequence[str]) -> None:
        self._refuse(*queues)
        await super().declare(queues)

    def _refuse(self, *queues: str) -> None:
        if self.refused & set(queues):
            raise BrokerError("not allowed")


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
    assert [link.deaf for link in both.links()] == [("q",), ()]
    assert await both.publish([Outgoing("q", b"over the second")]) == ["second"]
    assert [delivery.body for delivery in await consumer.take(5)] == [b"over the second"]
    first.refused = frozenset()
    await until(lambda: both.links()[0].deaf == (), saying="the first to be asked again")
    await first.publish([Outgoing("q", b"over the first")])
    async with asyncio.timeout(10):
        assert [delivery.body for delivery in await consumer.take(5)] == [b"over the first"]
    assert [state.consumers for state in await second.queues(["q"])] == [1]


class Unreadable(Named):
    """Whoever subscribes may do so, and not read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.forbidden: str | None = "not permitted"
        self.refusals = 0

    async def consume(self, queue: str, *, prefetch: int):  # type: ignore[no-untyped-def]
        consumer = await super().consume(queue, prefetch=prefetch)
        take = consumer.take

        async def take_if_permitted(limit: int) -> Sequence[Delivery]:
            if self.forbidden is not None:
                self.refusals += 1
                raise BrokerError(self.forbidden)
            return await take(limit)

        consumer.take = take_if_permitted
        return consumer


async def test_one_that_cannot_be_read_is_told_with_the_reason_and_asked_last_until_it_can() -> None:
    first = Unreadable("first")
    both = FailoverBroker([first, Named("second")])
    await both.start()
    with capture_logs() as logs:
        await both.consume("q", prefetch=5)
        for refusals in range(2, 7):  # consumers are made again and again, and none is believed
            await until(lambda: first.refusals >= refusals, saying="the next to fail")  # noqa: B023
            assert both.links()[0].unread == (("q", "not permitted"),)
            assert both.links()[0].deaf == ("q",)
            assert await both.publish([Outgoing("commands", b"1")]) == ["second"]
        first.forbidden = "no such queue"
        await until(lambda: both.links()[0].unread == (("q", "no such queue"),), saying="the new reason")
    assert [log["reason"] for log in logs] == ["not permitted", "no such queue"]
    assert await both.publish([Outgoing("answers", b"1", prefer="first")]) == ["first"]
    first.forbidden = None
    await until(lambda: not both.links()[0].deaf, saying="a consumer that waits in peace to be believed")
    assert await both.publish([Outgoing("commands", b"1")]) == ["first"]
    await both.close()


async def test_one_that_cannot_be_read_is_used_while_there_is_no_other() -> None:
    first, second = Unreadable("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    await both.consume("q", prefetch=5)
    await until(lambda: both.links()[0].deaf, saying="it to be found out")
    await second.leave()
    assert await both.publish([Outgoing("commands", b"1")]) == ["first"]
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


async def test_what_all_of_them_refuse_is_refused(refusing: tuple[FailoverBroker, Refusing, Named]) -> None:
    both, _, second = refusing
    await second.leave()
    with pytest.raises(BrokerError, match="not allowed"):
        await both.publish([Outgoing("q", b"")])


class Full(Named):
    """It has no room in the queue `full`, and its queue `down` does not work."""

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        vias = [None if message.queue in ("full", "down") else self.name for message in messages]
        await super().publish([message for message, via in zip(messages, vias, strict=True) if via is not None])
        if None in vias:
            down = {place for place, message in enumerate(messages) if message.queue == "down"}
            raise NotTaken(f"{self.name} has no room", vias, down)
        return [self.name] * len(messages)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        raise NotTaken(f"{self.name} has no room")


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
    with pytest.raises(NotTaken, match="first has no room; second has no room") as caught:
        await both.publish(batch)
    assert caught.value.vias == [None, "first", None, "second"]
    assert troubles(both) == {"first": None, "second": None}
    assert [await depths(one, "q", "full") for one in (first, second)] == [{"q": 1}, {"q": 1}]
    with pytest.raises(NotTaken) as caught:
        await both.publish(batch[:2])
    assert caught.value.vias == [None, "first"]
    with pytest.raises(NotTaken, match="second has no room"):
        await both.redrive("full")
    assert troubles(both) == {"first": None, "second": None}
    await both.close()


DOWN = [Outgoing("q", b"0"), Outgoing("down", b"1"), Outgoing("q", b"2"), Outgoing("down", b"3")]


async def test_what_is_for_a_queue_that_is_down_goes_to_the_next_and_the_rest_stays() -> None:
    first, second = Full("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    assert await both.publish(DOWN) == ["first", "second", "first", "second"]
    assert troubles(both) == {"first": None, "second": None}
    assert await depths(first, "q", "down") == {"q": 2}
    assert await depths(second, "q", "down") == {"down": 2}
    with pytest.raises(NotTaken) as caught:
        await both.publish([*DOWN, Outgoing("full", b"4")])
    assert caught.value.vias == ["first", "second", "first", "second", None]
    await both.close()


class Stuck(Full):
    """It says of itself that `down` is."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[str] = []

    def links(self) -> Sequence[Link]:
        return [Link(self.name, self.away, stuck=(("down", "no majority"),))]

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        self.asked += [message.queue for message in messages]
        return await super().publish(messages)


async def test_a_queue_that_is_known_to_be_down_is_asked_last() -> None:
    first, second = Stuck("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    letter = Outgoing("down", b"4", reason="r")  # which goes to another queue
    with pytest.raises(NotTaken) as caught:
        await both.publish([*DOWN, letter, Outgoing("full", b"5")])
    assert caught.value.vias == ["first", "second", "first", "second", "second", None]
    assert first.asked == ["q", "q", "down", "full"]
    await second.leave()
    for _ in range(2):  # the other breaks in the attempt, and is out then
        first.asked.clear()
        with pytest.raises(NotTaken) as caught:
            await both.publish(DOWN[1:])
        assert caught.value.vias == [None, "first", None]
        assert caught.value.down == {0, 2}
        assert first.asked == ["q", "down", "down"]
    with pytest.raises(NotTaken):
        await both.publish([DOWN[1]])
    await both.close()


async def test_it_says_why_when_a_queue_is_down_at_one_and_the_others_are_lost() -> None:
    first, second = Stuck("first"), Named("second")
    both = FailoverBroker([first, second])
    await both.start()
    await first.leave()
    await second.leave()
    with pytest.raises(BrokerUnavailable, match="pulled out"):
        await both.publish([Outgoing("down", b"1")])
    await both.close()


async def test_of_two_groups_what_the_first_took_is_told_though_none_takes_the_second() -> None:
    class OnlyOnce(Named):
        async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
            vias = await super().publish(messages)
            await self.leave()
            return vias

    both = FailoverBroker([OnlyOnce("first")])
    await both.start()
    with pytest.raises(NotTaken, match="pulled out") as caught:
        await both.publish([Outgoing("q", b"1"), Outgoing("q", b"2", prefer="second")])
    assert caught.value.vias == ["first", None]
    await both.close()


class Never(Named):
    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        raise BrokerError("never")


class Picky(Named):
    """Takes all but what is too large, and says that there was such a one."""

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        small = [message for message in messages if len(message.body) < 10]
        await super().publish(small)
        if len(small) < len(messages):
            raise BrokerError("too large")
        return [self.name] * len(messages)


async def test_beside_one_that_the_next_broker_will_never_take_the_others_are_known_to_be_taken() -> None:
    """Or they would be sent again and again."""
    first, second = Full("first"), Picky("second")
    both = FailoverBroker([first, second])
    await both.start()
    with pytest.raises(NotTaken, match="first has no room; too large") as caught:
        await both.publish([*DOWN, Outgoing("down", bytes(10))])
    assert caught.value.vias == ["first", "second", "first", "second", None]
    assert caught.value.down == {4}
    await both.close()


@pytest.mark.parametrize("next_one", [Full, Never, None], ids=["is down there too", "is refused there", "none works"])
async def test_what_is_known_to_be_taken_is_told_though_no_broker_takes_the_rest(next_one: type[Named] | None) -> None:
    """Or it would be sent again."""
    first, second = Full("first"), (next_one or Named)("second")
    both = FailoverBroker([first, second])
    await both.start()
    if next_one is None:
        await second.leave()
    with pytest.raises(NotTaken, match="first has no room") as caught:
        await both.publish(DOWN)
    assert caught.value.vias == ["first", None, "first", None]
    assert caught.value.down == {1, 3}
    assert await depths(first, "q", "down") == {"q": 2}
    await both.close()


async def test_an_answer_goes_back_by_the_broker_that_brought_its_command(two: Two) -> None:
    both, first, second = two
    consumer = await both.consume("commands", prefetch=5)
    await second.publish([Outgoing("commands", b"do it")])
    [command] = await consumer.take(5)
    assert command.via == "second"
    await both.publish([Outgoing("answers", b"done", prefer=command.via), Outgoing("answers", b"unasked")])
    assert [state.ready for state in await second.queues(["answers"])] == [1]
    assert [state.ready for state in await first.queues(["answers"])] == [1]
    await second.leave()
    await both.publish([Outgoing("answers", b"done again", prefer="second")])
    assert [state.ready for state in await first.queues(["answers"])] == [2]


async def test_starting_at_once_from_many_sides_leaves_nothing_behind_after_the_close(two: Two) -> None:
    both, first, _ = two
    await both.close()
    await asyncio.gather(*(both.start() for _ in range(5)))
    await both.close()
    started = first.starts
    await asyncio.sleep(0.2)  # ten times the pause of a probe: one that was left behind would show
    assert first.starts == started
    assert all(link.trouble for link in both.links())


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
