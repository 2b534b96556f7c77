"""Gets large results from the result store: for the aggregate, the API, or a command."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from math import inf
from typing import Any

import msgspec

from oraculo.core.aggregate import aggregate, encode_aggregate
from oraculo.core.phase import Looks
from oraculo.core.result_reference import ResultReference, encode_reference, read_reference, references_in
from oraculo.core.run import Run, Task
from oraculo.core.views import run_view
from oraculo.errors import NotFound, ObjectLost, ObjectsUnavailable
from oraculo.pipeline.definition import Step
from oraculo.ports.objects import Objects, get_result, put_result
from oraculo.ports.telemetry import LoopFailed, Telemetry
from oraculo.ports.threads import handed_over_if_wide
from oraculo.settings import Settings

PATIENCE = 10.0  # seconds for all the large results of one aggregate, or of one command
REST = 2.0  # seconds after a failure in which no command, and no aggregate after a slow one, asks again
_AGGREGATES_AT_ONCE = 8
_COMMANDS_AT_ONCE = 4
_LONGEST_REFERENCE = 400  # bytes
_NO_OBJECTS = "no object store is set; set ORACULO_OBJECTS_URL to the one that the result was put into"


class ResultReader:
    """The reader of large results."""

    def __init__(
        self,
        objects: Objects | None,
        claim_fault: Callable[[], Awaitable[str | None]],
        settings: Settings,
        telemetry: Telemetry,
        threads: Executor,
    ) -> None:
        self._objects = objects
        self._claim_fault = claim_fault
        self._telemetry = telemetry
        self._threads = threads
        self._inline_bytes = settings.objects.inline_bytes  # results beyond that stay references
        # Workers get references when they reach the result store. Those of bridged queues do not.
        self._hands_on = bool(settings.objects.url)
        self._bridged = settings.bullmq.queues
        self._aggregates = asyncio.Semaphore(_AGGREGATES_AT_ONCE)
        self._commands = asyncio.Semaphore(_COMMANDS_AT_ONCE)
        self._hangs_until = 0.0
        self._rests_until = 0.0
        self.trouble: str | None = None  # why references are handed out

    # -- aggregates -------------------------------------------------------------------------------------------

    def references(self, run: Run) -> dict[str, ResultReference]:
        """Return the large results that a run's aggregate lacks.

        Without an object store it returns nothing, and the references stay.
        """
        if self._objects is not None:
            return references_in(run)
        if self.trouble is None and references_in(run):  # another engine put them there; this is logged once
            self.trouble = f"large results are handed out as references: {_NO_OBJECTS}"
            self._telemetry.emit(LoopFailed("objects", self.trouble))
        return {}

    async def fill(self, results: dict[str, msgspec.Raw], references: Mapping[str, ResultReference]) -> None:
        """Replace references by results as far as they can be read. Never raise: an aggregate is useful without."""
        left, faults = dict(self._within_limit(references)), list[str]()
        try:
            async with asyncio.timeout(PATIENCE), self._aggregates:
                if self._hangs():
                    return
                async with asyncio.TaskGroup() as group:
                    for name, reference in left.items():
                        group.create_task(self._fill_one(results, name, reference, left, faults))
        except TimeoutError:
            faults += [f"not read in {PATIENCE:g} s"] * len(left)
            self._hangs_until = asyncio.get_running_loop().time() + REST
        if faults:
            report = f"{len(faults)} large results of an aggregate stay references: {faults[0]}"
            self._telemetry.emit(LoopFailed("objects", report))

    def _hangs(self) -> bool:
        return asyncio.get_running_loop().time() < self._hangs_until

    def _within_limit(self, references: Mapping[str, ResultReference]) -> Iterable[tuple[str, ResultReference]]:
        left = self._inline_bytes
        for name, reference in references.items():
            if reference.size <= left:
                left -= reference.size
                yield name, reference

    async def _fill_one(
        self,
        results: dict[str, msgspec.Raw],
        name: str,
        reference: ResultReference,
        left: dict[str, ResultReference],
        faults: list[str],
    ) -> None:
        try:
            results[name] = msgspec.Raw(await self._get(reference))
        except Exception as error:  # noqa: BLE001 - the reference stays, and the fault is logged
            faults.append(str(error) or type(error).__name__)
        del left[name]

    async def aggregate(self, run: Run) -> bytes:
        """Return the aggregate of a run, with its large results as far as they can be read."""
        references = self.references(run)
        if not references:
            return encode_aggregate(run)
        made = aggregate(run)
        await self.fill(made["resultados"], references)
        return msgspec.json.encode(made)

    async def lessened(self, run_id: str, encoded: bytes, excess: int | None) -> bytes | None:
        """Return an aggregate that fits a broker's limit: its largest results become references.

        They are as few as needed, or all when `excess` is not known. Return None when that is not enough, or without an
        object store. Raise ObjectsError.
        """
        if self._objects is None:
            return None
        if fault := await self._claim_fault():
            raise ObjectsUnavailable(fault)
        made = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
        results = msgspec.json.decode(made["resultados"], type=dict[str, msgspec.Raw])
        if (chosen := _largest(results, excess)) is None:
            return None
        for name in chosen:
            reference = await put_result(self._objects, run_id, name, bytes(results[name]), self._threads)
            results[name] = msgspec.Raw(encode_reference(reference))
        report = (
            f"{len(chosen)} results of a reply stay references: its broker takes no message of {len(encoded)} bytes"
        )
        self._telemetry.emit(LoopFailed("objects", report))
        made["resultados"] = msgspec.Raw(msgspec.json.encode(results))
        return msgspec.json.encode(made)

    async def view(self, run: Run, looks: Looks) -> dict[str, Any]:
        """Return the run as the API shows it. `looks` are at the queues of its open tasks."""
        view = await handed_over_if_wide(self._threads, len(run.tasks), partial(run_view, run, looks))
        if "resultados" in view and (references := self.references(run)):
            await self.fill(view["resultados"], references)
        return view

    async def one(self, run_id: str, task_id: str, task: Task | None) -> bytes:
        """Return one task's result of any size. Raise NotFound or ObjectsUnavailable."""
        result = None if task is None else task.result
        if result is None:
            why = "it is not one of its tasks" if task is None else f"it is {task.status}"
            raise NotFound(f"task '{task_id}' of run {run_id} has no result: {why}")
        reference = read_reference(run_id, result)
        if reference is None:
            return result
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._get(reference)
        except ObjectLost as error:
            raise NotFound(f"the result of task '{task_id}' is lost: {error}") from error
        except TimeoutError:
            raise ObjectsUnavailable(f"the result was not read in {PATIENCE:g} s") from None

    # -- commands ---------------------------------------------------------------------------------------------

    def needed(
        self, run: Run, number: int, known: dict[tuple[int, ...], dict[str, ResultReference]]
    ) -> dict[str, ResultReference]:
        """Return the large results to read before a task's command can go out.

        `known` keeps those of tasks that were looked at a moment ago.
        """
        if self._objects is None or self._is_given_references(run.plan.steps[number]):
            return {}
        sources = run.plan.dependencies[number]
        if (found := known.get(sources)) is None:
            found = known[sources] = references_in(run, sources)
        return found

    def _is_given_references(self, step: Step) -> bool:
        """Return whether the workers of a step follow references. Those behind a bridge do not."""
        return self._hands_on and step.bridge is None and step.queue not in self._bridged

    async def read(self, references: Mapping[str, ResultReference]) -> dict[str, bytes]:
        """Return the results that go whole into a task's command.

        Raise ObjectLost, or ObjectsUnavailable when another try may succeed.
        """
        loop = asyncio.get_running_loop()
        async with self._commands:
            if loop.time() < self._rests_until:
                raise ObjectsUnavailable("it failed a moment ago")
            try:
                async with asyncio.timeout(PATIENCE):
                    return {name: await self._get(reference) for name, reference in references.items()}
            except (ObjectsUnavailable, TimeoutError) as error:
                self._rests_until = loop.time() + REST
                reason = str(error) or f"not read in {PATIENCE:g} s"
                self._telemetry.emit(LoopFailed("objects", f"a command waits for the results that it needs: {reason}"))
                raise ObjectsUnavailable(reason) from error

    async def _get(self, reference: ResultReference) -> bytes:
        if self._objects is None:
            raise ObjectsUnavailable(_NO_OBJECTS)
        return await get_result(self._objects, reference, self._threads)


def _largest(results: Mapping[str, msgspec.Raw], excess: int | None) -> Sequence[str] | None:
    """Return the results without which an aggregate is `excess` bytes shorter; None when that is not enough.

    Return all results that make it shorter when `excess` is not known.
    """
    chosen: list[str] = []
    left = inf if excess is None else excess
    for name in sorted(results, key=lambda name: len(results[name]), reverse=True):
        gain = len(results[name]) - _LONGEST_REFERENCE
        if left <= 0 or gain <= 0:
            break
        chosen.append(name)
        left -= gain
    is_enough = bool(chosen) if excess is None else left <= 0
    return chosen if is_enough else None
