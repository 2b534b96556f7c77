"""Large results as files of a folder. A result survives a power cut once `put` has returned.

  installation                                       the installation that owns the folder
  <shard>/<hash of the run's id>/run                 the run's id
  <shard>/<hash of the run's id>/<task>-<hash>.json  a result

A file gets its name only when it is whole on the disk. A shared folder is used only while it contains its owner's name:
otherwise this may be the empty directory where the real one should be mounted.
"""

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from oraculo.core.result_reference import CLAIM, OWNER, is_run_folder
from oraculo.errors import ObjectLost, ObjectsUnavailable
from oraculo.ports.objects import RunFolder
from oraculo.stores.objects.threads import Threads

_ABANDONED = 3600.0  # seconds after which the rest of an interrupted deletion is removed


class FolderObjects:
    """A result store in a folder."""

    name = "folder"

    def __init__(self, root: str | Path, *, is_own: bool = False) -> None:
        """Use `root`. `is_own` means that its name belongs to one store's file, so nobody else uses it."""
        self._root = Path(root).absolute()
        self._is_own = is_own
        self._was_claimed = False  # this process saw the claim: without it, the folder is another one
        self._threads = Threads()

    @property
    def shared_place(self) -> str | None:
        return None if self._is_own else os.path.normpath(self._root)  # without touching the disk, which may hang

    async def put(self, run_id: str, key: str, body: bytes) -> None:
        await self._threads.call(self._put, run_id, self._root / key, body)

    async def get(self, key: str) -> bytes:
        return await self._threads.call(self._get, key)

    async def folders(self, shard: str) -> Sequence[RunFolder]:
        return await self._threads.call(self._folders, self._root / shard)

    async def owner(self, folder: str) -> str | None:
        return await self._threads.call(self._owner, self._root / folder / OWNER)

    async def delete(self, folder: str, written_before: float) -> bool:
        return await self._threads.call(self._delete, self._root / folder, written_before)

    async def claim(self, installation: str, *, was_claimed: bool = False) -> str:
        if self._is_own:
            return installation
        self._was_claimed |= was_claimed
        return await self._threads.call(self._claim, installation)

    async def check(self) -> str:
        return await self._threads.call(self._check)

    async def close(self) -> None:
        self._threads.close()

    # -- in a thread ------------------------------------------------------------------------------------------

    def _put(self, run_id: str, path: Path, body: bytes) -> None:
        with _translated(path.parent):
            self._must_be_there()
            for is_last_try in (False, True):
                try:
                    self._put_once(run_id, path, body)
                    return
                except FileNotFoundError:  # the folder of an ended run with the same id was just deleted
                    if is_last_try:
                        raise

    def _put_once(self, run_id: str, path: Path, body: bytes) -> None:
        folder = path.parent
        if not folder.is_dir():
            _make_folder(folder)
        owner = folder / OWNER
        if not owner.exists():
            _write(owner, run_id.encode(errors="surrogatepass"))
        if path.exists():  # the same content, by its hash; it counts as written now, for retention
            os.utime(folder)
            _sync_folder(folder)
            if not path.exists():  # it was just deleted, and another put has created the folder again
                raise FileNotFoundError(path)
        else:
            _write(path, body)

    def _get(self, key: str) -> bytes:
        with _translated(self._root):
            try:
                return (self._root / key).read_bytes()
            except FileNotFoundError:
                self._must_be_there()
                raise ObjectLost(
                    f"there is no {key} in {self._root}; was it put into another ORACULO_OBJECTS_URL?"
                ) from None

    def _folders(self, shard: Path) -> list[RunFolder]:
        found = []
        with _translated(shard), suppress(FileNotFoundError), os.scandir(shard) as entries:
            for entry in entries:
                if is_run_folder(f"{shard.name}/{entry.name}"):
                    found.append(RunFolder(f"{shard.name}/{entry.name}", entry.stat().st_mtime))
                elif entry.name.startswith(".") and entry.stat().st_ctime < time.time() - _ABANDONED:
                    shutil.rmtree(entry.path, ignore_errors=True)
        return found

    def _owner(self, path: Path) -> str | None:
        with _translated(path):
            try:
                return path.read_bytes().decode(errors="surrogatepass")
            except (FileNotFoundError, UnicodeDecodeError):
                return None

    def _claim(self, installation: str) -> str:
        path = self._root / CLAIM
        with _translated(self._root):
            if self._was_claimed:
                self._must_be_there()
            if not path.exists() or not path.stat().st_size:  # an empty file is no claim
                _make_folder(self._root)
                _write(path, installation.encode())
            found = path.read_bytes().decode(errors="replace")
            self._was_claimed |= found == installation  # another's claim may be deleted, as `claim_fault` advises
            return found

    def _must_be_there(self) -> None:
        if not self._is_own and not (self._root / CLAIM).exists():
            raise ObjectsUnavailable(
                f"{self._root} has no file '{CLAIM}', which the first engine that starts with it writes there; is it "
                "mounted, and the orchestrator's ORACULO_OBJECTS_URL? Only if it was emptied for good, make that file, "
                "empty"
            )

    def _delete(self, folder: Path, written_before: float) -> bool:
        """Delete a folder. It is moved away first, so that nobody puts something into it meanwhile."""
        with _translated(folder):
            try:
                if folder.stat().st_mtime >= written_before:
                    return False
                doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
                folder.rename(doomed)
            except FileNotFoundError:
                return False
            if doomed.stat().st_mtime >= written_before:  # something was just put there
                folder.mkdir(exist_ok=True)
                for file in doomed.iterdir():
                    file.replace(folder / file.name)
                doomed.rmdir()
                return False
            shutil.rmtree(doomed)
            return True

    def _check(self) -> str:
        """Return where results are kept. A missing folder is not created."""
        with _translated(self._root):
            if self._was_claimed:
                self._must_be_there()
            nearest = next(folder for folder in (self._root, *self._root.parents) if _is_there(folder))
            if not nearest.is_dir() or not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
                raise ObjectsUnavailable(f"{nearest} is not a folder that can be read and written")
            return str(self._root)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ObjectsUnavailable(f"{path}: {error.strerror or error}") from error


def _is_there(path: Path) -> bool:
    """Return True when the path exists. Unlike `Path.exists`, it raises on every Python when it cannot look."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _make_folder(folder: Path) -> None:
    """Create a folder and sync its parent, so that its name is on the disk."""
    missing = [folder, *(parent for parent in folder.parents if not parent.exists())]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        _sync_folder(made.parent)


def _write(path: Path, body: bytes) -> None:
    draft = path.with_name(f".{secrets.token_hex(8)}")
    try:
        with draft.open("xb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
