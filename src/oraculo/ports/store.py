"""The durable state of runs.

Atomic for each run: its head, tasks and history are written together or not at all. Every call may raise
StoreUnavailable (cannot be reached now: try again), which is StoreRefuses when it says so itself and what was asked has
no part in it, or StoreError (refused).
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from oraculo.core.run import Changes, RunHead, Task
from oraculo.ports.browse import Browse
from oraculo.ports.registry import Registry


class Creation(msgspec.Struct):
    """A new run with its first changes. `fingerprint` tells whether a second request asks for the same thing."""

    changes: Changes
    fingerprint: str
    idempotency_key: str | None = None


class CreationOutcome(StrEnum):
    CREATED = "created"
    SAME = "same"  # the id or the idempotency key is there already, with the same fingerprint
    ID_IN_USE = "id_in_use"  # the id is there already, with another fingerprint
    KEY_REUSED = "key_reused"  # the idempotency key is there already, with another fingerprint


class Created(msgspec.Struct, frozen=True):
    outcome: CreationOutcome
    run_id: str  # of the run that is there now: the new one, or the one that was there before


class Committed(msgspec.Struct, frozen=True):
    created: Sequence[Created]  # one for each creation, in their order
    conflicts: frozenset[str]  # runs whose version was not the expected one: nothing of theirs was written


class Snapshot(msgspec.Struct):
    """A run as it was committed. `definition` and `payload` are the bytes that were created with it."""

    head: RunHead
    definition: bytes
    payload: bytes
    tasks: list[Task]


class Due(msgspec.Struct, frozen=True, gc=False):
    """A timer that rang. `task` is None for the run's own."""

    run_id: str
    task: int | None = None


class Unsent(msgspec.Struct, frozen=True, gc=False):
    """A command, or the dead letter of a failed task, that was committed and is not noted as sent."""

    run_id: str
    task: int
    attempt: int


class Store(Protocol):
    """Runs as the engine decides them: created, loaded, committed, and found when something is due."""

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        """Writes everything at once, durably, and returns when it is safe.

        A run's changes are written only where the stored version is `changes.based_on`; then the stored version, and
        `changes.run.head.version`, become one more. A creation is written whole at version 1. The caller gives at
        most one Changes for a run in one call.
        """
        ...

    async def created_with(self, idempotency_key: str, fingerprint: str) -> str | None:
        """The id of the run that was created with both; None: there is none."""
        ...

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        """The runs that exist, by id."""
        ...

    async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        """The heads of the runs that exist, by id: cheap, whatever their width."""
        ...

    async def task(self, run_id: str, number: int) -> Task | None:
        """One task of a run, as cheap as it is itself, whatever the run's width. None: there is no such."""
        ...

    async def unchanged(self, copies: Sequence[RunHead]) -> frozenset[str]:
        """Of these runs, by id, those that nobody has changed since the copy was read or written. As cheap as heads."""
        ...

    async def due(self, now: float, limit: int) -> Sequence[Due]:
        """Timers at or before `now`, the oldest first. They stay until a commit moves or clears them."""
        ...

    async def next_due(self) -> float | None:
        """When the next timer rings; None when there is none."""
        ...

    async def unsent(self, limit: int, after: tuple[str, int] | None = None) -> Sequence[Unsent]:
        """Commands of open tasks, and dead letters of failed ones, that are not noted as sent: in a stable order,
        starting behind (run id, task) `after`."""
        ...

    async def brokers_in_use(self) -> Sequence[str | None]:
        """The brokers that took the commands of tasks in work; None: it was not noted which."""
        ...

    async def held_by(
        self, via: str | None, limit: int, after: str = "", *, dead_letters: bool = False
    ) -> Sequence[str]:
        """Runs with commands in work, or with dead letters, that this broker took: in a stable order, starting behind
        run `after`."""
        ...

    async def forget_sent(self) -> int:
        """The broker lost its memory: every command in work (`em_execucao`) and every resting dead letter counts as
        not sent. Returns how many. Call it before the engine takes work: it moves no version."""
        ...


class StoreUpkeep(Protocol):
    """Opening, checking, migrating and closing a store, and deleting what is old."""

    @property
    def name(self) -> str:
        """For people: `sqlite`, `postgresql`, …"""
        ...

    async def start(self) -> None:
        """Opens it. An empty one gets its schema; raises StoreError, which names what to run, when the schema is older
        than this program's and others may be using it, or newer. Idempotent."""
        ...

    async def migrate(self) -> Sequence[str]:
        """Brings the schema up to date and returns what was done, in order; nothing when it was. Idempotent, and safe
        when several do it at once. Needs no start before it, and leaves the store open."""
        ...

    async def check(self) -> str:
        """Proves that it can be read and written and returns its version; raises StoreUnavailable with the reason. What
        stands behind a semicolon is a warning: runs can be lost as it is set up."""
        ...

    async def prune(self, ended_before: float, limit: int) -> int:
        """Deletes runs that ended before then and have nothing left to deliver. Returns how many were deleted."""
        ...

    async def close(self) -> None:
        """Finishes what was accepted and closes. Idempotent."""
        ...


class Storage(Store, StoreUpkeep, Browse, Registry, Protocol):
    """All that a store adapter does. Whoever uses a part of it asks for that part's Protocol."""


@runtime_checkable
class LaidOutAtStart(Protocol):
    """A store that its first start lays out, for whoever wants to know how it is and change nothing."""

    async def look(self) -> str | None:
        """Its version, as `check` has it, when it is empty and could be laid out; that was tried, and nothing is left
        of it. None when it is laid out. Needs no start. Raises StoreError when that, or what a run needs, is refused.
        """
        ...
