"""A broker that comes and goes loses no answer and stops no worker."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from oraculo.brokers.failover import FailoverBroker
from oraculo.clients.subscription import Backoff
from oraculo.errors import BrokerError, BrokerUnavailable, QueueFull
from oraculo.pipeline.retry import RetryPolicy
from oraculo.ports.broker import ConsumerDoubted, Outgoing, Receipt
from oraculo.settings import BrokerSettings, Settings
from oraculo.testing.harness import Harness
from oraculo.wire.timestamps import from_iso
from oraculo.worker import App, Worker, outbox
from tests.receipts import publish_but
from tests.waiting import until

from .stage import NOW, FixedClock, Stage, WatchedBroker

SAME: dict[str, Any] = {"correlation_id": "c", "tarefa": "t", "tentativa": 1}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "_policy", RetryPolicy(backoff=0.001, max_backoff=0.002))


def counting_app() -> tuple[App, list[Any]]:
    app, runs = App("a"), []

    @app.queue("q")
    async def work(payload: dict[str, Any]) -> int:
        runs.append(payload)
        return len(runs)

    return app, runs


@pytest.mark.parametrize("error", [BrokerUnavailable("away"), RuntimeError("a fault of the adapter")])
async def test_an_answer_is_published_again_until_it_is_confirmed(stage: Stage, error: Exception) -> None:
    app, runs = counting_app()
    stage.broker.fail("publish", error, error, error)
    async with stage.worker(app):
        await stage.send("q")
        assert (await stage.payload())["resultado"] == 1
    assert len(runs) == 1
    assert await stage.left("q") == (0, 0, 0)


async def test_what_fails_again_and_again_is_told_once(stage: Stage) -> None:
    app, away = counting_app()[0], BrokerUnavailable("away")
    stage.broker.fail("consume", away, away, away, BrokerUnavailable("no such user"))
    stage.broker.fail("publish", away, away, away)
    with capture_logs() as logs:
        async with stage.worker(app):
            await stage.send("q")
            await stage.payload()
    assert [(line["event"], line["reason"]) for line in logs if line["log_level"] == "warning"] == [
        ("the queue cannot be read; trying again", "away"),
        ("the queue cannot be read; trying again", "no such user"),
        ("answers could not be published; trying again", "away"),
    ]


async def test_a_consumer_that_is_only_doubted_is_made_again_without_a_word(stage: Stage) -> None:
    stage.broker.fail("take", ConsumerDoubted("to be sure"))
    with capture_logs() as logs:
        async with stage.worker(counting_app()[0]):
            await stage.send("q")
            await stage.payload()
    assert [queue for queue, _ in stage.broker.consumed] == ["q", "q"]
    assert not [line for line in logs if line["log_level"] == "warning"]


async def test_nothing_is_acked_before_its_answer_is_confirmed(stage: Stage) -> None:
    app, _ = counting_app()
    tried = asyncio.Event()

    def refuse(message: Outgoing) -> Exception:
        tried.set()
        return BrokerUnavailable("away")

    stage.broker.refuses = refuse
    async with stage.worker(app):
        await stage.send("q")
        await tried.wait()
        assert await stage.left("q") == (0, 1, 0)
        stage.broker.refuses = lambda message: None
        await stage.answer()
    assert await stage.left("q") == (0, 0, 0)


async def test_answers_are_published_in_batches_that_a_slow_link_can_carry_in_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_BATCH_BYTES", 3000)
    app, sizes, publish = App("a"), [], stage.broker.publish

    @app.queue("q")
    async def large(payload: dict[str, Any]) -> str:
        return "x" * 1000

    async def noting(messages: Sequence[Outgoing]) -> Sequence[str]:
        sizes.append(sum(len(message.body) for message in messages))
        return await publish(messages)

    for number in range(10):
        await stage.send("q", correlation_id=str(number))
    monkeypatch.setattr(stage.broker, "publish", noting)
    async with stage.worker(app):
        for _ in range(10):
            await stage.answer()
    assert 1000 < max(sizes) <= 3000


class FullQueue:
    """Stands before a broker whose queue `cheia` has no room, and that will never take anything for `ruim`."""

    def __init__(self, broker: WatchedBroker) -> None:
        self._publish = broker.publish
        self.tried = asyncio.Event()
        self.is_full = True

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        receipts = await publish_but(self._publish, messages, self._fault_of)
        if any(isinstance(receipt.error, QueueFull) for receipt in receipts):
            self.tried.set()
        return receipts

    def _fault_of(self, message: Outgoing) -> BrokerError | None:
        if message.queue == "ruim":
            return BrokerError("never")
        return QueueFull("no room") if self.is_full and message.queue == "cheia" else None


@pytest.fixture
def full(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> FullQueue:
    monkeypatch.setattr(outbox, "FULL_PAUSE", 0.05)
    queue = FullQueue(stage.broker)
    monkeypatch.setattr(stage.broker, "publish", queue.publish)
    return queue


async def test_a_full_reply_queue_holds_up_no_other_answer(stage: Stage, full: FullQueue) -> None:
    app, runs = counting_app()
    async with stage.worker(app):
        await stage.send("q", correlation_id="waits", responder_em="cheia")
        await stage.send("q", correlation_id="goes")
        assert (await stage.answer()).correlation_id == "goes"
        await full.tried.wait()
        assert await stage.left("q") == (0, 1, 0)  # the one is settled, the other is not
        await stage.send("q", correlation_id="goes too")
        assert (await stage.answer()).correlation_id == "goes too"
        full.is_full = False
        assert (await stage.answer("cheia")).correlation_id == "waits"
    assert len(runs) == 3
    assert await stage.left("q") == await stage.left("cheia") == await stage.left("resultados") == (0, 0, 0)


async def test_nor_does_it_beside_an_answer_that_is_refused_for_good(stage: Stage, full: FullQueue) -> None:
    """Then they are published one by one."""
    app, runs = counting_app()
    for queue in ("cheia", "ruim", "resultados"):
        await stage.send("q", correlation_id=queue, responder_em=queue)
    async with stage.worker(app):
        assert (await stage.answer()).correlation_id == "resultados"
        assert "never" in await asyncio.wait_for(stage.broker.buried.get(), 5)
        full.is_full = False
        assert (await stage.answer("cheia")).correlation_id == "cheia"
    assert len(runs) == 3
    assert await stage.left("q") == (0, 0, 1)
    assert await stage.left("resultados") == (0, 0, 0)  # it came once


async def test_a_worker_that_stops_waits_for_room(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "FULL_PAUSE", 0.05)
    app, runs = counting_app()
    publish = stage.broker.publish
    refusals = 0

    async def take_the_third_time(messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        nonlocal refusals
        if refusals < 2:
            refusals += 1
            return [Receipt(error=QueueFull("no room"))] * len(messages)
        return await publish(messages)

    monkeypatch.setattr(stage.broker, "publish", take_the_third_time)
    async with stage.worker(app):
        await stage.send("q")
        await until(lambda: refusals, saying="the answer to be refused")
    assert (await stage.payload())["resultado"] == len(runs) == 1
    assert await stage.left("q") == (0, 0, 0)


@pytest.mark.parametrize("call", ["consume", "take"])
@pytest.mark.parametrize("error", [BrokerUnavailable("away"), BrokerError("no"), RuntimeError("a fault")])
async def test_a_consumer_that_fails_is_made_again(stage: Stage, call: str, error: Exception) -> None:
    app, _ = counting_app()
    stage.broker.fail(call, error, error)
    async with stage.worker(app):
        await stage.send("q")
        assert (await stage.payload())["status"] == "ok"
    assert len(stage.broker.consumed) == (1 if call == "consume" else 3)


async def test_a_failed_ack_makes_the_consumer_again_and_the_repeat_is_answered_from_memory(stage: Stage) -> None:
    app, runs = counting_app()
    stage.broker.fail("ack", BrokerUnavailable("away"))
    async with stage.worker(app):
        await stage.send("q", **SAME)
        assert await stage.payload() == await stage.payload() == {"status": "ok", "resultado": 1}
    assert len(runs) == 1
    assert len(stage.broker.consumed) == 2
    assert await stage.left("q") == (0, 0, 0)


async def test_what_waited_on_a_lost_consumer_is_not_run_twice(stage: Stage) -> None:
    """The first command's ack fails while a second, plain one waits: the second is given back and comes again."""
    app, runs = counting_app()
    stage.broker.fail("ack", BrokerUnavailable("away"))
    await stage.send("q", {"n": 1}, **SAME)
    await stage.send("q", {"n": 2}, **(SAME | {"tarefa": "u"}))
    async with stage.worker(app, concurrency=1):
        for _ in range(3):
            await stage.answer()
    assert [run["n"] for run in runs] == [1, 2]
    assert await stage.left("q") == (0, 0, 0)


def held_up_app() -> tuple[App, asyncio.Event, asyncio.Event, list[int]]:
    """With the events of its first command's begin, and of what all wait for; and the numbers that were run."""
    app, started, go_on, runs = App("a"), asyncio.Event(), asyncio.Event(), list[int]()

    @app.queue("q")
    async def work(payload: dict[str, Any]) -> None:
        runs.append(payload["n"])
        started.set()
        await go_on.wait()

    return app, started, go_on, runs


async def test_waiting_jobs_of_a_closed_subscription_are_dropped(stage: Stage) -> None:
    app, started, go_on, runs = held_up_app()
    await stage.send("q", {"n": 1}, **SAME)
    await stage.send("q", {"n": 2})
    async with stage.worker(app, concurrency=1) as worker:
        await started.wait()
        await worker._intakes[0].close()  # as a failed settlement does
        async with asyncio.timeout(5):
            batches = [await stage.broker.delivered.get() for _ in range(3)]  # the second is the end of the first life
        assert [len(batch) for batch in batches] == [2, 0, 2]
        go_on.set()
        for _ in range(2):
            await stage.answer()
    assert runs == [1, 2]
    assert await stage.left("q") == (0, 0, 0)


async def test_consumers_that_are_lost_again_and_again_leave_nothing_behind(stage: Stage) -> None:
    """One command is in work, and one of a plain publisher, which cannot be told from another, waits for its place."""
    app, started, go_on, runs = held_up_app()
    await stage.send("q", {"n": 1}, **SAME)
    await stage.send("q", {"n": 2})
    async with stage.worker(app, concurrency=1) as worker:
        await started.wait()
        for _ in range(3):  # more often, and it would be a suspect
            while len(await stage.broker.delivered.get()) < 2:  # the end of a consumer's life brings none
                pass
            await worker._intakes[0].close()  # as a failed settlement does
        while len(await stage.broker.delivered.get()) < 2:
            pass
        [lane] = worker._dispatcher._lanes
        assert len(lane.backlog) == 1
        go_on.set()
        for _ in range(2):
            await stage.answer()
    assert runs == [1, 2]
    assert sum(map(len, stage.broker.batches)) == 2, "one answer for each"
    assert await stage.left("q") == (0, 0, 0)


async def test_a_failed_quarantine_is_tried_again(stage: Stage) -> None:
    app, _ = counting_app()
    stage.broker.fail("dead_letter", BrokerUnavailable("away"))
    async with stage.worker(app):
        await stage.send_raw("q", b"garbage")
        async with asyncio.timeout(5):
            await stage.broker.buried.get()
    assert await stage.left("q") == (0, 0, 1)


async def test_an_answer_that_the_broker_refuses_does_not_hold_up_the_others(stage: Stage) -> None:
    app = App("a")

    @app.queue("q")
    async def work(payload: dict[str, Any]) -> str:
        return "x" * int(payload["size"])

    stage.broker.refuses = lambda message: BrokerError("too large") if len(message.body) > 1000 else None
    for size in (5, 5000, 6):
        await stage.send("q", {"size": size}, correlation_id=f"c{size}", tarefa="t", tentativa=1)
    clock = FixedClock()
    async with stage.worker(app, clock=clock):
        answers = {(answer := await stage.answer()).correlation_id: bytes(answer.payload) for _ in range(3)}
        clock.time += 60
        await stage.send("q", {"size": 5000}, correlation_id="c5000", tarefa="t", tentativa=1)
        again = await stage.answer()
    assert b"xxxxx" in answers["c5"]
    assert b"xxxxxx" in answers["c6"]
    assert b'"the broker refused the answer: too large"' in answers["c5000"]
    assert b'"repetir":false' in answers["c5000"]
    assert bytes(again.payload) == answers["c5000"]
    assert from_iso(again.timestamp) == NOW  # what stood in for it is remembered in its place
    assert await stage.left("q") == (0, 0, 0)


async def test_answers_beside_one_that_is_refused_wait_for_a_broker_that_is_lost_meanwhile(stage: Stage) -> None:
    app = App("a")

    @app.queue("q")
    async def work(payload: dict[str, Any]) -> str:
        return "x" * int(payload["size"])

    lost = [BrokerUnavailable("away")]

    def refuse(message: Outgoing) -> Exception | None:
        if len(message.body) > 1000:
            return BrokerError("too large")
        return lost.pop() if b"c6" in message.body and lost else None

    stage.broker.refuses = refuse
    for size in (5000, 6, 7):
        await stage.send("q", {"size": size}, correlation_id=f"c{size}", tarefa="t", tentativa=1)
    async with stage.worker(app):
        answers = {(answer := await stage.answer()).correlation_id: bytes(answer.payload) for _ in range(3)}
    assert not lost
    assert [b'"status":"ok"' in answers[run] for run in ("c5000", "c6", "c7")] == [False, True, True]
    assert await stage.left("q") == (0, 0, 0)


async def test_a_command_whose_answer_can_go_nowhere_is_dead_lettered(stage: Stage) -> None:
    app, runs = counting_app()
    stage.broker.refuses = lambda message: BrokerError("no such name") if message.queue == "bad name" else None
    async with stage.worker(app):
        await stage.send("q", **SAME, responder_em="bad name")
        async with asyncio.timeout(5):
            assert "no such name" in await stage.broker.buried.get()
        await stage.send("q", **SAME)
        assert (await stage.payload())["resultado"] == 2  # mended and redriven, it runs
    assert len(runs) == 2


async def test_a_command_that_can_be_put_nowhere_is_run_once_and_tried_again_after_longer_and_longer_pauses(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, runs = counting_app()
    pauses: list[int] = []

    async def note_pause(backoff: Backoff) -> None:
        backoff._failures += 1
        pauses.append(backoff._failures)

    monkeypatch.setattr(Backoff, "pause", note_pause)
    stage.broker.refuses = lambda message: BrokerError("no such name") if message.queue == "bad name" else None
    stage.broker.fail("dead_letter", *[BrokerUnavailable("away")] * 5)
    async with stage.worker(app):
        await stage.send("q", **SAME, responder_em="bad name")
        async with asyncio.timeout(5):
            assert "no such name" in await stage.broker.buried.get()
    assert len(runs) == 1
    assert pauses == [1, 2, 3, 4, 5]
    assert await stage.left("q") == (0, 0, 1)


async def test_a_command_that_one_of_several_brokers_can_put_nowhere_is_run_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oraculo.brokers.failover.consumer.FAILED_PAUSE", 0.01)
    app, runs = counting_app()
    stage.broker.refuses = lambda message: BrokerError("no such name") if message.queue == "bad name" else None
    stage.broker.fail("dead_letter", *[QueueFull("no room")] * 5)
    async with Worker(app, FailoverBroker([stage.broker])):
        await stage.send("q", **SAME, responder_em="bad name")
        async with asyncio.timeout(5):
            assert "no such name" in await stage.broker.buried.get()
    assert len(runs) == 1
    assert await stage.left("q") == (0, 0, 1)


async def test_leases_are_renewed_while_a_command_is_in_work(stage: Stage) -> None:
    app, go_on = App("a"), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any) -> None:
        await go_on.wait()

    stage.broker.fail("extend", BrokerUnavailable("away"))  # one failure does not end the renewing
    async with stage.worker(app, lease=0.003):
        await stage.send("q")
        async with asyncio.timeout(5):
            renewed = [await stage.broker.extended.get() for _ in range(3)]
        go_on.set()
        await stage.answer()
    (acked,) = stage.broker.acked.get_nowait()
    assert renewed == [[acked.token]] * 3


async def test_workers_of_the_harness_renew_within_the_lease_that_is_set(stage: Stage) -> None:
    app, go_on = App("a"), asyncio.Event()

    @app.queue("q")
    async def work(payload: Any) -> None:
        await go_on.wait()

    settings = Settings(broker=BrokerSettings(lease=0.3))
    async with Harness(app, settings=settings, broker=stage.broker), asyncio.timeout(5):
        await stage.send("q")
        while (await stage.broker.delivered.get())[0].queue != "q":
            pass  # the engine reads the same broker
        await stage.broker.extended.get()  # nothing but this command is held
        go_on.set()


async def test_a_settled_command_is_not_renewed(stage: Stage) -> None:
    app, go_on = App("a"), asyncio.Event()

    @app.queue("q")
    async def work(payload: dict[str, Any]) -> None:
        if payload["wait"]:
            await go_on.wait()

    async with stage.worker(app, lease=0.003):
        await stage.send("q", {"wait": False})
        (settled,) = await stage.broker.acked.get()
        await stage.send("q", {"wait": True})
        async with asyncio.timeout(5):
            while (renewed := await stage.broker.extended.get()) == [settled.token]:
                pass  # renewed before it was settled
        go_on.set()
        await stage.answer()
    assert settled.token not in renewed
