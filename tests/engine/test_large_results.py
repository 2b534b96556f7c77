"""Large results: kept and shared, forged, lost and away."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.core.machine import delivery as core_delivery
from oraculo.core.result_reference import encode_reference, read_reference
from oraculo.engine.deliver.deliveries import Deliveries
from oraculo.engine.results import get as reader
from oraculo.engine.send import outbox
from oraculo.errors import MessageTooLarge, NotFound, ObjectsUnavailable
from oraculo.ports.broker import Outgoing, Receipt
from oraculo.ports.clock import SystemClock
from oraculo.ports.objects import put_result
from oraculo.ports.telemetry import LoopFailed, Record
from oraculo.settings import BullmqSettings, ObjectSettings
from oraculo.stores.objects import FolderObjects
from oraculo.testing.harness import Harness
from tests.engine.large_results_stage import (
    KEPT,
    LARGE,
    TWO_STEPS,
    Faulty,
    PlainWorker,
    shared,
    store_at,
    two_steps_app,
)
from tests.engine.workers import answer
from tests.waiting import until


class Told:
    def __init__(self) -> None:
        self.failures: list[str] = []

    def emit(self, record: Record) -> None:
        if isinstance(record, LoopFailed) and record.duty == "objects":
            self.failures.append(record.reason)


async def stored_results(oraculo: Harness, run_id: str) -> list[bytes | None]:
    return [task.result for task in (await oraculo.store.load([run_id]))[run_id].tasks]


# -- both modes, end to end -----------------------------------------------------------------------------------------


async def test_kept_nobody_notices(tmp_path: Path) -> None:
    seen: list[Any] = []
    objects = FolderObjects(tmp_path)
    async with Harness(two_steps_app(seen), settings=KEPT, objects=objects) as oraculo:
        await oraculo.operations.put_pipeline("dois-passos", TWO_STEPS)
        aggregate = await oraculo.run({"pipeline": "dois-passos"})
        run_id = aggregate["correlation_id"]
        first, second = await stored_results(oraculo, run_id)
        assert read_reference(run_id, first) is not None, "the store holds a reference"
        assert second == b'{"status":"ok","resultado":300000}', "a small one stays"
        assert aggregate["resultados"]["escavador_a"] == {"status": "ok", "dados": LARGE}
        assert seen == [{"escavador_a": {"status": "ok", "dados": LARGE}}]
        assert await oraculo.ended(run_id) == aggregate
        view = await oraculo.operations.view(await oraculo.operations.run(run_id))
        assert msgspec.json.decode(msgspec.json.encode(view))["resultados"] == aggregate["resultados"]


async def test_shared_references_travel_and_workers_resolve_them(tmp_path: Path) -> None:
    seen: list[Any] = []
    broker = Recording()
    objects = Faulty(tmp_path)
    async with Harness(two_steps_app(seen), settings=shared(tmp_path), objects=objects, broker=broker) as oraculo:
        await oraculo.operations.put_pipeline("dois-passos", TWO_STEPS)
        aggregate = await oraculo.run({"pipeline": "dois-passos"})
        assert aggregate["resultados"]["escavador_a"] == {"status": "ok", "dados": LARGE}
        assert seen == [{"escavador_a": {"status": "ok", "dados": LARGE}}]
        assert objects.puts == 1, "the worker put it; the engine had nothing to put"
    assert max(map(len, broker.bodies)) < 2_000, "nothing large went through the broker"


@pytest.mark.parametrize("step", ["{queue: 'celery://t'}", "{type: images-queue}"])
async def test_over_a_bridge_a_large_result_goes_whole(tmp_path: Path, step: str) -> None:
    """Workers of another system know nothing of references."""
    broker, settings = Recording(), shared(tmp_path)
    settings = msgspec.structs.replace(settings, bullmq=BullmqSettings(queues=("images-queue",)))
    pipeline = f"name: p\nsteps:\n  - {{type: escavador_a}}\n  - {step[:-1]}, dependsOn: [escavador_a]}}\n".encode()
    app = two_steps_app([])
    async with Harness(app, settings=settings, objects=FolderObjects(tmp_path), broker=broker) as oraculo:
        await oraculo.operations.put_pipeline("p", pipeline)
        await oraculo.submit({"pipeline": "p"})
        command = await until(
            lambda: next((body for body in broker.bodies if b'"resultados":{"escavador_a"' in body), b"")
        )
    assert msgspec.json.decode(command)["payload"]["resultados"]["escavador_a"]["dados"] == LARGE


class Recording(MemoryBroker):
    def __init__(self) -> None:
        super().__init__(clock=SystemClock())
        self.bodies: list[bytes] = []

    async def publish(self, messages: Any) -> Sequence[str]:
        self.bodies += [message.body for message in messages]
        return await super().publish(messages)


async def test_a_plain_worker_is_given_the_whole_result_of_the_step_before(tmp_path: Path) -> None:
    async with Harness(settings=KEPT, objects=FolderObjects(tmp_path)) as oraculo:
        await oraculo.operations.put_pipeline("dois-passos", TWO_STEPS)
        run_id = await oraculo.submit({"pipeline": "dois-passos", "responder_em": "respostas"})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        processor = PlainWorker(oraculo, "executador_b")
        command = await processor.takes()
        assert command["resultados"] == {"escavador_a": {"dados": LARGE}}
        await processor.answers(run_id, {"resultado": "ok"})
        assert (await oraculo.ended(run_id))["status"] == "concluida"
        reply = await PlainWorker(oraculo, "respostas").takes()
        assert reply["resultados"]["escavador_a"] == {"dados": LARGE}, "the reply queue has it whole, too"


async def test_an_answer_that_names_no_task_is_found_by_what_its_payload_says(tmp_path: Path) -> None:
    async with Harness(settings=KEPT, objects=FolderObjects(tmp_path)) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a", "escavador_b"]})
        for name in "ab":
            await oraculo.publish("resultados", answer(run_id, payload={"fonte": name, "dados": LARGE}))
        aggregate = await oraculo.ended(run_id)
        assert {name: result["fonte"] for name, result in aggregate["resultados"].items()} == {
            "escavador_a": "a",
            "escavador_b": "b",
        }
        assert all(read_reference(run_id, result) for result in await stored_results(oraculo, run_id))


async def test_a_large_failure_is_still_a_failure(tmp_path: Path) -> None:
    objects = Faulty(tmp_path)
    async with Harness(settings=KEPT, objects=objects) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        bad = {"status": "erro", "erros": ["quebrou"], "repetir": False, "rastro": LARGE}
        await PlainWorker(oraculo, "escavador_a").answers(run_id, bad)
        aggregate = await oraculo.ended(run_id)
    assert aggregate["falhas"]["escavador_a"]["motivo"] == "quebrou"
    assert objects.puts == 0


@pytest.mark.parametrize(("size", "is_put"), [(1000, False), (1001, True)])
async def test_what_is_above_the_threshold_is_put(tmp_path: Path, size: int, is_put: bool) -> None:
    limits = msgspec.structs.replace(KEPT, objects=ObjectSettings(threshold_bytes=1000))
    objects = Faulty(tmp_path)
    async with Harness(settings=limits, objects=objects) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        payload = {"d": "x" * (size - len('{"d":""}'))}
        await PlainWorker(oraculo, "escavador_a").answers(run_id, payload)
        assert (await oraculo.ended(run_id))["resultados"]["escavador_a"] == payload
    assert (objects.puts == 1) is is_put


async def test_a_threshold_of_zero_puts_nothing_and_still_reads(tmp_path: Path) -> None:
    async with Harness(settings=KEPT, objects=FolderObjects(tmp_path), store=store_at(tmp_path)) as before:
        run_id = await before.submit({"destinos": ["escavador_a"]})
        await PlainWorker(before, "escavador_a").answers(run_id, {"dados": LARGE})
        await before.ended(run_id)
    off = msgspec.structs.replace(KEPT, objects=ObjectSettings(threshold_bytes=0))
    objects = Faulty(tmp_path)
    async with Harness(settings=off, objects=objects, store=store_at(tmp_path)) as after:
        assert (await after.ended(run_id))["resultados"]["escavador_a"] == {"dados": LARGE}
        other = await after.submit({"destinos": ["escavador_a"]})
        await PlainWorker(after, "escavador_a").answers(other, {"dados": LARGE})
        await after.ended(other)
    assert objects.puts == 0


def lose_all(folder: Path) -> None:
    for file in folder.rglob("*.json"):
        file.unlink()


# -- forged, lost, away ---------------------------------------------------------------------------------------------


async def test_a_reference_to_another_runs_result_stays_as_it_came(tmp_path: Path) -> None:
    objects = FolderObjects(tmp_path)
    async with Harness(settings=KEPT, objects=objects) as oraculo:
        foreign = await put_result(objects, "another run", "a", b'{"segredo":1}')
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        forged = msgspec.json.decode(encode_reference(foreign))
        await PlainWorker(oraculo, "escavador_a").answers(run_id, forged)
        assert (await oraculo.ended(run_id))["resultados"]["escavador_a"] == forged
        assert msgspec.json.decode(await oraculo.operations.result(run_id, "escavador_a")) == forged


async def test_an_object_that_is_lost_leaves_its_reference_in_the_aggregate(tmp_path: Path) -> None:
    told = Told()
    async with Harness(settings=KEPT, objects=FolderObjects(tmp_path), telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a", "escavador_b"]})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        await until(lambda: list(tmp_path.rglob("*.json")))
        lose_all(tmp_path)
        await PlainWorker(oraculo, "escavador_b").answers(run_id, {"dados": 1})
        aggregate = await oraculo.ended(run_id)
        assert aggregate["status"] == "concluida"
        assert aggregate["resultados"]["escavador_b"] == {"dados": 1}
        assert "oraculo_referencia" in aggregate["resultados"]["escavador_a"]
        with pytest.raises(NotFound, match="lost"):
            await oraculo.operations.result(run_id, "escavador_a")
    assert "there is no" in told.failures[0]


async def test_a_step_whose_input_is_lost_fails_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Faulty(tmp_path)
    objects.gate = asyncio.Event()
    async with Harness(settings=KEPT, objects=objects) as oraculo:
        await oraculo.operations.put_pipeline("dois-passos", TWO_STEPS)
        run_id = await oraculo.submit({"pipeline": "dois-passos"})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        await until(lambda: objects.gets)
        lose_all(tmp_path)
        objects.gate.set()
        aggregate = await oraculo.ended(run_id)
        assert aggregate["status"] == "erro"
        assert "a result that it needs is lost" in aggregate["falhas"]["executador_b"]["motivo"]
        (letter,) = await until(lambda: oraculo.operations.dead_letters("executador_b"))
        assert "is lost" in letter.reason


async def test_while_the_object_store_is_away_answers_stay_whole(tmp_path: Path) -> None:
    told, objects = Told(), Faulty(tmp_path)
    objects.away = True
    async with Harness(settings=KEPT, objects=objects, telemetry=told) as oraculo:
        for attempt in range(3):
            run_id = await oraculo.submit({"destinos": ["escavador_a"]})
            await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE, "n": attempt})
            aggregate = await oraculo.ended(run_id)
            assert aggregate["resultados"]["escavador_a"] == {"dados": LARGE, "n": attempt}
        health = await oraculo.operations.health()
        assert health.is_ready
        assert "nobody home" in (health.parts["objects folder"] or "")
    assert objects.puts == 1, "it is not asked again at once"
    assert "nobody home" in told.failures[0]


async def test_a_command_waits_for_an_object_store_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "REST", 0.01)
    told, objects, seen = Told(), Faulty(tmp_path), []
    async with Harness(two_steps_app(seen), settings=KEPT, objects=objects, telemetry=told) as oraculo:
        objects.gate = asyncio.Event()
        await oraculo.operations.put_pipeline("dois-passos", TWO_STEPS)
        run_id = await oraculo.submit({"pipeline": "dois-passos"})
        await until(lambda: objects.gets)
        objects.away = True
        objects.gate.set()
        await until(lambda: len(told.failures) > 2, saying="the sweep tries again")
        assert not seen
        objects.away = False
        assert (await oraculo.ended(run_id))["status"] == "concluida"
        assert len(seen) == 1


async def test_commands_that_find_no_room_to_wait_are_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_MOST_READING", 1)
    seen: list[Any] = []
    async with Harness(two_steps_app(seen), settings=KEPT, objects=FolderObjects(tmp_path)) as oraculo:
        await oraculo.operations.put_pipeline("dois-passos", TWO_STEPS)
        runs = await asyncio.gather(*(oraculo.run({"pipeline": "dois-passos"}) for _ in range(10)))
    assert {run["status"] for run in runs} == {"concluida"}
    assert len(seen) == 10


async def test_a_slow_object_store_keeps_nobody_waiting_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PATIENCE", 0.05)
    told, objects = Told(), Faulty(tmp_path)
    objects.gate = asyncio.Event()
    async with Harness(settings=KEPT, objects=objects, telemetry=told) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        aggregate = await oraculo.ended(run_id)
        assert "oraculo_referencia" in aggregate["resultados"]["escavador_a"]
        with pytest.raises(ObjectsUnavailable):
            await oraculo.operations.result(run_id, "escavador_a")
    assert "not read in" in told.failures[0]


async def test_an_aggregate_that_is_read_for_longer_than_its_lease_is_delivered_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And read once: handed out by the lease that it had at first, it would be read again and again, for nobody."""
    monkeypatch.setattr(core_delivery, "DELIVERY_LEASE", 0.2)
    posted, objects = list[bytes](), Faulty(tmp_path)
    objects.gate = asyncio.Event()

    async def post(url: str, body: bytes, headers: Mapping[str, str]) -> int:
        posted.append(body)
        return 200

    async with Harness(settings=KEPT, objects=objects, post=post) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"], "webhook": "http://r.example/"})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        leases: set[float | None] = set()

        async def has_rung_twice() -> bool:
            leases.add((await oraculo.operations.run(run_id)).head.deliveries[0].due_at)
            return len(leases - {None}) >= 3

        await until(has_rung_twice, saying="the delivery's timer rings while it is read")
        objects.gate.set()
        await until(lambda: posted, saying="the webhook")
    assert [LARGE.encode() in body for body in posted] == [True]
    assert objects.gets == 1


@pytest.mark.parametrize(("part", "duty"), [("reading", "large results"), ("handing over", "delivery")])
async def test_a_fault_on_the_way_to_a_delivery_is_told_and_its_timer_brings_it_back(
    part: str, duty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_delivery, "DELIVERY_LEASE", 0.2)
    whose = (reader.ResultReader, "fill") if part == "reading" else (Deliveries, "_is_still_ours")
    real, records, posted = getattr(*whose), list[Record](), list[bytes]()

    async def stumble_once(*arguments: Any) -> Any:
        monkeypatch.setattr(*whose, real)
        raise RuntimeError("a bug")

    class Telling:
        def emit(self, record: Record) -> None:
            records.append(record)

    async def post(url: str, body: bytes, headers: Mapping[str, str]) -> int:
        posted.append(body)
        return 200

    monkeypatch.setattr(*whose, stumble_once)
    async with Harness(settings=KEPT, objects=Faulty(tmp_path), post=post, telemetry=Telling()) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"], "webhook": "http://r.example/"})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        await until(lambda: posted, saying="the webhook")
    told = [(record.duty, record.reason) for record in records if isinstance(record, LoopFailed)]
    assert told == [(duty, "RuntimeError: a bug")]


# -- a broker that takes no message of that size --------------------------------------------------------------------


class Narrow(MemoryBroker):
    """Takes none over so many bytes on the queue of replies."""

    limit = 400_000
    tells_limit = True  # as not of a stream of NATS, which its owner limits

    def __init__(self) -> None:
        super().__init__(SystemClock())

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        for message in messages:
            if message.queue == "respostas" and len(message.body) > self.limit:
                limit = self.limit if self.tells_limit else None
                raise MessageTooLarge("respostas: too large", len(message.body), limit)
        return await super().publish(messages)


ONE_AND_A_HALF = {
    "destinos": [{"id": "grande", "fila": "escavador_a"}, {"id": "menor", "fila": "executador_b"}],
    "responder_em": "respostas",
}


async def ended_with_one_and_a_half(oraculo: Harness) -> str:
    run_id = await oraculo.submit(ONE_AND_A_HALF)
    for task, queue, size in (("grande", "escavador_a", 300_000), ("menor", "executador_b", 150_000)):
        worker = PlainWorker(oraculo, queue)
        await worker.takes()
        await worker.answers(run_id, {"status": "ok", "dados": "x" * size}, tarefa=task)
    await oraculo.ended(run_id)
    return run_id


@pytest.mark.parametrize(
    ("limit", "is_told", "left"),
    [(400_000, True, {"grande"}), (10_000, True, {"grande", "menor"}), (400_000, False, {"grande", "menor"})],
)
async def test_what_is_too_much_for_the_broker_of_a_reply_stays_a_reference(
    tmp_path: Path, limit: int, is_told: bool, left: set[str]
) -> None:
    broker, objects, told = Narrow(), FolderObjects(tmp_path), Told()
    broker.limit, broker.tells_limit = limit, is_told
    async with Harness(settings=KEPT, broker=broker, objects=objects, telemetry=told) as oraculo:
        run_id = await ended_with_one_and_a_half(oraculo)
        found = (await PlainWorker(oraculo, "respostas").takes())["resultados"]
        references = {name: read_reference(run_id, msgspec.json.encode(found[name])) for name in found}
        assert {name for name, reference in references.items() if reference is not None} == left
        for reference in filter(None, references.values()):
            assert reference.names(await objects.get(reference.key)), (
                "also one that was too small to be put there before"
            )
        assert f"{len(left)} results of a reply stay references" in told.failures[-1]


async def test_a_reply_that_its_broker_takes_in_no_form_is_given_up_with_the_reason() -> None:
    async with Harness(settings=KEPT, broker=Narrow()) as oraculo:
        run_id = await ended_with_one_and_a_half(oraculo)

        async def is_given_up() -> bool:
            return "is given up after 1 attempt (respostas: too large; " in await oraculo.operations.explain(run_id)

        await until(is_given_up)


async def test_an_engine_without_the_object_store_says_that_it_hands_out_references(tmp_path: Path) -> None:
    """As beside one that has it, while that is rolled out."""
    seen: list[Any] = []
    store = store_at(tmp_path)
    async with Harness(two_steps_app(seen), settings=shared(tmp_path), objects=Faulty(tmp_path), store=store) as before:
        run = await before.run({"destinos": ["escavador_a"]})
    told = Told()
    async with Harness(settings=KEPT, store=store_at(tmp_path), telemetry=told) as oraculo:
        assert "objects" not in (await oraculo.operations.health()).parts
        for _ in range(2):
            view = await oraculo.operations.view(await oraculo.operations.run(run["correlation_id"]))
            assert read_reference(run["correlation_id"], bytes(view["resultados"]["escavador_a"])) is not None
        health = await oraculo.operations.health()
        assert health.is_ready
        assert "set ORACULO_OBJECTS_URL" in (health.parts["objects"] or "")
        assert len(told.failures) == 1
