"""The folder of pipelines: what changes in it is read, and nothing else, while the engine goes on."""

import threading
from pathlib import Path
from typing import Any

import pytest

from oraculo.core.pipeline import Definition
from oraculo.engine import catalogue
from oraculo.ports.telemetry import LoopFailed
from oraculo.settings import EngineSettings, Settings
from oraculo.testing.harness import Harness
from tests.engine.test_brokers import Told
from tests.waiting import until


def write(path: Path, *queues: str) -> None:
    """In one step: half a file is not to be read."""
    aside = path.with_suffix(".new")
    aside.write_text(f"name: {path.stem}\nsteps: [{', '.join(f'{{type: {queue}}}' for queue in queues)}]\n")
    aside.replace(path)


class Readings:
    """Which files are read, and by which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, bool]] = []
        self._read = catalogue.read_pipeline_file
        monkeypatch.setattr(catalogue, "read_pipeline_file", self._noted)

    def _noted(self, path: Path, *about: Any) -> Definition:
        self.seen.append((path.name, threading.current_thread() is threading.main_thread()))
        return self._read(path, *about)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Readings:
    return Readings(monkeypatch)


def watching(folder: Path, told: Told) -> Harness:
    return Harness(settings=Settings(engine=EngineSettings(poll=0.02), pipelines=str(folder)), telemetry=told)


async def test_only_what_changed_is_read_and_not_by_the_engines_own_thread(tmp_path: Path, readings: Readings) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / f"{name}.yaml", f"executador_{name}")
    async with watching(tmp_path, Told()) as oraculo:
        known = oraculo.engine.catalogue
        readings.seen.clear()
        write(tmp_path / "b.yaml", "executador_b", "executador_novo")
        (tmp_path / "c.yaml").unlink()
        await until(lambda: "c" not in known.pipelines, saying="the change to be seen")
        assert readings.seen == [("b.yaml", False)]
        assert [step.queue for step in known.get("b").steps] == ["executador_b", "executador_novo"]
        assert "a" in known.pipelines
        await until(lambda: oraculo.broker.queues(["executador_novo"]), saying="its new queue")


async def test_a_bad_file_is_told_at_each_change_and_what_was_good_before_is_kept(
    tmp_path: Path, readings: Readings
) -> None:
    told = Told()
    for name in ("a", "b"):
        write(tmp_path / f"{name}.yaml", f"executador_{name}")
    async with watching(tmp_path, told) as oraculo:
        known = oraculo.engine.catalogue
        write(tmp_path / "a.yaml")  # without a step
        await until(lambda: len(told.of(LoopFailed)) == 1, saying="the fault")
        write(tmp_path / "b.yaml", "executador_novo")
        await until(lambda: len(told.of(LoopFailed)) == 2, saying="the fault again")
        assert [step.queue for name in ("a", "b") for step in known.get(name).steps] == ["executador_a", "executador_b"]
        write(tmp_path / "a.yaml", "executador_bom")
        await until(lambda: known.get("a").steps[0].queue == "executador_bom", saying="the mended file")
        assert known.get("b").steps[0].queue == "executador_novo"
        assert [name for name, _ in readings.seen].count("b.yaml") == 2
