"""The consequences of a commit: commands go out, timers are set, aggregates are delivered, watchers wake up."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from oraculo.core.aggregate import aggregate, encode_aggregate
from oraculo.core.events import Event, Sent
from oraculo.core.result_reference import ResultReference
from oraculo.core.run import Changes, RunHead
from oraculo.engine.deliver.deliveries import Deliveries
from oraculo.engine.results.get import ResultReader
from oraculo.engine.send.outbox import Outbox
from oraculo.engine.timers import Timers
from oraculo.engine.watchers import Watchers
from oraculo.ports.telemetry import HistoryAdded, LoopFailed, RunFinished, Telemetry

# Aggregates whose large results are being read. Others are left to their delivery timers and to the lookout.
MAX_READING = 200
_AT_ONCE = 4


class AfterCommit:
    """The parts that act on a commit, called in their order."""

    def __init__(
        self,
        outbox: Outbox,
        timers: Timers,
        courier: Deliveries,
        watchers: Watchers,
        results: ResultReader,
        telemetry: Telemetry,
    ) -> None:
        self._outbox = outbox
        self._timers = timers
        self._deliveries = courier
        self._watchers = watchers
        self._results = results
        self._telemetry = telemetry
        self._reading: dict[str, _Reading] = {}
        self._turns = asyncio.Semaphore(_AT_ONCE)  # results stay in memory until they are handed out

    def committed(self, changes: Changes) -> None:
        """Act on a committed change."""
        self._outbox.send(changes)
        if not changes.dirty:
            return
        self._timers.expect(changes)
        if changes.history:
            run = changes.run
            added = HistoryAdded(run.id, run.head.name, changes.history, run.plan.steps, run.tasks)
            self._telemetry.emit(added)
        if self._reading:
            self._give_up_outdated(changes)
        if changes.ended or changes.deliver:
            self._ended(changes)
        self._watchers.changed(changes.run.id)

    def noted(self, run_id: str, event: Event) -> None:
        """Act on a committed note."""
        if isinstance(event, Sent):
            self._outbox.noted(run_id, event)

    def _ended(self, changes: Changes) -> None:
        run = changes.run
        # The aggregate of a wide run is large, so it is made only when somebody takes it.
        if run.id in self._watchers or changes.deliver:
            if references := self._results.references(run):
                self._read_and_hand_out(changes, references)
            else:
                self._hand_out(run.head, encode_aggregate(run), changes.deliver, changes.ended)
        if changes.ended:
            self._report_end(changes)

    def _hand_out(self, head: RunHead, encoded: bytes, deliver: Sequence[int], ended: bool) -> None:
        self._deliveries.deliver(head, encoded, deliver)
        if ended:
            self._watchers.ended(head.id, encoded)

    # -- large results ----------------------------------------------------------------------------------------

    def _read_and_hand_out(self, changes: Changes, references: dict[str, ResultReference]) -> None:
        """Read large results, and hand out the aggregate as it was at this commit.

        The run goes on changing meanwhile, so everything is copied now.
        """
        run_id = changes.run.id
        if (reading := self._reading.get(run_id)) is not None:  # its delivery timer rang meanwhile
            reading.renew(changes)
        elif len(self._reading) < MAX_READING:
            reading = self._reading[run_id] = _Reading(changes)
            reading.task = asyncio.create_task(self._read(reading, references), name="large results")
            reading.task.add_done_callback(partial(self._has_read, run_id, reading))

    async def _read(self, reading: "_Reading", references: dict[str, ResultReference]) -> None:
        async with self._turns:
            await self._results.fill(reading.made["resultados"], references)
            self._hand_out(reading.head, msgspec.json.encode(reading.made), sorted(reading.deliver), reading.ended)

    def _give_up_outdated(self, changes: Changes) -> None:
        """Give up an aggregate that is being put together when its run is reopened or amended."""
        run = changes.run
        if run.id in self._reading and (changes.ended or run.is_open):
            self._reading.pop(run.id).cancel()

    def _has_read(self, run_id: str, reading: "_Reading", task: "asyncio.Task[None]") -> None:
        if self._reading.get(run_id) is reading:
            del self._reading[run_id]
        if not task.cancelled() and (error := task.exception()) is not None:  # its timer brings it back
            self._telemetry.emit(LoopFailed("large results", f"{type(error).__name__}: {error}"))

    async def handed_out(self) -> None:
        """Return when no aggregate waits for large results."""
        while self._reading:
            await asyncio.wait([reading.task for reading in self._reading.values() if reading.task])

    async def abandon(self) -> None:
        """Stop reading large results; the delivery timers bring the aggregates back."""
        for reading in self._reading.values():
            reading.cancel()
        await self.handed_out()

    def _report_end(self, changes: Changes) -> None:
        head = changes.run.head
        seconds = max(0.0, (head.ended_at or head.created_at) - head.created_at)  # the clock may have been set back
        self._telemetry.emit(RunFinished(head.id, head.name, head.status, head.edition, head.total, seconds))


class _Reading:
    """An aggregate that waits for large results, and its deliveries as they were committed."""

    __slots__ = ("deliver", "ended", "head", "made", "task")

    def __init__(self, changes: Changes) -> None:
        self.made: dict[str, Any] = aggregate(changes.run)
        self.head = msgspec.structs.replace(changes.run.head)
        self.deliver: set[int] = set()
        self.ended = changes.ended
        self.task: asyncio.Task[None] | None = None
        self.renew(changes)

    def renew(self, changes: Changes) -> None:
        """Take the latest leases of the deliveries, because none is attempted under an older one."""
        self.head.deliveries = [msgspec.structs.replace(one) for one in changes.run.head.deliveries]
        self.deliver.update(changes.deliver)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
