"""The folder of pipelines: what changes in it is read, and nothing else, while the engine goes on."""

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oraculo.core.pipeline import Definition
from oraculo.core.pipeline_text import MAX_TEXT
from oraculo.engine import catalogue
from oraculo.errors import InvalidPipeline
from oraculo.ports.telemetry import LoopFailed
from oraculo.settings import EngineSettings, Settings
from oraculo.testing.harness import Harness
from tests.engine.broker_stage import Told
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


async def test_a_file_that_cannot_be_read_is_told_once_and_tried_at_each_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, locked, tried, open_ = Told(), {"a.yaml"}, [0], Path.open

    def guarded(path: Path, *how: Any, **more: Any) -> Any:
        if path.name in locked:
            tried[0] += 1
            raise PermissionError(13, "Permission denied", str(path))
        return open_(path, *how, **more)

    monkeypatch.setattr(Path, "open", guarded)
    async with watching(tmp_path, told) as oraculo:
        known = oraculo.engine.catalogue
        write(tmp_path / "a.yaml", "executador_a")
        await until(lambda: tried[0] > 3, saying="it to be tried again")
        [fault] = told.of(LoopFailed)
        assert f"{tmp_path / 'a.yaml'}: cannot be read: Permission denied" in str(fault)
        locked.clear()  # which changes neither its time nor its size
        await until(lambda: "a" in known.pipelines, saying="the file that can be read now")
        assert len(told.of(LoopFailed)) == 1


async def test_a_link_to_nothing_is_dealt_with_like_a_bad_file_until_there_is_something(tmp_path: Path) -> None:
    told, folder = Told(), tmp_path / "pipelines"
    folder.mkdir()
    async with watching(folder, told) as oraculo:
        known = oraculo.engine.catalogue
        (folder / "b.yaml").symlink_to(tmp_path / "b.yaml")
        await until(lambda: len(told.of(LoopFailed)) == 1, saying="the fault")
        write(folder / "c.yaml", "executador_c")
        await until(lambda: len(told.of(LoopFailed)) == 2, saying="the fault again")
        assert all("kept the definitions of before" in str(fault) for fault in told.of(LoopFailed))
        write(tmp_path / "b.yaml", "executador_b")
        await until(lambda: {"b", "c"} <= known.pipelines.keys(), saying="both files")


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    yield path
    os.close(os.open(path, os.O_RDWR))  # lets go of whoever waits for a writer


async def test_what_is_not_a_file_is_told_and_not_opened(tmp_path: Path, fifo: Path) -> None:
    told, folder = Told(), tmp_path / "pipelines"
    folder.mkdir()
    async with watching(folder, told) as oraculo:
        known = oraculo.engine.catalogue
        (folder / "a.yaml").symlink_to(fifo)
        await until(lambda: told.of(LoopFailed), saying="the fault")
        write(folder / "c.yaml", "executador_c")
        await until(lambda: len(told.of(LoopFailed)) == 2, saying="the fault again, as something changed")
        said = f"{folder / 'a.yaml'}: cannot be read: it is not a regular file"
        assert all(said in str(fault) for fault in told.of(LoopFailed))
        (folder / "a.yaml").unlink()
        await until(lambda: "c" in known.pipelines, saying="the good file")


async def test_a_file_that_is_too_long_is_told_and_not_read(tmp_path: Path) -> None:
    told = Told()
    async with watching(tmp_path, told):
        (tmp_path / "a.new").touch()
        os.truncate(tmp_path / "a.new", 1 << 40)  # a hole: it takes no room on the disk, and would take all memory
        (tmp_path / "a.new").replace(tmp_path / "a.yaml")
        await until(lambda: told.of(LoopFailed), saying="the fault")
        assert f"a.yaml: {1 << 40} bytes, over the limit of {MAX_TEXT}" in str(told.of(LoopFailed)[-1])


@pytest.mark.parametrize("kind", ["a link to nothing", "a folder", "a FIFO", "a device", "no pipelines folder"])
async def test_a_start_with_what_cannot_be_read_names_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "pipelines" / "a.yaml"
    if kind == "a folder":
        path.mkdir(parents=True)
    elif kind == "a FIFO":
        path.parent.mkdir()
        os.mkfifo(path)
    elif kind != "no pipelines folder":
        path.parent.mkdir()
        path.symlink_to("/dev/zero" if kind == "a device" else "nothing")
    named = path.parent if kind == "no pipelines folder" else path
    oraculo = watching(path.parent, Told())
    with pytest.raises(InvalidPipeline, match=rf"^{re.escape(str(named))}: .*cannot be read: \w+"):
        await oraculo.engine.start()
    await oraculo.stop()


async def test_files_that_kubernetes_mounts_are_read_when_their_link_is_switched_and_hidden_ones_never(
    tmp_path: Path,
) -> None:
    """A ConfigMap is a hidden link to a hidden folder, and visible links to the files in it."""
    for version, queue in (("..1", "executador_a"), ("..2", "executador_novo")):
        (tmp_path / version).mkdir()
        write(tmp_path / version / "a.yaml", queue)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    (tmp_path / ".#a.yaml").symlink_to("somebody@somewhere.1234:5678")  # of Emacs, while the file is worked on
    told = Told()
    async with watching(tmp_path, told) as oraculo:
        known = oraculo.engine.catalogue
        assert known.get("a").steps[0].queue == "executador_a"
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")
        await until(lambda: known.get("a").steps[0].queue == "executador_novo", saying="the other version")
        assert not told.of(LoopFailed)
