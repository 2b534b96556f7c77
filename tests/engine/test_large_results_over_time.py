"""Large results through editions and restarts, within limits, and how they are tidied away."""

import asyncio
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.core.result_reference import CLAIM, SHARDS, encode_reference, make_reference, run_folder
from oraculo.engine.deliver import deliveries
from oraculo.engine.results import clean_up as object_retention
from oraculo.engine.results.clean_up import ResultCleanUp
from oraculo.engine.send import outbox, sweep
from oraculo.errors import InvalidSettings, NotFound, ObjectsError, ObjectsUnavailable, QueueFull
from oraculo.ports.broker import Outgoing, Receipt
from oraculo.ports.clock import SystemClock
from oraculo.ports.objects import Objects
from oraculo.settings import EngineSettings, ObjectSettings
from oraculo.stores.objects import FolderObjects
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from oraculo.worker import Client
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
from tests.engine.test_large_results import Told
from tests.waiting import until


class Refusing(MemoryBroker):
    """Has no room in one of its queues, until it has."""

    def __init__(self, queue: str) -> None:
        super().__init__(clock=SystemClock())
        self._queue = queue
        self.has_room = False
        self.refused = 0

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if not self.has_room and any(message.queue == self._queue for message in messages):
            self.refused += 1
            return [Receipt(error=QueueFull("no room"))] * len(messages)
        return await super().publish(messages)


# -- editions, restarts, limits -------------------------------------------------------------------------------------


AMENDS = b"""
name: emenda
onLate: amend
timeout: 0.3
steps:
  - {type: escavador_a}
  - {type: escavador_b}
"""


async def test_an_amended_run_is_not_delivered_with_the_aggregate_before(tmp_path: Path) -> None:
    posted: list[dict[str, Any]] = []

    async def post(_url: str, body: bytes, _headers: dict[str, str]) -> int:
        posted.append(msgspec.json.decode(body))
        return 200

    objects = Faulty(tmp_path)
    objects.gate = asyncio.Event()
    async with Harness(settings=KEPT, objects=objects, post=post) as oraculo:
        await oraculo.operations.put_pipeline("emenda", AMENDS)
        run_id = await oraculo.submit({"pipeline": "emenda", "webhook": "http://nobody/"})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        await until(lambda: objects.gets, saying="the aggregate of the first end is being read")
        await PlainWorker(oraculo, "escavador_b").answers(run_id, {"dados": 2})
        await until(lambda: objects.gets > 1, saying="and that of the amendment")
        objects.gate.set()
        await until(lambda: posted)
        await until(lambda: _delivered(oraculo, run_id))
    assert [(one["versao"], sorted(one["resultados"])) for one in posted] == [(2, ["escavador_a", "escavador_b"])]
    assert posted[0]["resultados"]["escavador_a"] == {"dados": LARGE}


async def _delivered(oraculo: Harness, run_id: str) -> bool:
    head = (await oraculo.store.heads([run_id]))[run_id]
    return all(deliveries.status == "entregue" for deliveries in head.deliveries)


async def test_a_run_that_was_reopened_is_not_delivered_with_the_aggregate_before(tmp_path: Path) -> None:
    posted: list[int] = []

    async def post(_url: str, body: bytes, _headers: dict[str, str]) -> int:
        posted.append(msgspec.json.decode(body)["versao"])
        return 200

    objects = Faulty(tmp_path)
    objects.gate = asyncio.Event()
    async with Harness(settings=KEPT, objects=objects, post=post) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a", "escavador_b"], "webhook": "http://nobody/"})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        await PlainWorker(oraculo, "escavador_b").answers(run_id, {"status": "erro", "repetir": False})
        await until(lambda: objects.gets, saying="the aggregate of the first end is being read")
        await oraculo.operations.repeat(run_id)
        objects.gate.set()
        assert not still_reading()
        await PlainWorker(oraculo, "escavador_b").answers(run_id, {"dados": 2}, tentativa=2)
        await until(lambda: posted)
        await until(lambda: _delivered(oraculo, run_id))
    assert posted == [2]


def still_reading() -> list[str]:
    return [
        task.get_name() for task in asyncio.all_tasks() if task.get_name() == "large results" and not task.cancelling()
    ]


async def test_a_restart_between_the_end_and_the_delivery_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oraculo.core.machine import delivery as core_delivery

    monkeypatch.setattr(core_delivery, "DELIVERY_LEASE", 0.1)
    posted: list[dict[str, Any]] = []

    async def post(_url: str, body: bytes, _headers: dict[str, str]) -> int:
        posted.append(msgspec.json.decode(body))
        return 200

    stuck = Faulty(tmp_path)
    stuck.gate = asyncio.Event()
    hasty = msgspec.structs.replace(KEPT, engine=EngineSettings(poll=0.05, note_linger=0.005, stop_grace=0.05))
    async with Harness(settings=hasty, objects=stuck, store=store_at(tmp_path), post=post) as before:
        run_id = await before.submit({"destinos": ["escavador_a"], "webhook": "http://nobody/"})
        await PlainWorker(before, "escavador_a").answers(run_id, {"dados": LARGE})
        await until(lambda: stuck.gets)
    assert not posted
    assert not still_reading()
    async with Harness(settings=KEPT, objects=FolderObjects(tmp_path), store=store_at(tmp_path), post=post) as after:
        await until(lambda: _delivered(after, run_id))
    assert posted[0]["resultados"]["escavador_a"] == {"dados": LARGE}


async def test_a_restart_before_a_command_could_be_sent_sends_it(tmp_path: Path) -> None:
    stuck = Faulty(tmp_path)
    stuck.gate = asyncio.Event()
    hasty = msgspec.structs.replace(KEPT, engine=EngineSettings(poll=0.05, note_linger=0.005, stop_grace=0.05))
    async with Harness(settings=hasty, objects=stuck, store=store_at(tmp_path)) as before:
        await before.operations.put_pipeline("dois-passos", TWO_STEPS)
        run_id = await before.submit({"pipeline": "dois-passos"})
        await PlainWorker(before, "escavador_a").answers(run_id, {"status": "ok", "dados": LARGE})
        await until(lambda: stuck.gets)
    assert not still_reading()
    seen: list[Any] = []
    app = two_steps_app(seen)
    async with Harness(app, settings=KEPT, objects=FolderObjects(tmp_path), store=store_at(tmp_path)) as after:
        assert (await after.ended(run_id))["status"] == "concluida"
    assert seen == [{"escavador_a": {"status": "ok", "dados": LARGE}}]


async def test_an_aggregate_brings_along_only_so_much(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(KEPT, objects=ObjectSettings(inline_bytes=650_000))
    async with Harness(settings=limits, objects=FolderObjects(tmp_path)) as oraculo:
        queues = ["escavador_a", "escavador_b", "escavador_c"]
        run_id = await oraculo.submit({"destinos": queues})
        for queue in queues:
            await PlainWorker(oraculo, queue).answers(run_id, {"dados": LARGE, "de": queue})
        results = (await oraculo.ended(run_id))["resultados"]
        assert ["oraculo_referencia" in results[queue] for queue in queues] == [False, False, True]
        reference = results["escavador_c"]["oraculo_referencia"]
        assert reference["bytes"] > 300_000
        whole = msgspec.json.decode(await oraculo.operations.result(run_id, "escavador_c"))
        assert whole == {"dados": LARGE, "de": "escavador_c"}


@pytest.mark.parametrize("knows", ["nothing", "a store that is away", "the store"])
async def test_a_client_with_the_object_store_gets_what_was_too_much(tmp_path: Path, knows: str) -> None:
    objects = None if knows == "nothing" else Faulty(tmp_path)
    if objects is not None:
        objects.away = knows == "a store that is away"
    settings = shared(tmp_path, inline_bytes=0)
    async with (
        Harness(two_steps_app([]), settings=settings, objects=FolderObjects(tmp_path)) as oraculo,
        Client(oraculo.broker, objects=objects) as client,
    ):
        aggregate = await client.run({"destinos": ["escavador_a"]}, timeout=10)
    result = aggregate["resultados"]["escavador_a"]
    if knows == "the store":
        assert result == {"status": "ok", "dados": LARGE}
    else:
        assert "oraculo_referencia" in result


async def test_an_aggregate_larger_than_all_that_may_be_under_way_is_delivered_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "MAX_BYTES_UNDER_WAY", 100_000)
    async with Harness(settings=KEPT, objects=FolderObjects(tmp_path)) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"], "responder_em": "respostas"})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        reply = await PlainWorker(oraculo, "respostas").takes()
        assert reply["resultados"]["escavador_a"] == {"dados": LARGE}


async def test_commands_that_need_nothing_large_do_not_wait_behind_those_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_MOST_READING", 1)
    objects = Faulty(tmp_path)
    objects.gate = asyncio.Event()
    async with Harness(two_steps_app([]), settings=KEPT, objects=objects) as oraculo:
        await oraculo.operations.put_pipeline("dois-passos", TWO_STEPS)
        waiting = [await oraculo.submit({"pipeline": "dois-passos"}) for _ in range(2)]
        await until(lambda: objects.gets)
        run_id = await oraculo.submit({"destinos": ["escavador_z"]})
        assert (await PlainWorker(oraculo, "escavador_z").takes())["id"] == run_id
        objects.gate.set()
        assert {(await oraculo.ended(one))["status"] for one in waiting} == {"concluida"}


async def test_commands_that_wait_for_an_object_store_that_is_away_do_not_hide_others_from_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_MOST_READING", 1)
    monkeypatch.setattr(sweep, "_PAGE", 1)
    objects, broker = Faulty(tmp_path), Refusing("escavador_z")
    objects.gate = asyncio.Event()
    async with Harness(two_steps_app([]), settings=KEPT, objects=objects, broker=broker) as oraculo:
        await oraculo.operations.put_pipeline("dois-passos", TWO_STEPS)
        waiting = [await oraculo.submit({"pipeline": "dois-passos", "correlation_id": name}) for name in ("a", "b")]
        await until(lambda: objects.gets)
        run_id = await oraculo.submit({"destinos": ["escavador_z"], "correlation_id": "z"})
        await until(lambda: broker.refused, saying="that its queue has no room")
        broker.has_room = True
        assert (await PlainWorker(oraculo, "escavador_z").takes())["id"] == run_id
        assert not oraculo.engine.parts.outbox.has_spilled  # else each sweep would ask for all that wait
        objects.gate.set()
        assert {(await oraculo.ended(one))["status"] for one in waiting} == {"concluida"}


async def test_a_result_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    async with Harness(settings=KEPT, objects=FolderObjects(tmp_path)) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        for task, why in (("escavador_a", "it is (pendente|em_execucao)"), ("outra", "not one of its tasks")):
            with pytest.raises(NotFound, match=why):
                await oraculo.operations.result(run_id, task)


async def test_without_an_object_store_a_reference_says_what_to_set() -> None:
    async with Harness(settings=KEPT) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        reference = msgspec.json.decode(encode_reference(make_reference(run_id, "escavador_a", b"{}")))
        await PlainWorker(oraculo, "escavador_a").answers(run_id, reference)
        assert (await oraculo.ended(run_id))["resultados"]["escavador_a"] == reference
        with pytest.raises(ObjectsUnavailable, match="ORACULO_OBJECTS_URL"):
            await oraculo.operations.result(run_id, "escavador_a")


# -- the janitor ----------------------------------------------------------------------------------------------------


async def tidied(oraculo: Harness, objects: Objects) -> int:
    cleaner = ResultCleanUp(objects, oraculo.store, oraculo.engine.parts.peers, oraculo.clock)
    return sum([await cleaner.tidy(shard) for shard in SHARDS])


async def test_the_results_of_runs_that_were_deleted_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = FolderObjects(tmp_path)
    async with Harness(settings=KEPT, objects=objects) as oraculo:
        gone, stays = [await oraculo.submit({"destinos": ["escavador_a"]}) for _ in range(2)]
        for run_id in (gone, stays):
            await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
            await oraculo.ended(run_id)
            if run_id == gone:
                await until(lambda: _pruned(oraculo), saying="the run is deleted")
        assert await tidied(oraculo, objects) == 0, "it is not an hour old"
        monkeypatch.setattr(object_retention, "MIN_AGE", -5.0)
        assert await tidied(oraculo, objects) == 1
        assert not (tmp_path / run_folder(gone)).exists()
        assert (await oraculo.ended(stays))["resultados"]["escavador_a"] == {"dados": LARGE}


async def test_the_results_of_a_run_that_a_newer_version_wrote_stay_and_keep_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_retention, "MIN_AGE", -5.0)
    objects, stays = FolderObjects(tmp_path / "objects"), "fica"
    shard = run_folder(stays)[:2]
    gone = next(name for name in map(str, count()) if run_folder(name)[:2] == shard)
    async with Harness(settings=KEPT, objects=objects, store=store_at(tmp_path)) as oraculo:
        await oraculo.submit({"destinos": ["escavador_a"], "correlation_id": stays})
        for run_id in (stays, gone):
            await objects.put(run_id, make_reference(run_id, "escavador_a", b"{}").key, b"{}")
        with closing(sqlite3.connect(tmp_path / "oraculo.db")) as connection, connection:
            connection.execute("UPDATE runs SET status = 'novo'")
        assert await tidied(oraculo, objects) == 1
        assert [run_folder(stays)] == [folder.name for folder in await objects.folders(shard)]


async def _pruned(oraculo: Harness) -> int:
    return await oraculo.store.prune(oraculo.clock.now() + 1, 10)


async def test_what_is_not_a_runs_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_retention, "MIN_AGE", -5.0)
    objects = FolderObjects(tmp_path)
    nameless, mislabelled = tmp_path / run_folder("a"), tmp_path / run_folder("b")
    for folder in (nameless, mislabelled):
        folder.mkdir(parents=True)
        (folder / "theirs.json").write_text("{}")
    (mislabelled / "run").write_text("somebody else")
    async with Harness(settings=KEPT, objects=objects) as oraculo:
        assert await tidied(oraculo, objects) == 0
    assert (nameless / "theirs.json").exists()
    assert (mislabelled / "theirs.json").exists()


async def test_a_place_is_one_installations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another would delete what the first one keeps there."""
    monkeypatch.setattr(object_retention, "MIN_AGE", -5.0)
    objects = FolderObjects(tmp_path)
    async with Harness(settings=KEPT, objects=objects) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        await oraculo.ended(run_id)
        with pytest.raises(InvalidSettings, match="ORACULO_OBJECTS_URL: another installation keeps its large results"):
            async with Harness(settings=KEPT, objects=FolderObjects(tmp_path)):
                pass
        async with Harness(settings=KEPT) as other:  # as when the place could not be asked at the start
            with pytest.raises(ObjectsError, match="another installation"):
                await tidied(other, objects)
        assert (await oraculo.ended(run_id))["resultados"]["escavador_a"] == {"dados": LARGE}


async def test_a_place_that_is_away_does_not_keep_an_engine_from_starting(tmp_path: Path) -> None:
    class Away(FolderObjects):
        async def claim(self, installation: str, *, was_claimed: bool = False) -> str:
            raise ObjectsUnavailable("not now")

    async with Harness(settings=KEPT, objects=Away(tmp_path)) as oraculo:
        assert (await oraculo.engine.parts.health.look()).is_ready


async def test_a_folder_that_is_not_mounted_when_the_engine_starts_is_away_and_no_new_one(tmp_path: Path) -> None:
    """As after the machine's own start, when mounts come late."""
    place, volume, told = tmp_path / "place", tmp_path / "volume", Told()
    async with Harness(settings=KEPT, objects=FolderObjects(place), store=store_at(tmp_path)) as oraculo:
        before = await oraculo.submit({"destinos": ["escavador_a"]})
        await PlainWorker(oraculo, "escavador_a").answers(before, {"dados": LARGE})
        await oraculo.ended(before)
    place.rename(volume)
    place.mkdir()
    async with Harness(
        settings=KEPT, objects=FolderObjects(place), store=store_at(tmp_path), telemetry=told
    ) as oraculo:
        assert "is it mounted" in told.failures[0]
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        assert (await oraculo.ended(run_id))["resultados"]["escavador_a"] == {"dados": LARGE}
        assert os.listdir(place) == [], "nothing would be seen of it once the folder is mounted"
        place.rmdir()
        volume.rename(place)
        assert (await oraculo.ended(before))["resultados"]["escavador_a"] == {"dados": LARGE}


async def test_a_folder_that_was_emptied_for_good_is_used_again_when_it_is_said(tmp_path: Path) -> None:
    place = tmp_path / "place"
    async with Harness(settings=KEPT, objects=FolderObjects(place), store=store_at(tmp_path)):
        pass
    (place / CLAIM).unlink()
    (place / CLAIM).touch()
    async with Harness(settings=KEPT, objects=FolderObjects(place), store=store_at(tmp_path)) as oraculo:
        assert (await oraculo.engine.parts.health.look()).is_ready
        assert (place / CLAIM).read_text() == await oraculo.store.installation()


async def test_a_place_that_turns_out_to_be_anothers_is_not_used(tmp_path: Path) -> None:
    class AwayAtFirst(FolderObjects):
        is_away = True

        async def claim(self, installation: str, *, was_claimed: bool = False) -> str:
            if self.is_away:
                raise ObjectsUnavailable("not now")
            return "somebody else's"

    objects = AwayAtFirst(tmp_path)
    async with Harness(settings=KEPT, objects=objects) as oraculo:
        objects.is_away = False
        run_id = await oraculo.submit({"destinos": ["escavador_a"]})
        await PlainWorker(oraculo, "escavador_a").answers(run_id, {"dados": LARGE})
        assert (await oraculo.ended(run_id))["resultados"]["escavador_a"] == {"dados": LARGE}
        health = await oraculo.engine.parts.health.look()
        assert "another installation" in str(health.parts["objects folder"])
    assert os.listdir(tmp_path) == []


async def test_only_the_engine_that_comes_first_tidies_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_retention, "EVERY", 0.0)
    asked: dict[str, list[str]] = {"one": [], "two": []}

    class Peers:
        def __init__(self, name: str) -> None:
            self.name = name

        def rank(self, shard: str) -> int:
            return int((shard[-1] in "02468ace") != (self.name == "one"))

    class Asked(FolderObjects):
        async def folders(self, shard: str) -> Any:
            asked[os.path.basename(self._root)].append(shard)
            return []

    for name in asked:
        store = SqliteStore(":memory:")
        await store.start()
        cleaner = ResultCleanUp(Asked(tmp_path / name), store, Peers(name), SystemClock())  # type: ignore[arg-type]
        running = asyncio.create_task(cleaner.run())
        await until(lambda name=name: len(asked[name]) >= 128)  # type: ignore[misc]
        running.cancel()
        await store.close()
    assert set(asked["one"]).isdisjoint(asked["two"])
    assert set(asked["one"]) | set(asked["two"]) == set(SHARDS)


async def test_engines_that_are_often_started_anew_come_to_every_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_retention, "EVERY", 0.0)
    asked: list[str] = []

    class Alone:
        def rank(self, _shard: str) -> int:
            return 0

    class Hours:
        def __init__(self, hours: int) -> None:
            self.hours = hours

        def now(self) -> float:
            return 1_700_000_000.0 + 3600.0 * self.hours

    class Asked(FolderObjects):
        async def folders(self, shard: str) -> Any:
            asked.append(shard)
            return []

    store = SqliteStore(":memory:")
    await store.start()
    for hour in range(5):
        before = len(asked)
        cleaner = ResultCleanUp(Asked(tmp_path), store, Alone(), Hours(hour))  # type: ignore[arg-type]
        running = asyncio.create_task(cleaner.run())
        await until(lambda before=before: len(asked) >= before + 60)  # type: ignore[misc]
        running.cancel()
        del asked[before + 60 :]
    await store.close()
    assert set(asked) == set(SHARDS)
