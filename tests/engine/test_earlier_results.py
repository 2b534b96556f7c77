"""Large results that were put aside before ORACULO_OBJECTS_URL was set, and are needed afterwards."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.core.result_reference import run_folder
from oraculo.engine.results import reader
from oraculo.engine.retention import objects as object_retention
from oraculo.errors import ObjectsUnavailable
from oraculo.stores.objects import FolderObjects
from oraculo.testing.harness import Harness
from oraculo.worker import App
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
from tests.engine.test_large_results import Recording, Told
from tests.engine.test_large_results_over_time import tidied
from tests.waiting import until

RESULT = {"status": "ok", "dados": LARGE}
MANY = b"".join(b"\n  - {id: b%d, type: executador_b, dependsOn: [escavador_a]}" % n for n in range(12))
WIDE = b"name: larga\nsteps:\n  - {type: escavador_a}" + MANY


class Places:
    """The folder beside the store's file, and the place that the URL names later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.beside, self.named = folder / "oraculo.db.objects", folder / "named"
        self.earlier, self.present = Faulty(self.beside), Faulty(self.named)

    def after(self, *apps: App, **more: Any) -> Harness:
        settings, store = shared(self.named), store_at(self.folder)
        return Harness(
            *apps, settings=settings, objects=self.present, earlier_objects=self.earlier, store=store, **more
        )

    async def run_with_a_large_result(self, pipeline: bytes = TWO_STEPS) -> str:
        objects = FolderObjects(self.beside, is_own=True)
        async with Harness(settings=KEPT, objects=objects, store=store_at(self.folder)) as oraculo:
            name = msgspec.yaml.decode(pipeline)["name"]
            await oraculo.operations.put_pipeline(name, pipeline)
            run_id = await oraculo.submit({"pipeline": name})
            await PlainWorker(oraculo, "escavador_a").answers(run_id, RESULT)
            await until(lambda: list(self.beside.rglob("*.json")))
        return run_id


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


async def test_a_run_that_was_open_goes_on_with_references(places: Places) -> None:
    run_id = await places.run_with_a_large_result()
    seen: list[Any] = []
    broker = Recording()
    async with places.after(two_steps_app(seen), broker=broker) as oraculo:
        aggregate = await oraculo.ended(run_id)
        assert aggregate["status"] == "concluida"
        assert aggregate["resultados"]["escavador_a"] == RESULT
    assert seen == [{"escavador_a": RESULT}]
    assert max(map(len, broker.bodies)) < 2_000, "its worker read it where the URL says"


async def test_what_many_commands_hand_on_is_not_put_for_each(places: Places) -> None:
    run_id = await places.run_with_a_large_result(WIDE)
    async with places.after(two_steps_app([])) as oraculo:
        assert (await oraculo.ended(run_id))["status"] == "concluida"
    assert places.present.puts <= reader._COMMANDS_AT_ONCE


async def test_what_goes_whole_is_read_in_the_earlier_folder(places: Places) -> None:
    over_a_bridge = TWO_STEPS.replace(b"type: executador_b", b"id: t, queue: 'celery://t'")
    run_id = await places.run_with_a_large_result(over_a_bridge)
    broker = Recording()
    async with places.after(broker=broker) as oraculo:
        assert msgspec.json.decode(await oraculo.operations.result(run_id, "escavador_a")) == RESULT
        await until(lambda: [body for body in broker.bodies if LARGE.encode() in body], saying="the command has it")
        await PlainWorker(oraculo, "t").answers(run_id, {"resultado": 1})
        assert (await oraculo.ended(run_id))["resultados"]["escavador_a"] == RESULT
    assert places.present.puts == 0


@pytest.mark.parametrize("which", ["earlier", "present"])
async def test_a_place_that_is_away_is_waited_for(places: Places, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "REST", 0.01)
    run_id = await places.run_with_a_large_result()
    told, seen, place = Told(), list[Any](), getattr(places, which)
    place.away = True
    async with places.after(two_steps_app(seen), telemetry=told) as oraculo:
        await until(lambda: len(told.failures) > 1, saying="the sweep tries again")
        assert "a command waits for the results that it needs: nobody home" in told.failures[0]
        assert not seen
        with pytest.raises(ObjectsUnavailable):
            await oraculo.operations.result(run_id, "escavador_a")
        place.away = False
        assert (await oraculo.ended(run_id))["status"] == "concluida"


async def test_nothing_is_put_into_a_place_of_another_installation(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    await places.run_with_a_large_result()
    told, owners = Told(), iter([ObjectsUnavailable("away when the engine starts")])

    async def claim(_installation: str, *, was_claimed: bool) -> str:
        if (fault := next(owners, None)) is not None:
            raise fault
        return "another"

    monkeypatch.setattr(places.present, "claim", claim)
    async with places.after(two_steps_app([]), telemetry=told):
        await until(lambda: len(told.failures) > 1)
    assert "a command waits for the results that it needs: another installation" in told.failures[1]
    assert places.present.puts == 0


async def test_new_results_go_where_the_url_says(places: Places) -> None:
    places.beside.mkdir()
    async with places.after(two_steps_app([])) as oraculo:
        await oraculo.operations.put_pipeline("dois-passos", TWO_STEPS)
        aggregate = await oraculo.run({"pipeline": "dois-passos"})
    assert aggregate["resultados"]["escavador_a"] == RESULT
    assert places.present.puts == 1, "the worker put it; the engine had nothing to bring"
    assert not list(places.beside.iterdir())


async def test_the_commands_of_new_runs_do_not_wait_for_the_earlier_folder(places: Places) -> None:
    await places.run_with_a_large_result()
    async with places.after(two_steps_app([])) as oraculo:
        await oraculo.operations.put_pipeline("larga", WIDE)
        run_id = await oraculo.submit({"pipeline": "larga"})
        await oraculo.ended(run_id)
        assert not oraculo.engine.results.needed(await oraculo.operations.run(run_id), 1, {})


async def test_what_is_where_the_url_says_does_not_wait_for_a_folder_that_cannot_be_read(places: Places) -> None:
    places.earlier.away = True
    async with places.after(two_steps_app([])) as oraculo:
        await oraculo.operations.put_pipeline("dois-passos", TWO_STEPS)
        assert (await oraculo.run({"pipeline": "dois-passos"}))["status"] == "concluida"
        parts = (await oraculo.engine.health()).parts
        assert "from before cannot be read: nobody home" in (parts["objects folder"] or "")


async def test_the_clean_up_walks_through_both_places(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = await places.run_with_a_large_result()
    monkeypatch.setattr(object_retention, "MIN_AGE", -5.0)
    monkeypatch.setattr(object_retention, "EVERY", 0.0)
    async with places.after(two_steps_app([])) as oraculo:
        await oraculo.ended(gone)
        folders = [place / run_folder(gone) for place in (places.beside, places.named)]
        assert [await tidied(oraculo, place) for place in (places.earlier, places.present)] == [0, 0]
        assert all(folder.exists() for folder in folders), "the run is still in the store"
        await until(lambda: oraculo.store.prune(oraculo.clock.now() + 1, 10), saying="the run is deleted")
        await until(lambda: not any(folder.exists() for folder in folders))
