"""The pipelines and routes that a request may name, and their queues at the brokers."""

import asyncio
import importlib.resources
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import lru_cache, partial
from pathlib import Path

from oraculo.engine.pipeline_folder import BadFile, FolderContents, PipelineFolder
from oraculo.engine.queues.known import KnownQueues
from oraculo.errors import (
    BrokerError,
    BrokerUnavailable,
    Conflict,
    Fault,
    NotFound,
    QueueUnavailable,
    StoreUnavailable,
    UnknownPipeline,
    WrittenByNewer,
)
from oraculo.pipeline.bridges import queue_of
from oraculo.pipeline.definition import Definition, decode_definition, encode_definition
from oraculo.pipeline.queue_rules import QueueRules
from oraculo.pipeline.retry import RetryPolicy
from oraculo.pipeline.text import read_pipeline
from oraculo.ports.broker import Broker
from oraculo.ports.clock import Clock
from oraculo.ports.registry import Registry
from oraculo.ports.telemetry import LoopFailed, PipelineFileMended, PipelineFileRejected, Silent, Telemetry
from oraculo.ports.threads import handed_over
from oraculo.settings import Settings
from oraculo.wire import naming
from oraculo.wire.naming import QueueNames

_PATIENCE = 30.0  # seconds to wait for a turn, each of which a frozen store may hold up

_Stored = tuple[bytes, Definition]  # the bytes in the store, and the definition in them


class Origin(StrEnum):
    """The place that a pipeline comes from."""

    BUILT_IN = "embutido"
    FOLDER = "pasta"
    STORED = "api"


class PipelineCatalogue:
    """The pipelines: built in, of the folder, or put by users.

    A pipeline of a user replaces one of the folder with its name, and that one a built-in one.
    """

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry | None = None,
        threads: Executor | None = None,
        reader: Executor | None = None,
    ) -> None:
        self._limits = settings.limits
        self.rules = QueueRules(settings.queues.allow, settings.bridges_allow)
        self.routes = settings.routes
        self._telemetry = telemetry or Silent()
        self._threads = threads
        self._reader = reader
        self._default_retry, self._default_timeout = settings.runs.retry, settings.runs.timeout
        self._folder: PipelineFolder | None = None
        if settings.pipelines:
            folder = Path(settings.pipelines)
            self._folder = PipelineFolder(folder, self._default_retry, self._default_timeout, self.rules)
        self.bad_files: tuple[BadFile, ...] = ()
        self._layers: dict[Origin, dict[str, Definition]] = {origin: {} for origin in Origin}
        self._merged: dict[str, Definition] = {}
        self._stored: Mapping[str, _Stored] = {}  # the readable pipelines of users
        self._unreadable: dict[str, WrittenByNewer] = {}  # pipelines that a newer version put
        self._mark = ""
        self._turn = asyncio.Lock()  # held to change stored pipelines or to read them

    @property
    def pipelines(self) -> Mapping[str, Definition]:
        return self._merged

    def destinations(self) -> set[str]:
        """Return the queues that known pipelines and routes send to, and may."""
        steps = {step.queue for definition in self._merged.values() for step in definition.steps}
        named = steps | {queue for route in self.routes.values() for queue in map(queue_of, route)}
        return {queue for queue in named if naming.is_own_queue(queue) or self.rules.fault(queue) is None}

    def origin(self, name: str) -> Origin:
        return next(origin for origin in reversed(Origin) if name in self._layers[origin])

    def expect_usable(self, name: str) -> None:
        """Raise WrittenByNewer for a pipeline that a newer version put, even if it replaced a readable one.

        Raise UnknownPipeline when a bad file of the folder would define it.
        """
        if (error := self._unreadable.get(name)) is not None:
            raise error.with_traceback(None)  # one object is raised many times, and its traceback would grow
        if name not in self._merged and (bad := self._bad_file(name)) is not None:
            raise UnknownPipeline(Fault("pipeline", f"{naming.shown(name)} cannot be started: {bad}"))

    def _bad_file(self, name: str) -> BadFile | None:
        return next((bad for bad in self.bad_files if bad.pipeline == name), None)

    def health(self) -> dict[str, str | None]:
        """Return the pipeline files that are not used and why, if there are any."""
        return {"pipelines": "; ".join(map(str, self.bad_files))} if self.bad_files else {}

    def get(self, name: str) -> Definition:
        """Return a pipeline. Raise NotFound or WrittenByNewer."""
        try:
            self.expect_usable(name)
        except UnknownPipeline as error:
            raise NotFound(f"there is no pipeline {naming.shown(name)}: {self._bad_file(name)}") from error
        if name not in self._merged:
            raise NotFound(f"there is no pipeline {naming.shown(name)}{naming.nearest(name, self._merged)}")
        return self._merged[name]

    async def load(self, store: Registry) -> None:
        """Load all pipelines at a start. Raise InvalidPipeline when the folder cannot be read."""
        self._layers[Origin.BUILT_IN] = dict(built_in_pipelines(self._default_retry, self._default_timeout))
        self.read_folder()
        await self.refresh_stored(store)
        self._merge()  # users may have put none

    async def refresh_stored(self, store: Registry) -> bool:
        """Read the pipelines of users again if this process or another changed one.

        Return whether they were read.
        """
        async with self._in_turn():
            return await self._refresh_stored(store)

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Wait for the turn to change stored pipelines. Raise StoreUnavailable when it takes too long."""
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._turn.acquire()
        except TimeoutError:
            raise StoreUnavailable("other requests about pipelines have waited for it all the while") from None
        try:
            yield
        finally:
            self._turn.release()

    async def _refresh_stored(self, store: Registry) -> bool:
        if (mark := await store.pipelines_mark()) == self._mark:
            return False
        await self._read_stored(await store.pipelines())
        self._mark = mark
        return True

    async def _read_stored(self, bodies: Mapping[str, bytes]) -> None:
        """Decode only the pipelines that changed, because decoding all each time would block the engine."""
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
                if name not in self._unreadable:
                    self._telemetry.emit(LoopFailed("pipelines", f"'{name}' cannot be used here: {error}"))
            await asyncio.sleep(0)  # many may be new, and the decoder would block other threads too
        self._unreadable = unreadable
        self._take_stored(readable)

    def _take_stored(self, stored: Mapping[str, _Stored]) -> None:
        self._stored = stored
        self._layers[Origin.STORED] = {name: definition for name, (_, definition) in stored.items()}
        self._merge()

    def read_folder(self) -> None:
        """Read the folder. Raise InvalidPipeline when the first look cannot read the folder itself."""
        if self._folder is not None and (contents := self._folder.look()) is not None:
            self._take_folder(contents)

    async def refresh_folder(self) -> None:
        """Read what changed in the folder, in a thread, because a look at thousands of files takes a while."""
        if self._folder is not None and (contents := await handed_over(self._threads, self._folder.look)) is not None:
            self._take_folder(contents)

    def _take_folder(self, contents: FolderContents) -> None:
        before, self.bad_files = self.bad_files, contents.bad
        self._layers[Origin.FOLDER] = dict(contents.definitions)
        self._merge()
        for bad in contents.bad:
            if bad not in before:
                self._telemetry.emit(PipelineFileRejected(bad.file, bad.pipeline, bad.reason, bad.in_use))
        for file in {bad.file for bad in before} - {bad.file for bad in contents.bad}:
            self._telemetry.emit(PipelineFileMended(file))

    async def put(
        self, name: str, text: bytes, store: Registry, clock: Clock, admit: Callable[[Definition], Awaitable[None]]
    ) -> tuple[Definition, bool]:
        """Store a pipeline. Return its definition, and whether its name is new.

        Raise InvalidPipeline with step and fault, Conflict, or what `admit` raises.
        """
        definition = await self.read(name, text)
        await admit(definition)
        async with self._in_turn():
            await self._refresh_stored(store)  # another engine may have just put or deleted it
            is_new = name not in self._merged and name not in self._unreadable
            body = encode_definition(definition)
            self._expect_room(name, body)
            await store.put_pipeline(name, body, clock.now())
            self._unreadable.pop(name, None)
            self._take_stored({**self._stored, name: (body, definition)})
        return definition, is_new

    async def read(self, name: str, text: bytes) -> Definition:
        """Return what a text defines. Raise InvalidPipeline with step and fault."""
        # A large text takes seconds to read, so it has a thread of its own.
        read = partial(
            read_pipeline,
            text,
            name=name,
            default_retry=self._default_retry,
            default_timeout=self._default_timeout,
            queue_fault=self.rules.step_fault,
        )
        return await handed_over(self._reader, read)

    def _expect_room(self, name: str, body: bytes) -> None:
        """Raise Conflict when this pipeline would be too many, or too large: each is kept in memory."""
        others = [text for other, (text, _) in self._stored.items() if other != name]
        others += [b""] * len(self._unreadable.keys() - {name})
        size, limits = sum(map(len, others)) + len(body), self._limits
        is_new = name not in self._stored and name not in self._unreadable
        if is_new and len(others) >= limits.pipelines:
            raise Conflict(f"{len(others)} pipelines are stored; ORACULO_LIMITS_PIPELINES allows no more: delete one")
        if size > limits.pipelines_bytes:
            most = f"ORACULO_LIMITS_PIPELINES_BYTES allows {limits.pipelines_bytes}"
            raise Conflict(f"with this one the stored pipelines would have {size} bytes; {most}: delete one")

    async def delete(self, name: str, store: Registry) -> None:
        """Delete a pipeline. Raise Conflict, or NotFound, also when another engine was faster."""
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
        merged = dict(self._layers[Origin.BUILT_IN])
        for bad in self.bad_files:  # its author does not want to run what it would replace
            merged.pop(bad.pipeline, None)
        merged |= self._layers[Origin.FOLDER] | self._layers[Origin.STORED]
        self._merged = {name: found for name, found in merged.items() if name not in self._unreadable}


class PipelineQueues:
    """The queues that known pipelines and routes send to, as the brokers have them.

    They exist before anything is sent, so that a worker that starts before the first command finds its queue.
    """

    def __init__(
        self, broker: Broker, catalogue: PipelineCatalogue, names: QueueNames, telemetry: Telemetry, known: KnownQueues
    ) -> None:
        self._broker = broker
        self._known = known
        self._catalogue = catalogue
        self._names = names
        self._telemetry = telemetry
        self._declared: set[str] = set()
        self._working: set[str] = set()  # brokers that have those queues

    async def declare_all(self) -> None:
        """Declare all queues at a start, with those that engines consume.

        Raise BrokerError when an engine's own queue is refused. A refused queue of a pipeline stops no start.
        """
        self._working = self._working_brokers()
        await self._broker.declare([self._names.requests, self._names.answers])
        await self._declare_or_skip(self._catalogue.destinations(), must_be_reached=True)

    async def declare(self, queues: Collection[str]) -> None:
        """Declare queues, also those that were declared before, because somebody may have deleted one."""
        physical = sorted(map(self._names.physical, queues))
        await self._broker.declare(physical)
        self._known.add(physical)
        self._declared |= set(queues)

    async def declare_missing(self) -> None:
        """Declare queues that are new, or that a broker did not make before.

        Declare all of them when a broker works again, because it may be another one now.
        """
        working, known = self._working_brokers(), self._catalogue.destinations()
        self._declared = set() if working - self._working else self._declared & known
        self._working = working
        if missing := known - self._declared:
            await self._declare_or_skip(missing)

    async def _declare_or_skip(self, queues: Collection[str], *, must_be_reached: bool = False) -> None:
        try:
            await self.declare(queues)
        except QueueUnavailable:
            pass  # the next look tries again
        except BrokerUnavailable:
            if must_be_reached:
                raise
        except BrokerError:
            await self._declare_singly(queues)

    async def _declare_singly(self, queues: Collection[str]) -> None:
        """Declare each queue alone, so that a refused one stops no other.

        A refused queue is not declared at every look: publishing to it declares it too.
        """
        for queue in sorted(queues):
            try:
                await self.declare([queue])
            except QueueUnavailable:
                pass  # the next look tries again
            except BrokerUnavailable:
                return
            except BrokerError as error:
                self._declared.add(queue)
                self._telemetry.emit(LoopFailed("pipelines", f"the queue '{queue}' is refused: {error}"))

    def declare_again(self) -> None:
        """Declare all queues at the next look, because a broker lost its memory."""
        self._declared = set()

    def _working_brokers(self) -> set[str]:
        return {broker.name for broker in self._broker.statuses() if broker.trouble is None}


@lru_cache(maxsize=8)
def built_in_pipelines(default_retry: RetryPolicy, default_timeout: float) -> Mapping[str, Definition]:
    """Return the pipelines of the package, which are read once."""
    folder = importlib.resources.files("oraculo") / "pipelines"
    texts = [entry.read_bytes() for entry in folder.iterdir() if entry.name.endswith(".yaml")]
    definitions = [read_pipeline(text, default_retry=default_retry, default_timeout=default_timeout) for text in texts]
    return {definition.name: definition for definition in sorted(definitions, key=lambda found: found.name)}
