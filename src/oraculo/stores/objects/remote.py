"""Large results in anything that fsspec reaches: S3 and its like, Google, Azure, SFTP, …

The URL's query holds options of the file system: `s3://bucket/prefix?endpoint_url=http://minio:9000`. Each file
system's package finds the credentials in its own way.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

from oraculo.core.result_reference import CLAIM, OWNER, is_run_folder
from oraculo.errors import ObjectLost, ObjectsError, ObjectsUnavailable
from oraculo.ports.objects import RunFolder
from oraculo.settings.urls import redacted, without_secrets
from oraculo.stores.objects.threads import Threads

# A bucket is never created silently, and its folders are only parts of names.
_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "obs"})
_PATIENCE: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 10, "retries": {"max_attempts": 2}}}
}
_CHECKED_FOR = 30.0  # seconds for which a good check counts
# A folder written in the last hour is never deleted, so for that long the owner does not have to be put again.
_MARKED_FOR = 1800.0
_MOST_MARKED = 10_000
_CHECK = "oraculo-check"


class RemoteObjects:
    """A result store behind fsspec."""

    def __init__(self, url: str) -> None:
        """Read the URL. Raises ImportError when a package is missing, and ValueError when the URL is unknown."""
        from fsspec.core import url_to_fs  # imported here, because a folder needs no fsspec

        place, _, query = url.partition("?")
        self.name = place.partition(":")[0].lower()
        self.shared_place = place  # it may hold a password, so nothing shows it
        self._shown = redacted(place)
        self._url = url
        options = _PATIENCE.get(self.name, {}) | dict(parse_qsl(query))
        self._fs, root = url_to_fs(place, **options)
        self._root = str(root).rstrip("/")
        self._threads = Threads()
        self._lock = threading.Lock()
        self._marked: OrderedDict[str, float] = OrderedDict()  # folder -> when its owner was put
        self._checked_at: float | None = None

    async def put(self, run_id: str, key: str, body: bytes) -> None:
        await self._threads.call(self._put, run_id, key, body)

    async def get(self, key: str) -> bytes:
        return await self._threads.call(self._get, key)

    async def folders(self, shard: str) -> Sequence[RunFolder]:
        return await self._threads.call(self._folders, shard)

    async def owner(self, folder: str) -> str | None:
        try:
            return (await self.get(f"{folder}/{OWNER}")).decode(errors="surrogatepass")
        except (ObjectLost, UnicodeDecodeError):
            return None

    async def delete(self, folder: str, written_before: float) -> bool:
        return await self._threads.call(self._delete, folder, written_before)

    async def claim(self, installation: str, *, was_claimed: bool = False) -> str:
        """Return the owner. A bucket without one was emptied, and is claimed again.

        Unlike a folder, a bucket is never the empty directory of something that is not mounted.
        """
        try:
            return (await self.get(CLAIM)).decode(errors="replace")
        except ObjectLost:
            await self._threads.call(self._put_claim, installation)
        return (await self.get(CLAIM)).decode(errors="replace")  # another may have claimed it at the same time

    async def check(self) -> str:
        """Return where results are kept, once a small object was written and read."""
        if self._checked_at is None or time.monotonic() - self._checked_at > _CHECKED_FOR:
            await self._threads.call(self._prove)
            self._checked_at = time.monotonic()
        return self._shown

    async def close(self) -> None:
        self._threads.close()

    # -- in a thread ------------------------------------------------------------------------------------------

    def _put(self, run_id: str, key: str, body: bytes) -> None:
        folder = key.rpartition("/")[0]
        with self._translated():
            if not self._is_marked(folder):
                self._write(f"{folder}/{OWNER}", run_id.encode(errors="surrogatepass"))
                self._mark(folder)
            self._write(key, body)

    def _put_claim(self, installation: str) -> None:
        with self._translated():
            self._write(CLAIM, installation.encode())

    def _is_marked(self, folder: str) -> bool:
        with self._lock:
            marked_at = self._marked.get(folder)
        return marked_at is not None and time.monotonic() - marked_at < _MARKED_FOR

    def _mark(self, folder: str) -> None:
        with self._lock:
            self._marked.pop(folder, None)
            self._marked[folder] = time.monotonic()
            while len(self._marked) > _MOST_MARKED:
                self._marked.popitem(last=False)

    def _write(self, key: str, body: bytes) -> None:
        path = self._path(key)
        if self.name not in _BUCKETS:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, body)

    def _get(self, key: str) -> bytes:
        with self._translated():
            try:
                return bytes(self._fs.cat_file(self._path(key)))
            except FileNotFoundError:
                if key != CLAIM:
                    self._must_be_there()
                raise ObjectLost(
                    f"there is no {key} in {self._shown}; was it put into another ORACULO_OBJECTS_URL?"
                ) from None

    def _must_be_there(self) -> None:
        """Raise ObjectsUnavailable when the bucket is missing, because its objects would only seem to be missing."""
        try:
            self._fs.cat_file(self._path(CLAIM))
        except FileNotFoundError:
            raise ObjectsUnavailable(
                f"{self._shown} is not there, or has no object '{CLAIM}', which the first engine that starts "
                "with it writes there: is it the orchestrator's ORACULO_OBJECTS_URL?"
            ) from None

    def _folders(self, shard: str) -> list[RunFolder]:
        written: dict[str, float] = {}
        with self._translated():
            for path, moment in self._files(shard):
                name = f"{shard}/{path.split('/')[-2]}"
                written[name] = max(moment, written.get(name, 0.0))
        return [RunFolder(name, moment) for name, moment in written.items() if is_run_folder(name)]

    def _delete(self, folder: str, written_before: float) -> bool:
        with self._translated():
            files = list(self._files(folder))
            if not files or max(moment for _, moment in files) >= written_before:
                return False
            owner = self._path(f"{folder}/{OWNER}")
            results = [path for path, _ in files if path.rpartition("/")[2] != OWNER]
            if results:
                self._fs.rm(results)
            self._fs.rm(owner)  # last, because a folder that is not empty needs its owner
            if self.name not in _BUCKETS:
                with suppress(Exception):
                    self._fs.rmdir(self._path(folder))
            return True

    def _files(self, folder: str) -> list[tuple[str, float]]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        return [(path, self._written_at(path, info)) for path, info in found.items()]

    def _written_at(self, path: str, info: dict[str, Any]) -> float:
        """Return the time of the last change. Each file system names it differently."""
        for name in ("LastModified", "last_modified", "mtime", "created", "updated"):
            if (moment := _seconds(info.get(name))) is not None:
                return moment
        moment = _seconds(self._fs.modified(path))
        if moment is None:
            raise ObjectsError(f"{self.name} does not say when {without_secrets(path, self._url)} was written")
        return moment

    def _prove(self) -> None:
        with self._translated():
            self._write(_CHECK, b"{}")
            if bytes(self._fs.cat_file(self._path(_CHECK))) != b"{}":
                raise ObjectsUnavailable(f"{self._shown} does not give back what was put")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the errors of any package as ObjectsUnavailable. Missing objects are handled before."""
        try:
            yield
        except ObjectsError:
            raise
        except Exception as error:
            reason = without_secrets(str(error), self._url)
            raise ObjectsUnavailable(f"{self._shown}: {type(error).__name__}: {reason}") from error


def _seconds(moment: object) -> float | None:
    if isinstance(moment, str):
        with suppress(ValueError):
            moment = datetime.fromisoformat(moment)
    if isinstance(moment, datetime):
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return float(moment) if isinstance(moment, int | float) else None
