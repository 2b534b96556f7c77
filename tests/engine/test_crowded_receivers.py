"""Receivers that say nothing or have many waiting: they hold up no other, and nobody is brought the same twice."""

import asyncio
import time
from collections.abc import Sequence

import httpx2
import pytest

from oraculo.core import machine
from oraculo.core.events import Delivered
from oraculo.core.machine import delivery as core_delivery
from oraculo.core.run import Changes, Channel, DeliveryStatus
from oraculo.engine.decide.cache import Plans
from oraculo.engine.deliver import deliveries, receivers
from oraculo.engine.deliver.webhooks import NotPosted
from oraculo.errors import QueueFull
from oraculo.ports.broker import Outgoing, Receipt
from oraculo.ports.clock import SystemEntropy
from oraculo.ports.store import Store
from oraculo.ports.telemetry import DeliveryAttempted
from oraculo.settings import EngineSettings, Settings, WebhookSettings
from oraculo.testing.harness import Harness
from tests.engine.broker_stage import Durable, Told
from tests.engine.test_deliveries import delivery_state
from tests.waiting import until

QUICK = EngineSettings(poll=0.02, note_linger=0.005, stop_grace=0.05)
MUTE, GOOD = "http://mudo.example/gancho", "http://bom.example/gancho"


class Receivers:
    """Those of MUTE say nothing until it speaks; all others answer at once."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.speaks = asyncio.Event()

    async def post(self, url: str, body: bytes, headers: dict[str, str]) -> int:
        self.called.append(headers["webhook-id"].removesuffix(".1"))
        if url == MUTE:
            await self.speaks.wait()
        return 200


def engine(receivers: Receivers, **webhook: float) -> Harness:
    settings = Settings(engine=QUICK, webhook=WebhookSettings(**{"concurrency": 4, **webhook}))
    return Harness(settings=settings, post=receivers.post)


async def ended_run(oraculo: Harness, webhook: str, **more: object) -> str:
    return await oraculo.submit({"destinos": ["escavador_a"], "timeout": 0.02, "webhook": webhook, **more})


async def dues(oraculo: Harness, run_ids: Sequence[str]) -> list[float]:
    """In how many seconds the timer of each delivery rings."""
    heads = await oraculo.store.heads(run_ids)
    return [(head.deliveries[0].due_at or 0.0) - time.time() for head in heads.values()]


async def test_a_receiver_that_says_nothing_holds_up_no_other() -> None:
    receivers = Receivers()
    async with engine(receivers) as oraculo:
        for _ in range(20):
            await ended_run(oraculo, MUTE)
        await until(lambda: len(oraculo.engine.parts.deliveries._errands) == 20, saying="all to wait for it")
        assert len(receivers.called) == 1, "a quarter of four places"
        run_id = await ended_run(oraculo, GOOD)
        await until(lambda: run_id in receivers.called, saying="the webhook of the other")


async def test_what_waits_for_its_turn_is_left_alone_for_longer_the_more_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_delivery, "DELIVERY_LEASE", 0.2)
    monkeypatch.setattr(deliveries, "MAX_UNDER_WAY", 10)
    async with engine(Receivers()) as oraculo:
        waiting = [await ended_run(oraculo, MUTE) for _ in range(30)]

        async def are_left_alone() -> bool:
            return min(await dues(oraculo, waiting)) > 0.6

        await until(are_left_alone, saying="timers that ring much later than the lease")
        heads = (await oraculo.store.heads(waiting)).values()
        assert {head.deliveries[0].attempts for head in heads} == {0}


async def test_an_attempt_has_a_lease_that_is_longer_than_it_may_take() -> None:
    receivers = Receivers()
    async with engine(receivers, timeout=60) as oraculo:
        run_id = await ended_run(oraculo, MUTE)
        await until(lambda: receivers.called)
        assert min(await dues(oraculo, [run_id])) > 60


async def test_what_another_engine_delivered_while_it_waited_is_not_delivered_again() -> None:
    receivers = Receivers()
    async with engine(receivers, timeout=60) as oraculo:
        first = await ended_run(oraculo, MUTE)
        await until(lambda: receivers.called == [first])
        second, third = await ended_run(oraculo, MUTE), await ended_run(oraculo, MUTE)
        await until(lambda: len(oraculo.engine.parts.deliveries._errands) == 3, saying="two to wait for their turn")
        await delivered_by_another(oraculo.store, second)
        receivers.speaks.set()
        await oraculo.engine.parts.deliveries.finished()
        assert receivers.called == [first, third]


async def test_what_another_engine_delivered_is_not_delivered_again_though_it_was_put_off_for_long() -> None:
    receivers = Receivers()
    async with engine(receivers, timeout=5) as oraculo:
        courier = oraculo.engine.parts.deliveries
        first, second = await one_waits_for_another(oraculo, receivers)
        courier._move(courier._errands[second, 0], 100.0)
        courier._errands[second, 0].is_put_off = True

        async def is_put_off() -> bool:
            return min(await dues(oraculo, [second])) > 50

        await until(is_put_off)
        await delivered_by_another(oraculo.store, second)
        receivers.speaks.set()
        await courier.finished()
        assert receivers.called == [first]


async def test_what_waited_when_an_engine_stops_is_not_left_waiting() -> None:
    receivers = Receivers()
    async with engine(receivers, timeout=60) as oraculo:
        waiting = [await ended_run(oraculo, MUTE) for _ in range(5)]
        await until(lambda: len(oraculo.engine.parts.deliveries._errands) == 5, saying="all to wait for it")
        for errand in oraculo.engine.parts.deliveries._errands.values():
            if not errand.has_begun:
                oraculo.engine.parts.deliveries._move(errand, 100.0)
                errand.is_put_off = True
        await oraculo.engine.parts.deliveries.abandon()

        async def are_due_soon() -> bool:
            return max(await dues(oraculo, [run_id for run_id in waiting if run_id not in receivers.called])) < 20

        await until(are_due_soon, saying="timers that ring soon")


async def test_a_new_edition_takes_the_place_of_the_one_that_waits() -> None:
    receivers = Receivers()
    async with engine(receivers, timeout=60) as oraculo:
        first, second = await one_waits_for_another(oraculo, receivers)
        await oraculo.operations.repeat(second)
        await until(lambda: oraculo.engine.parts.deliveries._errands[second, 0].edition == 2, saying="the new edition")
        receivers.speaks.set()
        await oraculo.engine.parts.deliveries.finished()
        assert receivers.called == [first, f"{second}.2"]
        assert not oraculo.engine.parts.deliveries._receivers[Channel.WEBHOOK]._bytes


async def test_what_waits_counts_as_much_as_its_last_edition_is_large() -> None:
    receivers = Receivers()
    async with engine(receivers, timeout=60) as oraculo:
        courier = oraculo.engine.parts.deliveries
        first, second = await one_waits_for_another(oraculo, receivers)
        courier.deliver((await oraculo.store.heads([second]))[second], bytes(5000), [0])
        turns_of_webhooks = courier._receivers[Channel.WEBHOOK]
        assert turns_of_webhooks._bytes == 5000 + len(courier._errands[first, 0].aggregate)
        receivers.speaks.set()
        await courier.finished()
        assert not turns_of_webhooks._bytes


async def one_waits_for_another(oraculo: Harness, receivers: Receivers) -> tuple[str, str]:
    """The run whose webhook is being posted to the receiver that does not speak, and one that waits for its turn."""
    first = await ended_run(oraculo, MUTE)
    await until(lambda: receivers.called == [first])
    second = await ended_run(oraculo, MUTE)
    await until(lambda: (second, 0) in oraculo.engine.parts.deliveries._errands, saying="one to wait for its turn")
    return first, second


async def delivered_by_another(store: Store, run_id: str) -> None:
    run = Plans().restore((await store.load([run_id]))[run_id])
    changes = Changes(run)
    machine.apply(run, Delivered(0, 1), time.time(), changes)
    assert not (await store.commit([], [changes])).conflicts


async def test_bytes_of_webhooks_that_wait_hold_up_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "MAX_BYTES_UNDER_WAY", 500)
    async with engine(Receivers()) as oraculo:
        for _ in range(3):
            await ended_run(oraculo, MUTE)
        await until(lambda: oraculo.engine.parts.deliveries._errands, saying="a webhook under way")
        await oraculo.submit({"destinos": ["escavador_a"], "timeout": 0.02, "responder_em": "respostas"})
        await until(lambda: oraculo.broker.queues(["respostas"]), saying="the reply")


async def test_a_reply_comes_soon_after_its_queue_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_delivery, "DELIVERY_LEASE", 0.05)
    broker, told, has_room = Durable("rabbitmq"), Told(), asyncio.Event()
    take = broker.publish

    async def publish(messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if messages[0].queue == "respostas" and not has_room.is_set():
            return [Receipt(error=QueueFull("respostas is full"))] * len(messages)
        return await take(messages)

    monkeypatch.setattr(broker, "publish", publish)
    settings = Settings(engine=QUICK, webhook=WebhookSettings(backoff=0.01))
    async with Harness(settings=settings, broker=broker, telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"], "timeout": 0.02, "responder_em": "respostas"})
        await until(lambda: len(told.of(DeliveryAttempted)) > 15, saying="many attempts")  # 0.01 s, doubled 15 times
        assert await delivery_state(oraculo, run_id) == ("pendente", 1)
        has_room.set()
        await until(lambda: broker.queues(["respostas"]), saying="the reply")


class Restarting:
    """A receiver that refuses connections until it is back."""

    def __init__(self) -> None:
        self.tries = 0
        self.refused = 0
        self.is_back = False
        self.got: set[str] = set()

    async def post(self, url: str, body: bytes, headers: dict[str, str]) -> int:
        self.tries += 1
        await asyncio.sleep(0)
        if not self.is_back:
            self.refused += 1
            raise httpx2.ConnectError("All connection attempts failed")
        self.got.add(headers["webhook-id"].removesuffix(".1"))
        return 200


def owing(receiver: Restarting, **webhook: float) -> Harness:
    settings = Settings(engine=QUICK, webhook=WebhookSettings(**{"concurrency": 4, "backoff": 0.01, **webhook}))
    return Harness(settings=settings, post=receiver.post)


async def test_who_waits_for_a_receiver_that_refuses_connections_uses_up_no_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receivers, "_FIRST_PAUSE", 600.0)
    receiver = Restarting()
    async with owing(receiver) as oraculo:
        waiting = [await ended_run(oraculo, GOOD) for _ in range(50)]
        await until(
            lambda: len(oraculo.engine.parts.deliveries._errands) == 50, saying="all to wait, also the one that tried"
        )
        heads = (await oraculo.store.heads(waiting)).values()
        assert sum(head.deliveries[0].attempts for head in heads) == receiver.tries == 1


async def test_who_waited_for_a_receiver_gets_through_soon_after_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SystemEntropy, "jitter", lambda self: 0.9)
    receiver = Restarting()
    async with owing(receiver, backoff=600) as oraculo:
        for _ in range(50):
            await ended_run(oraculo, GOOD)
        await until(lambda: receiver.tries >= 3, saying="pauses of 0.1 and 0.2 s to pass")
        receiver.is_back = True
        await until(
            lambda: len(receiver.got) == 50 - receiver.refused, saying="all but those refused, who have their own pause"
        )


async def test_runs_that_end_one_by_one_do_not_each_find_out_that_their_receiver_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receivers, "_FIRST_PAUSE", 600.0)
    monkeypatch.setattr(SystemEntropy, "jitter", lambda self: 0.9)
    receiver = Restarting()
    async with owing(receiver, backoff=600) as oraculo:
        errands = oraculo.engine.parts.deliveries._errands
        await ended_run(oraculo, GOOD)
        await until(lambda: receiver.tries == 1 and not errands, saying="nobody to wait any more")
        await ended_run(oraculo, GOOD)
        await until(lambda: errands, saying="the next to wait")
        assert receiver.tries == 1


async def test_a_receiver_that_answers_with_an_error_is_not_away() -> None:
    answered: list[str] = []

    async def post(url: str, body: bytes, headers: dict[str, str]) -> int:
        answered.append(headers["webhook-id"])
        return 503

    settings = Settings(engine=QUICK, webhook=WebhookSettings(concurrency=4, backoff=600, max_backoff=600))
    async with Harness(settings=settings, post=post) as oraculo:
        for _ in range(30):
            await ended_run(oraculo, GOOD)
        await until(lambda: len(answered) == 30)
        lines = oraculo.engine.parts.deliveries._receivers[Channel.WEBHOOK]._lines
        assert [line.absence for line in lines.values() if line.absence] == []


@pytest.mark.parametrize(
    "error", [httpx2.RemoteProtocolError("it hung up"), httpx2.ReadError("reset"), NotPosted("no answer in 10 s")]
)
async def test_a_receiver_that_hangs_up_or_says_nothing_is_not_away(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it was a moment before."""
    monkeypatch.setattr(receivers, "_FIRST_PAUSE", 0.01)
    errors, go_on = [httpx2.ConnectError("refused"), error], asyncio.Event()

    async def post(url: str, body: bytes, headers: dict[str, str]) -> int:
        if errors:
            raise errors.pop(0)
        await go_on.wait()
        return 200

    settings = Settings(engine=QUICK, webhook=WebhookSettings(concurrency=4, backoff=600, max_backoff=600))
    async with Harness(settings=settings, post=post) as oraculo:
        lines = oraculo.engine.parts.deliveries._receivers[Channel.WEBHOOK]._lines
        for _ in range(5):
            await ended_run(oraculo, GOOD)
        await until(lambda: not errors and lines, saying="a third to try it")
        assert [line.absence for line in lines.values()] == [None]
        go_on.set()


async def test_an_engine_stops_at_once_though_many_wait_for_a_receiver_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receivers, "_FIRST_PAUSE", 600.0)
    monkeypatch.setattr(SystemEntropy, "jitter", lambda self: 0.9)
    async with owing(Restarting(), backoff=600) as oraculo:
        for _ in range(20):
            await ended_run(oraculo, GOOD)
        courier = oraculo.engine.parts.deliveries
        await until(lambda: len(courier._errands) == 19, saying="all but the first to wait")
        async with asyncio.timeout(5):
            await courier.finished()
        assert len(courier._errands) == 19


async def test_the_longer_a_receiver_is_away_the_longer_those_rest_who_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receivers, "_FIRST_PAUSE", 600.0)
    async with owing(Restarting(), backoff=600, max_backoff=1000) as oraculo:
        courier = oraculo.engine.parts.deliveries
        for _ in range(2):
            await ended_run(oraculo, GOOD)

        def found() -> list[deliveries._Errand]:
            return [one for one in courier._errands.values() if courier._away(one) and not one.has_begun]

        [errand] = await until(found, saying="all but the first to wait")
        absence = courier._away(errand)
        assert absence is not None
        rests = []
        for earlier in (0, 4_000, 40_000):
            absence.since -= earlier
            rests.append(courier._longest_rest(errand))
        assert rests == [deliveries._LONGEST_REST[Channel.WEBHOOK], pytest.approx(500, abs=5), 1000]


async def test_what_waits_for_a_receiver_that_stays_away_is_given_up_in_the_time_of_its_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one try at a time those of many would take weeks, and runs that are not given up are kept."""
    monkeypatch.setattr(receivers, "_LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(deliveries, "_LEAST_PATIENCE", 0.5)
    monkeypatch.setattr(deliveries, "MAX_UNDER_WAY", 4)
    monkeypatch.setattr(deliveries, "_SHORTEST_REST", 0.1)
    monkeypatch.setattr(deliveries, "_LONGEST_REST", {Channel.WEBHOOK: 0.2, Channel.QUEUE: 0.2})
    monkeypatch.setattr(core_delivery, "DELIVERY_LEASE", 0.2)
    receiver = Restarting()
    async with owing(receiver, max_attempts=1000, max_backoff=0.001) as oraculo:
        waiting = [await ended_run(oraculo, GOOD) for _ in range(40)]

        async def are_given_up() -> bool:
            heads = (await oraculo.store.heads(waiting)).values()
            return {head.deliveries[0].status for head in heads} == {DeliveryStatus.UNDELIVERED}

        await until(are_given_up, saying="those too that were never tried")
        assert "ConnectError: All connection attempts failed" in await oraculo.operations.explain(waiting[-1])
