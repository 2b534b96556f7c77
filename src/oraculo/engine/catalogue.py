"""The pipelines and routes that a request may name: built in, from a folder, or put by users."""

import asyncio
import errno
import importlib.resources
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import lru_cache, partial
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from oraculo.core import naming
from oraculo.core.bridge import queue_of
from oraculo.core.pipeline import Definition, decode_definition, encode_definition
from oraculo.core.pipeline_text import MAX_TEXT, expect_length, read_pipeline
from oraculo.core.retry import RetryPolicy
from oraculo.errors import Conflict, Fault, InvalidPipeline, NotFound, StoreUnavailable, WrittenByNewer
from oraculo.ports.clock import Clock
from oraculo.ports.store import Store
from oraculo.ports.telemetry import LoopFailed, Telemetry
from oraculo.ports.threads import handed_over

_PATIENCE = 30.0  # seconds for those before: while the store is frozen each takes as long as it may
_SUFFIXES = frozenset({".yaml", ".yml", ".json"})

_Stored = tuple[bytes, Definition]  # as the store has it, and what that says
_Mark = tuple[int, int] | str  # when a file was changed last, and its size; or why it cannot be read


class Origin(StrEnum):
    BUILT_IN = "embutido"
    FOLDER = "pasta"
    STORED = "api"


class Catalogue:
    """What a user put wins over the folder, and the folder over what is built in."""

    def __init__(
        self,
        routes: Mapping[str, Sequence[str]],
        folder: str,
        default_retry: RetryPolicy,
        default_timeout: float,
        threads: Executor | None = None,
        telemetry: Telemetry | None = None,
        reader: Executor | None = None,
    ) -> None:
        self.routes = routes
        self._threads = threads
        self._reader = reader
        self._telemetry = telemetry
        self._folder = Path(folder) if folder else None
        self._default_retry = default_retry
        self._default_timeout = default_timeout
        self._layers: dict[Origin, Mapping[str, Definition]] = {origin: {} for origin in Origin}
        self._merged: dict[str, Definition] = {}
        self._stored: Mapping[str, _Stored] = {}  # those that users put and that can be read
        self._unreadable: dict[str, WrittenByNewer] = {}  # what users put through a newer version, and why
        self._seen: dict[Path, _Mark] = {}
        self._read: dict[Path, tuple[_Mark, Definition]] = {}  # the files that could be read
        self._mark = ""
        self._turn = asyncio.Lock()  # of whoever changes what users put, or reads it: what was read before is older

    @property
    def pipelines(self) -> Mapping[str, Definition]:
        return self._merged

    def destinations(self) -> set[str]:
        """The queues that known pipelines and routes send to."""
        steps = {step.queue for definition in self._merged.values() for step in definition.steps}
        return steps | {queue for route in self.routes.values() for queue in map(queue_of, route)}

    def origin(self, name: str) -> Origin:
        return next(origin for origin in reversed(Origin) if name in self._layers[origin])

    def expect_readable(self, name: str) -> None:
        """Raises WrittenByNewer, also where it has replaced one that could be read: that is not what was put."""
        if (error := self._unreadable.get(name)) is not None:
            raise error.with_traceback(None)  # it is raised again and again, and would remember each time

    def get(self, name: str) -> Definition:
        """Raises NotFound or WrittenByNewer."""
        self.expect_readable(name)
        if name not in self._merged:
            raise NotFound(f"there is no pipeline {naming.shown(name)}{naming.nearest(name, self._merged)}")
        return self._merged[name]

    async def load(self, store: Store) -> None:
        """Raises InvalidPipeline, naming the file, when the folder holds a bad one."""
        self._layers[Origin.BUILT_IN] = built_in_pipelines(self._default_retry, self._default_timeout)
        self.refresh_folder()
        await self.refresh_stored(store)
        self._merge()  # also where users put none

    async def refresh_stored(self, store: Store) -> bool:
        """Reads what users put again when somebody put or deleted one, through this process or another."""
        async with self._in_turn():
            return await self._refresh_stored(store)

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Raises StoreUnavailable."""
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._turn.acquire()
        except TimeoutError:
            raise StoreUnavailable("others have waited for it all the while to tell of pipelines") from None
        try:
            yield
        finally:
            self._turn.release()

    async def _refresh_stored(self, store: Store) -> bool:
        if (mark := await store.pipelines_mark()) == self._mark:
            return False
        await self._read_stored(await store.pipelines())
        self._mark = mark
        return True

    async def _read_stored(self, bodies: Mapping[str, bytes]) -> None:
        """Only those that changed: all of them, for each that is put, would keep the engine from its work."""
        readable: dict[str, _Stored] = {}
        unreadable: dict[str, WrittenByNewer] = {}
        for name, body in bodies.items():
            if name in self._stored and self._stored[name][0] == body:
                readable[name] = self._stored[name]
                continue
            try:
                readable[name] = body, decode_definition(body)
            except WrittenByNewer as error:
                unreadable[name] = error
                if name not in self._unreadable and self._telemetry is not None:
                    self._telemetry.emit(LoopFailed("pipelines", f"'{name}' cannot be used here: {error}"))
            await asyncio.sleep(0)  # many may be new; a thread would not help: the decoder lets no other run
        self._unreadable = unreadable
        self._take_stored(readable)

    def _take_stored(self, stored: Mapping[str, _Stored]) -> None:
        self._stored = stored
        self._layers[Origin.STORED] = {name: definition for name, (_, definition) in stored.items()}
        self._merge()

    def refresh_folder(self) -> bool:
        """Reads what changed in the folder. Raises InvalidPipeline and keeps what was good before."""
        return self._take_folder(self._read_folder())

    async def refresh_folder_aside(self) -> bool:
        """The same, while the engine goes on: thousands of files take a while to be looked at, and seconds to read."""
        if self._folder is None:
            return False
        found = await handed_over(self._threads, self._read_folder)
        return self._take_folder(found)

    def _take_folder(self, found: Mapping[str, Definition] | None) -> bool:
        if found is None:
            return False
        self._layers[Origin.FOLDER] = found
        self._merge()
        return True

    async def put(self, name: str, text: bytes, store: Store, clock: Clock) -> tuple[Definition, bool]:
        """The definition, and whether its name is new. Raises InvalidPipeline with step and fault."""
        # A large text takes seconds to read, and the engine has other things to do, for which it needs its threads.
        read = partial(
            read_pipeline,
            text,
            name=name,
            default_retry=self._default_retry,
            default_timeout=self._default_timeout,
        )
        definition = await handed_over(self._reader, read)
        async with self._in_turn():
            await self._refresh_stored(store)  # another engine may have put or deleted it a moment ago
            is_new = name not in self._merged and name not in self._unreadable
            body = encode_definition(definition)
            await store.put_pipeline(name, body, clock.now())
            self._unreadable.pop(name, None)
            self._take_stored({**self._stored, name: (body, definition)})
        return definition, is_new

    async def delete(self, name: str, store: Store) -> None:
        """Raises NotFound, also when another engine was faster, or Conflict."""
        async with self._in_turn():
            await self._refresh_stored(store)
            if name not in self._unreadable:
                self.get(name)
            was_stored = await store.delete_pipeline(name)
            self._unreadable.pop(name, None)
            self._take_stored({other: found for other, found in self._stored.items() if other != name})
        if not was_stored:
            self.get(name)
            where = "built in" if self.origin(name) is Origin.BUILT_IN else "a file of the pipelines folder"
            raise Conflict(
                f"pipeline '{name}' is {where} and cannot be deleted here; PUT one of that name to replace it"
            )

    def _merge(self) -> None:
        merged = {name: found for origin in Origin for name, found in self._layers[origin].items()}
        self._merged = {name: found for name, found in merged.items() if name not in self._unreadable}

    def _mark_of(self, path: Path) -> _Mark:
        """One that could not be read is tried again: when it can be, its time and size may be the same."""
        try:
            if isinstance(self._seen.get(path), str):
                expect_regular(path)
                _read_bounded(path)
            stat = path.stat()
        except OSError as error:
            return str(error.strerror)
        return stat.st_mtime_ns, stat.st_size

    def _read_folder(self) -> dict[str, Definition] | None:
        """All that is in it; None when nothing changed."""
        if self._folder is None:
            return None
        signature = {path: self._mark_of(path) for path in pipeline_files(self._folder)}
        if signature == self._seen:
            return None
        self._seen = signature
        self._read = {path: read for path, read in self._read.items() if read[0] == signature.get(path)}
        found: dict[str, Definition] = {}
        for path, mark in signature.items():
            if path not in self._read:
                self._read[path] = mark, self._read_file(path)
            definition = self._read[path][1]
            if definition.name in found:
                raise InvalidPipeline(Fault(str(path), f"the name '{definition.name}' is another file's already"))
            found[definition.name] = definition
        return found

    def _read_file(self, path: Path) -> Definition:
        try:
            expect_regular(path)
            return read_pipeline_file(path, self._default_retry, self._default_timeout)
        except OSError as error:
            self._seen[path] = why = str(error.strerror)
            raise InvalidPipeline(Fault(str(path), f"cannot be read: {why}")) from None


def pipeline_files(folder: Path) -> list[Path]:
    """Without hidden ones, which editors keep beside a file that is worked on. Raises InvalidPipeline."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.name[0] != ".")
    except OSError as error:
        raise InvalidPipeline(Fault(str(folder), f"the pipelines folder cannot be read: {error.strerror}")) from None


def expect_regular(path: Path) -> None:
    """For what is found in a folder: to open a FIFO is to wait for its writer, which may never come. Raises OSError."""
    mode = path.stat().st_mode
    if not S_ISREG(mode) and not S_ISDIR(mode):  # to open a directory fails by itself
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def pipeline_bytes(path: Path) -> bytes:
    """Also of a FIFO, as `<(...)` of a shell is one. Raises OSError, and InvalidPipeline when it is too long."""
    expect_length(path.stat().st_size)
    return _read_bounded(path)


def _read_bounded(path: Path) -> bytes:
    """No more than shows that it is too long: a device has no end."""
    with path.open("rb") as file:
        return file.read(MAX_TEXT + 1)


def read_pipeline_file(path: Path, default_retry: RetryPolicy, default_timeout: float) -> Definition:
    """Raises OSError, and InvalidPipeline, naming the file."""
    try:
        return read_pipeline(pipeline_bytes(path), default_retry=default_retry, default_timeout=default_timeout)
    except InvalidPipeline as error:
        faults = [
            Fault(f"{path.name}: {fault.field}" if fault.field else path.name, fault.problem) for fault in error.faults
        ]
        raise InvalidPipeline(faults) from None


@lru_cache(maxsize=8)
def built_in_pipelines(default_retry: RetryPolicy, default_timeout: float) -> Mapping[str, Definition]:
    """Read once: they are in the package and do not change."""
    folder = importlib.resources.files("oraculo") / "pipelines"
    texts = [entry.read_bytes() for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    definitions = [read_pipeline(text, default_retry=default_retry, default_timeout=default_timeout) for text in texts]
    return {definition.name: definition for definition in sorted(definitions, key=lambda found: found.name)}
