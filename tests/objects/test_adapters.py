"""The port's promises, kept by each adapter: a folder, and whatever fsspec reaches."""

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from oraculo.core.result_reference import CLAIM, SHARDS, make_reference, run_folder
from oraculo.errors import ObjectLost, ObjectsUnavailable
from oraculo.ports.objects import Objects, get_result, in_thread, put_result
from oraculo.stores.objects import FolderObjects, RemoteObjects

BODY = b'{"dados":"' + b"x" * 300_000 + b'"}'
RUN = "um/execução ../ estranha"


@pytest.fixture(params=["folder", "fsspec memory", "fsspec file"])
async def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    match request.param:
        case "folder":
            return await claimed(tmp_path / "objects")
        case "fsspec memory":
            return await claimed_at(RemoteObjects(f"memory://{uuid4()}/prefix"))
        case _:
            return await claimed_at(RemoteObjects(f"file://{tmp_path}/objects"))


async def claimed(folder: Path) -> FolderObjects:
    objects = FolderObjects(folder)
    await claimed_at(objects)
    return objects


async def claimed_at(objects: Objects) -> Objects:
    assert await objects.claim("um") == "um"
    return objects


async def test_what_is_put_is_there(objects: Objects) -> None:
    reference = await put_result(objects, RUN, "a/b?*", BODY)
    assert await objects.get(reference.key) == BODY
    assert await get_result(objects, reference) == BODY
    assert await objects.owner(run_folder(RUN)) == RUN


async def test_the_same_again_changes_nothing(objects: Objects) -> None:
    first = await put_result(objects, RUN, "a", BODY)
    assert await put_result(objects, RUN, "a", BODY) == first
    assert await objects.get(first.key) == BODY


async def test_what_is_not_there_is_lost(objects: Objects) -> None:
    with pytest.raises(ObjectLost, match=r"there is no .*; was it put into another ORACULO_OBJECTS_URL\?"):
        await objects.get(make_reference(RUN, "a", BODY).key)
    assert await objects.owner(run_folder(RUN)) is None
    assert not await objects.folders("00")
    assert not await objects.delete(run_folder(RUN), time.time() + 60)


async def test_what_is_not_what_was_put_is_lost(objects: Objects) -> None:
    reference = make_reference(RUN, "a", BODY)
    await objects.put(RUN, reference.key, BODY[:-1])
    with pytest.raises(ObjectLost, match="not what was put"):
        await get_result(objects, reference)


async def test_folders_are_listed_by_shard_with_their_age(objects: Objects) -> None:
    before = time.time()
    for run_id in ("a", "b", "c"):
        await put_result(objects, run_id, "t", b"{}")
        await put_result(objects, run_id, "u", b"{ }")
    (found,) = [one for one in await objects.folders(run_folder("a")[:2]) if one.name == run_folder("a")]
    assert before - 5 <= found.written_at <= time.time() + 5


async def test_a_folder_is_deleted_with_all_that_is_in_it(objects: Objects) -> None:
    reference = await put_result(objects, RUN, "a", BODY)
    await put_result(objects, RUN, "b", BODY)
    other = await put_result(objects, "another", "a", BODY)
    assert await objects.delete(run_folder(RUN), time.time() + 60)
    with pytest.raises(ObjectLost):
        await objects.get(reference.key)
    assert await objects.owner(run_folder(RUN)) is None
    assert run_folder(RUN) not in [one.name for one in await objects.folders(run_folder(RUN)[:2])]
    assert await objects.get(other.key) == BODY


async def test_a_folder_that_was_written_since_is_not_deleted(objects: Objects) -> None:
    reference = await put_result(objects, RUN, "a", BODY)
    assert not await objects.delete(run_folder(RUN), time.time() - 60)
    assert await objects.get(reference.key) == BODY


async def test_the_first_to_claim_a_place_has_it(objects: Objects) -> None:
    assert await objects.claim("um") == "um"
    assert await objects.claim("dois") == "um"
    assert await objects.claim("um") == "um"
    assert not any([await objects.folders(shard) for shard in SHARDS])


async def test_it_can_be_checked(objects: Objects) -> None:
    assert "objects" in await objects.check() or "prefix" in await objects.check()


async def test_closing_twice_is_no_harm(objects: Objects) -> None:
    await put_result(objects, RUN, "a", BODY)
    await objects.close()
    await objects.close()


# -- the folder ------------------------------------------------------------------------------------------------------


def everything_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def test_a_name_appears_only_when_its_bytes_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any of these steps, it leaves no name that leads to half a result."""
    steps: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"
        steps.append(f"sync {kind}")
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        steps.append(f"name {'run' if target.name == 'run' else 'result'}")
        return real_replace(self, target)

    objects = await claimed(tmp_path / "objects")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    await put_result(objects, RUN, "a", BODY)
    written = steps[steps.index("sync file") :]
    assert written == ["sync file", "name run", "sync folder", "sync file", "name result", "sync folder"]
    assert steps[: -len(written)] == ["sync folder"] * 2, "each new folder's parent"


async def test_a_write_that_fails_leaves_nothing_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = await claimed(tmp_path)
    await put_result(objects, RUN, "a", b"{}")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    there = everything_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Exception, match="No space left"):
            await put_result(objects, RUN, "b", BODY)
    assert everything_in(tmp_path) == there


async def test_what_a_killed_deletion_left_is_cleared_away_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = await claimed(tmp_path)
    await put_result(objects, RUN, "a", b"{}")
    shard = tmp_path / run_folder(RUN)[:2]
    (shard / f".{run_folder(RUN)[3:]}.0123").mkdir()
    assert len(await objects.folders(shard.name)) == 1
    assert len(list(shard.iterdir())) == 2, "it may be in the middle of it"
    monkeypatch.setattr("oraculo.stores.objects.folder._ABANDONED", -1.0)
    assert len(await objects.folders(shard.name)) == 1
    assert len(list(shard.iterdir())) == 1


async def test_what_is_deleted_while_it_is_put_again_is_there_once_it_is_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was of an ended run with the same id, and another task of this one puts its own just then."""
    objects = await claimed(tmp_path)
    reference, folder = await put_result(objects, RUN, "a", BODY), tmp_path / run_folder(RUN)
    real_utime, at_once = os.utime, iter([True])

    async def clean_up_and_put() -> None:
        other = FolderObjects(tmp_path)
        assert await other.delete(run_folder(RUN), time.time() - 60)
        await put_result(other, RUN, "b", b"{}")
        await other.close()

    def utime(path: Path) -> None:
        if next(at_once, False):
            asyncio.run(clean_up_and_put())
        real_utime(path)

    real_utime(folder, (1.0, 1.0))
    monkeypatch.setattr(os, "utime", utime)
    assert await put_result(objects, RUN, "a", BODY) == reference
    assert not next(at_once, False), "it was deleted meanwhile"
    assert await get_result(objects, reference) == BODY


async def test_a_folder_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="not a folder"):
        await FolderObjects(tmp_path / "file" / "objects").check()


async def test_a_folder_that_cannot_be_looked_at_says_so(tmp_path: Path) -> None:
    with pytest.raises(ObjectsUnavailable, match="File name too long"):  # of what even root is refused
        await FolderObjects(tmp_path / ("x" * 300)).check()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ObjectsUnavailable, match="Too many levels of symbolic links"):
        await FolderObjects(tmp_path / "loop").check()


async def test_looking_at_a_folder_does_not_make_it(tmp_path: Path) -> None:
    assert await FolderObjects(tmp_path / "not" / "yet").check() == str(tmp_path / "not" / "yet")
    assert os.listdir(tmp_path) == []


async def test_a_folder_that_is_not_mounted_is_away_and_nothing_is_put_under_it(tmp_path: Path) -> None:
    place, volume = tmp_path / "place", tmp_path / "volume"
    objects = await claimed(place)
    reference = await put_result(objects, RUN, "a", BODY)
    place.rename(volume)
    for uses in (FolderObjects(place), objects):  # of an engine or a worker that starts now, and of one that was there
        place.mkdir()
        with pytest.raises(ObjectsUnavailable, match=r"has no file 'installation'.* is it mounted"):
            await get_result(uses, reference)
        with pytest.raises(ObjectsUnavailable, match="is it mounted"):
            await put_result(uses, RUN, "b", b"{}")
        place.rmdir()
    with pytest.raises(ObjectsUnavailable, match="is it mounted"):
        await objects.claim("um")
    with pytest.raises(ObjectsUnavailable, match="is it mounted"):
        await objects.check()
    with pytest.raises(ObjectsUnavailable, match="is it mounted"):
        await FolderObjects(place).claim("um", was_claimed=True)
    assert not place.exists()
    volume.rename(place)
    assert await objects.claim("um") == "um"
    assert await objects.check() == str(place)
    assert await get_result(objects, reference) == BODY


async def test_in_a_bucket_that_is_not_there_nothing_is_lost() -> None:
    """Its objects are all said to be missing."""
    objects = RemoteObjects(f"memory://{uuid4()}/prefix")
    with pytest.raises(ObjectsUnavailable, match="is not there, or has no object 'installation'"):
        await objects.get(make_reference(RUN, "a", BODY).key)
    await claimed_at(objects)
    with pytest.raises(ObjectLost, match="there is no"):
        await objects.get(make_reference(RUN, "a", BODY).key)


async def test_a_folder_is_one_place_however_it_is_written(tmp_path: Path) -> None:
    spellings = [tmp_path / "a", f"{tmp_path}/a/", f"{tmp_path}/b/../a", f"{tmp_path}/./a"]
    assert len({FolderObjects(one).shared_place for one in spellings}) == 1
    assert FolderObjects(tmp_path / "a", is_own=True).shared_place is None, "nobody else can have it"


async def test_the_claim_of_another_may_be_deleted_and_the_place_taken(tmp_path: Path) -> None:
    """As `claim_fault` advises."""
    await FolderObjects(tmp_path).claim("outra")
    objects = FolderObjects(tmp_path)
    assert await objects.claim("um") == "outra"
    (tmp_path / CLAIM).unlink()
    assert await objects.claim("um") == "um"


async def test_what_found_no_thread_is_not_done_later_and_held_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        with monkeypatch.context() as crowded:
            crowded.setattr(threading.Thread, "start", fail)
            with pytest.raises(ObjectsUnavailable, match="can't start new thread"):
                await in_thread(threads, done.append, "too late")
        await in_thread(threads, done.append, "in time")
    assert done == ["in time"]
