"""The folder of pipelines: what changes in it is read, and nothing else, while the engine goes on."""

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oraculo.engine import pipeline_folder
from oraculo.errors import InvalidPipeline, InvalidRequest, NotFound
from oraculo.pipeline.text import MAX_TEXT
from oraculo.ports.telemetry import PipelineFileMended, PipelineFileRejected
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
        self._read = pipeline_folder.pipeline_bytes
        monkeypatch.setattr(pipeline_folder, "pipeline_bytes", self._noted)

    def _noted(self, path: Path) -> bytes:
        self.seen.append((path.name, threading.current_thread() is threading.main_thread()))
        return self._read(path)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Readings:
    return Readings(monkeypatch)


def watching(folder: Path, told: Told) -> Harness:
    return Harness(settings=Settings(engine=EngineSettings(poll=0.02), pipelines=str(folder)), telemetry=told)


async def test_only_what_changed_is_read_and_not_by_the_engines_own_thread(tmp_path: Path, readings: Readings) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / f"{name}.yaml", f"executador_{name}")
    async with watching(tmp_path, Told()) as oraculo:
        known = oraculo.engine.parts.catalogue
        readings.seen.clear()
        write(tmp_path / "b.yaml", "executador_b", "executador_novo")
        (tmp_path / "c.yaml").unlink()
        await until(lambda: "c" not in known.pipelines, saying="the change to be seen")
        assert readings.seen == [("b.yaml", False)]
        assert [step.queue for step in known.get("b").steps] == ["executador_b", "executador_novo"]
        assert "a" in known.pipelines
        await until(lambda: oraculo.broker.queues(["executador_novo"]), saying="its new queue")


def queue_of(oraculo: Harness, name: str) -> str:
    return oraculo.engine.parts.catalogue.get(name).steps[0].queue


async def test_a_bad_file_keeps_its_last_good_version_and_no_other_file_from_being_used(
    tmp_path: Path, readings: Readings
) -> None:
    told = Told()
    for name in ("a", "b"):
        write(tmp_path / f"{name}.yaml", f"executador_{name}")
    async with watching(tmp_path, told) as oraculo:
        known = oraculo.engine.parts.catalogue
        write(tmp_path / "a.yaml")  # without a step
        await until(lambda: told.of(PipelineFileRejected), saying="the fault")
        write(tmp_path / "b.yaml", "executador_novo")
        write(tmp_path / "c.yaml", "executador_c")
        await until(lambda: "c" in known.pipelines, saying="the new file")
        assert [queue_of(oraculo, name) for name in ("a", "b")] == ["executador_a", "executador_novo"]
        [rejected] = told.of(PipelineFileRejected)
        assert rejected == PipelineFileRejected("a.yaml", "a", rejected.reason, in_use=True)
        assert rejected.reason.startswith("steps: is required")
        health = await oraculo.operations.health()
        assert health.is_ready
        assert (health.parts["pipelines"] or "").startswith("a.yaml is not used and its last good version is: steps")
        write(tmp_path / "a.yaml", "executador_bom")
        await until(lambda: queue_of(oraculo, "a") == "executador_bom", saying="the mended file")
        assert told.of(PipelineFileMended) == [PipelineFileMended("a.yaml")]
        assert "pipelines" not in (await oraculo.operations.health()).parts
        assert [name for name, _ in readings.seen].count("b.yaml") == 2


async def test_whoever_asks_for_the_pipeline_of_a_bad_file_hears_of_the_file(tmp_path: Path) -> None:
    write(tmp_path / "b.yaml", "executador_b")
    write(tmp_path / "voice-over-only.yaml")  # a pipeline of that name is built in
    (tmp_path / "outro.yaml").write_text("name: meu\nsteps: []\n")
    async with watching(tmp_path, Told()) as oraculo:
        assert queue_of(oraculo, "b") == "executador_b"
        for name, file in (("meu", "outro.yaml"), ("voice-over-only", "voice-over-only.yaml")):
            with pytest.raises(NotFound, match=f"{file} is not used: steps"):
                oraculo.operations.pipeline(name)
            with pytest.raises(InvalidRequest, match=f"{file} is not used: steps"):
                await oraculo.operations.submit(b'{"pipeline": "%s"}' % name.encode())


async def test_of_two_files_with_one_name_the_one_that_had_it_keeps_it(tmp_path: Path) -> None:
    told = Told()
    write(tmp_path / "b.yaml", "executador_b")
    async with watching(tmp_path, told) as oraculo:
        (tmp_path / "a.yaml").write_text("name: b\nsteps: [{type: executador_a}]\n")
        await until(lambda: told.of(PipelineFileRejected), saying="the fault")
        [rejected] = told.of(PipelineFileRejected)
        assert (rejected.file, rejected.reason) == ("a.yaml", "name: 'b' is the name of b.yaml already")
        assert queue_of(oraculo, "b") == "executador_b"
        (tmp_path / "b.yaml").unlink()
        await until(lambda: queue_of(oraculo, "b") == "executador_a", saying="the other file")


async def test_a_folder_that_goes_away_keeps_its_definitions(tmp_path: Path) -> None:
    told, folder = Told(), tmp_path / "pipelines"
    folder.mkdir()
    write(folder / "a.yaml", "executador_a")
    async with watching(folder, told) as oraculo:
        folder.rename(tmp_path / "aside")
        await until(lambda: told.of(PipelineFileRejected), saying="the fault")
        assert queue_of(oraculo, "a") == "executador_a"
        (tmp_path / "aside").rename(folder)
        await until(lambda: told.of(PipelineFileMended), saying="the folder")
        assert queue_of(oraculo, "a") == "executador_a"
        assert len(told.of(PipelineFileRejected)) == 1


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
        known = oraculo.engine.parts.catalogue
        write(tmp_path / "a.yaml", "executador_a")
        await until(lambda: tried[0] > 3, saying="it to be tried again")
        [fault] = told.of(PipelineFileRejected)
        assert (fault.file, fault.reason) == ("a.yaml", "cannot be read: Permission denied")
        locked.clear()  # which changes neither its time nor its size
        await until(lambda: "a" in known.pipelines, saying="the file that can be read now")
        assert len(told.of(PipelineFileRejected)) == 1


async def test_a_link_to_nothing_is_dealt_with_like_a_bad_file_until_there_is_something(tmp_path: Path) -> None:
    told, folder = Told(), tmp_path / "pipelines"
    folder.mkdir()
    async with watching(folder, told) as oraculo:
        known = oraculo.engine.parts.catalogue
        (folder / "b.yaml").symlink_to(tmp_path / "b.yaml")
        await until(lambda: told.of(PipelineFileRejected), saying="the fault")
        write(folder / "c.yaml", "executador_c")
        await until(lambda: "c" in known.pipelines, saying="the good file")
        write(tmp_path / "b.yaml", "executador_b")
        await until(lambda: "b" in known.pipelines, saying="the file that is there now")
        assert len(told.of(PipelineFileRejected)) == 1


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
        known = oraculo.engine.parts.catalogue
        (folder / "a.yaml").symlink_to(fifo)
        await until(lambda: told.of(PipelineFileRejected), saying="the fault")
        write(folder / "c.yaml", "executador_c")
        await until(lambda: "c" in known.pipelines, saying="the good file")
        [fault] = told.of(PipelineFileRejected)
        assert (fault.file, fault.reason) == ("a.yaml", "cannot be read: it is not a regular file")


async def test_a_file_that_is_too_long_is_told_and_not_read(tmp_path: Path) -> None:
    told = Told()
    async with watching(tmp_path, told):
        (tmp_path / "a.new").touch()
        os.truncate(tmp_path / "a.new", 1 << 40)  # a hole: it takes no room on the disk, and would take all memory
        (tmp_path / "a.new").replace(tmp_path / "a.yaml")
        await until(lambda: told.of(PipelineFileRejected), saying="the fault")
        assert told.of(PipelineFileRejected)[0].reason == f"{1 << 40} bytes, over the limit of {MAX_TEXT}"


@pytest.mark.parametrize("kind", ["a link to nothing", "a folder", "a FIFO", "a device"])
async def test_a_start_goes_on_without_a_file_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.yaml"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "a device" else "nothing")
    write(tmp_path / "b.yaml", "executador_b")
    told = Told()
    async with watching(tmp_path, told) as oraculo:
        assert queue_of(oraculo, "b") == "executador_b"
        [fault] = told.of(PipelineFileRejected)
        assert fault.file == "a.yaml"
        assert fault.reason.startswith("cannot be read: ")


async def test_a_start_without_its_folder_names_it(tmp_path: Path) -> None:
    oraculo = watching(tmp_path / "pipelines", Told())
    with pytest.raises(InvalidPipeline, match=rf"^{re.escape(str(tmp_path / 'pipelines'))}: .*cannot be read: \w+"):
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
        known = oraculo.engine.parts.catalogue
        assert known.get("a").steps[0].queue == "executador_a"
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")
        await until(lambda: known.get("a").steps[0].queue == "executador_novo", saying="the other version")
        assert not told.of(PipelineFileRejected)
