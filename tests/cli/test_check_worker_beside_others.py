"""`oraculo check-worker` beside an engine, other workers and other work: whose answers and commands are whose."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from oraculo.bootstrap import make_broker, make_worker
from oraculo.brokers.memory import MemoryBroker
from oraculo.brokers.memory_consumer import MemoryConsumer
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Broker, Delivery, Outgoing, publish_all
from oraculo.ports.broker_admin import QueueState
from oraculo.ports.clock import SystemClock
from oraculo.settings import Settings
from oraculo.testing.harness import Harness
from oraculo.worker import App, Worker
from tests.cli.worker_check_stage import QUEUE, check_of, play
from tests.end_to_end.stage import settings_for
from tests.servers.fleet import ONE_BROKER, Fleet
from tests.waiting import until


def echoing(queue: str) -> App:
    """Works and answers, with the SDK."""
    echo = App("echo")

    @echo.queue(queue)
    async def work(payload: dict[str, Any]) -> dict[str, Any]:
        return payload

    return echo


@asynccontextmanager
async def working(settings: Settings) -> AsyncIterator[None]:
    broker = make_broker(settings, SystemClock())
    worker: Worker = make_worker(echoing(QUEUE), broker, settings, SystemClock())
    await worker.start()
    try:
        yield
    finally:
        await worker.stop()
        await broker.close()


@pytest.mark.parametrize("broker", ONE_BROKER)
async def test_answers_of_others_are_given_back(broker: str, fleet: Fleet) -> None:
    settings = settings_for(fleet.url(broker))
    prefix = settings.broker.prefix
    foreign = [b'{"correlation_id": "de outro %d"}' % number for number in range(3)]
    ours = make_broker(settings, SystemClock())
    await ours.start()
    try:
        await ours.publish([Outgoing(f"{prefix}resultados", body) for body in foreign])
        async with working(settings):
            report = await play(ours, prefix)
        assert report.has_passed, report.verdicts
        consumer = await ours.consume(f"{prefix}resultados", prefetch=10)
        found: dict[bytes, int] = {}
        async with asyncio.timeout(30):
            while len(found) < len(foreign):
                found |= {each.body: each.redeliveries for each in await consumer.take(10)}
        assert sorted(found) == foreign
        assert max(found.values()) < 6, "far from the limit of deliveries"
    finally:
        await ours.close()


@pytest.mark.parametrize("broker", ONE_BROKER)
async def test_commands_that_nobody_took_are_taken_back(broker: str, fleet: Fleet) -> None:
    settings = settings_for(fleet.url(broker))
    queue = settings.broker.prefix + QUEUE
    ours = make_broker(settings, SystemClock())
    await ours.start()
    try:
        await ours.publish([Outgoing(queue, b'{"de": "outro"}')])
        report = await play(ours, settings.broker.prefix, timeout=0.3)
        assert not report.has_passed

        async def only_the_other() -> bool:
            (state,) = await ours.queues([queue])
            return (state.ready, state.dead_letters) == (1, 0)

        await until(only_the_other, saying="the other's command alone")
    finally:
        await ours.close()


@asynccontextmanager
async def engine(*apps: App) -> AsyncIterator[Harness]:
    """Once it reads its answers."""
    async with Harness(*apps) as oraculo:

        async def reads() -> bool:
            return any(state.consumers for state in await oraculo.broker.queues(["resultados"]))

        await until(reads, saying="the engine to read its answers")
        yield oraculo


async def test_an_engine_keeps_its_answers_and_a_worker_that_heeds_responder_em_passes() -> None:
    async with engine(echoing(QUEUE)) as oraculo:
        report = await play(oraculo.broker)
        assert list(await oraculo.operations.dead_letters("resultados", limit=10)) == []
    assert report.has_passed, report.verdicts
    (warning,) = report.warnings
    assert "an engine, or another check, reads it" in warning


@pytest.mark.parametrize("counts_consumers", [True, False])
async def test_what_an_engine_sends_meanwhile_and_is_still_in_work_is_no_fault(
    counts_consumers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, began, over = App("slow"), asyncio.Event(), asyncio.Event()

    @slow.queue(QUEUE)
    async def work(payload: dict[str, Any]) -> None:
        if "lento" in payload:
            await over.wait()
        elif not began.is_set():
            began.set()
            await oraculo.submit({"destinos": [QUEUE], "payload": {"lento": True}})

    async with engine(slow) as oraculo:
        counted = oraculo.broker.queues

        async def queues(names: Sequence[str] | None = None) -> list[QueueState]:
            unknown = {} if counts_consumers else {"consumers": None}  # as NATS reports it
            return [msgspec.structs.replace(state, **unknown) for state in await counted(names)]

        monkeypatch.setattr(oraculo.broker, "queues", queues)
        report = await play(oraculo.broker)
        over.set()
    assert report.has_passed, report.verdicts
    assert report.verdicts[-1].state == "aviso"
    assert f"1 of the messages in {QUEUE} are still held: an engine's, perhaps" in report.verdicts[-1].detail


@asynccontextmanager
async def answering_on_resultados(broker: Broker, **changes: str) -> AsyncIterator[None]:
    """A worker that does not look at responder_em, with its answers changed as said."""
    consumer = await broker.consume(QUEUE, prefetch=1)

    async def work() -> None:
        while taken := await consumer.take(1):
            command = json.loads(taken[0].body)
            answer = {key: command[key] for key in ("correlation_id", "timestamp")} | changes
            answer |= {"tipo_evento": "resultado_execucao", "payload": {}}
            await publish_all(broker, [Outgoing("resultados", json.dumps(answer).encode())])
            await consumer.ack(taken)

    working = asyncio.create_task(work())
    yield
    await consumer.close()
    await working


async def test_behind_an_engine_a_worker_that_ignores_responder_em_learns_why_it_seems_silent() -> None:
    async with engine() as oraculo, answering_on_resultados(oraculo.broker):
        report = await play(oraculo.broker, timeout=1.0)
        assert list(await oraculo.operations.dead_letters("resultados", limit=10)) == [], (
            "the check's own are discarded"
        )
    detail = report.verdicts[0].detail
    assert "answers there and does not look at responder_em seems silent: stop the engine" in detail
    assert "answers of it are in resultados.dlq, where an engine put them" in detail


@pytest.fixture
async def memory() -> AsyncIterator[MemoryBroker]:
    broker = MemoryBroker(SystemClock())
    await broker.start()
    yield broker
    await broker.close()


async def test_an_answer_on_resultados_that_is_of_nobody_is_a_clue(memory: MemoryBroker) -> None:
    async with answering_on_resultados(memory, correlation_id="outro"):
        report = await play(memory, timeout=0.5)
    assert "messages that are not of this check (correlation_id 'outro')" in report.verdicts[0].detail
    (state,) = await memory.queues(["resultados"])
    assert state.ready == 1, "it is not the check's to take away"


async def test_what_an_earlier_check_left_is_not_taken_for_an_answer(memory: MemoryBroker) -> None:
    left = {"correlation_id": f"verificacao-{uuid.uuid4()}-3-vivo", "tipo_evento": "resultado_execucao"}
    left |= {"payload": {}, "timestamp": "2026-01-01T00:00:00Z"}  # type: ignore[dict-item]
    await publish_all(memory, [Outgoing(f"verificacao.{QUEUE}", json.dumps(left).encode())])
    report = await play(memory, timeout=0.3)
    assert report.verdicts[0].detail == (
        f"no answer in 0.3 s; nobody reads {QUEUE}: is the worker running, on this broker and with this prefix?"
    )
    (state,) = await memory.queues([f"verificacao.{QUEUE}"])
    assert state.ready == 0


async def test_an_answer_that_comes_again_because_its_ack_was_lost_is_one(
    memory: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ack, lost = MemoryConsumer.ack, []

    async def lose_the_first(consumer: MemoryConsumer, deliveries: Sequence[Delivery]) -> None:
        if deliveries and deliveries[0].queue.startswith("verificacao.") and not lost:
            lost.extend(deliveries)
            raise BrokerUnavailable("away for a moment")
        await ack(consumer, deliveries)

    monkeypatch.setattr(MemoryConsumer, "ack", lose_the_first)
    worker = make_worker(echoing(QUEUE), memory, settings_for("memory://", prefix=""), SystemClock())
    await worker.start()
    report = await play(memory)
    await worker.stop()
    assert lost
    assert {verdict.name: str(verdict.state) for verdict in report.verdicts}["once"] == "ok", report.verdicts


async def test_a_check_does_not_take_the_work_that_comes_without_a_pause(memory: MemoryBroker) -> None:
    """Of a queue whose workers have fallen behind, while an engine is there."""
    check = check_of(memory)
    await publish_all(memory, [Outgoing(QUEUE, b"{}")] * 40)
    is_over = False

    async def produce() -> None:
        while not is_over:
            await publish_all(memory, [Outgoing(QUEUE, b"{}")])
            await asyncio.sleep(0.05)

    producing = asyncio.create_task(produce())
    try:
        assert await asyncio.wait_for(check._withdraw(), 10) == 0
    finally:
        is_over = True
        await producing
    (now,) = await memory.queues([QUEUE])
    assert (now.unacked, now.dead_letters) == (0, 0)


@pytest.mark.parametrize("unacked", [None, 0])
async def test_what_waits_is_left_to_those_who_work_where_the_broker_does_not_say_what_is_held(
    memory: MemoryBroker, unacked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, counted, withdrawn = check_of(memory), memory.queues, list[int]()

    async def queues(names: Sequence[str] | None = None) -> list[QueueState]:
        return [msgspec.structs.replace(one, unacked=unacked) for one in await counted(names)]

    async def withdraw() -> int:
        withdrawn.append(1)
        return 0

    await publish_all(memory, [Outgoing(QUEUE, b"{}")] * 40)
    monkeypatch.setattr(memory, "queues", queues)
    monkeypatch.setattr(check, "_withdraw", withdraw)
    assert await check._untaken(40) is None
    assert bool(withdrawn) is (unacked is not None)


@pytest.mark.parametrize(
    ("count", "is_told", "state"), [(40, True, "ok"), (10, False, "ok"), (40, False, "ok"), (1_100, False, "aviso")]
)
async def test_what_others_sent_meanwhile_and_nobody_took_yet_is_no_fault(
    memory: MemoryBroker, count: int, is_told: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is busy elsewhere once it has answered the last command, which is the one behind the last garbage.
    `is_told`: whether the broker counts consumers, as NATS does not."""
    others = [b'{"de": "outro %d"}' % number for number in range(count)]
    consumer = await memory.consume(QUEUE, prefetch=1)
    counted = memory.queues

    async def queues(names: Sequence[str] | None = None) -> list[QueueState]:
        unknown = {} if is_told else {"consumers": None}
        return [msgspec.structs.replace(one, **unknown) for one in await counted(names)]

    monkeypatch.setattr(memory, "queues", queues)

    async def work() -> None:
        garbage, is_over = 0, False
        while not is_over:
            (delivery,) = await consumer.take(1)
            if b"-lixo" in delivery.body:
                garbage += 1
                await consumer.dead_letter(delivery, "no command")
                continue
            command = json.loads(delivery.body)
            answer = {key: command[key] for key in ("correlation_id", "timestamp", "tarefa")}
            answer |= {"tipo_evento": "resultado_execucao", "payload": {}}
            await consumer.ack([delivery])
            if is_over := garbage == 4:
                await publish_all(memory, [Outgoing(QUEUE, body) for body in others])
            await publish_all(memory, [Outgoing(command["responder_em"], json.dumps(answer).encode())])

    working = asyncio.create_task(work())
    report = await play(memory)
    await working
    assert report.has_passed, report.verdicts
    assert report.verdicts[-1].state == state, report.verdicts
    (now,) = await memory.queues([QUEUE])
    assert (now.ready, now.dead_letters) == (count, 0)


async def test_a_check_that_is_broken_off_takes_its_command_back(memory: MemoryBroker) -> None:
    checking = asyncio.create_task(play(memory, timeout=60))

    async def waits() -> bool:
        return any(state.ready for state in await memory.queues([QUEUE]))

    await until(waits, saying="its first command")
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    (state,) = await memory.queues([QUEUE])
    assert state.ready == 0
