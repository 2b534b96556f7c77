"""The durable state of runs: the contract of every store adapter.

A run's head, tasks and history are written together or not at all. Every call may raise:
- StoreUnavailable: the store cannot be reached now, and a later try may work;
- StoreRefuses, which is a StoreUnavailable: the store answers that it takes nothing (its disk is full, a right is
missing), whatever is asked of it;
- any other StoreError: the store refused this call, and would refuse it again.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol, runtime_checkable

import msgspec

from oraculo.core.run import Changes, RunHead, Task
from oraculo.ports.browse import Browse
from oraculo.ports.registry import Registry


class Creation(msgspec.Struct):
    """A new run with its first changes. A request with another `fingerprint` asks for another run."""

    changes: Changes
    fingerprint: str
    idempotency_key: str | None = None


class CreationOutcome(StrEnum):
    CREATED = "created"
    SAME = "same"  # the id or the idempotency key exists, with the same fingerprint
    ID_IN_USE = "id_in_use"  # the id exists, with another fingerprint
    KEY_REUSED = "key_reused"  # the idempotency key exists, with another fingerprint


class Created(msgspec.Struct, frozen=True):
    """The outcome of one Creation."""

    outcome: CreationOutcome
    run_id: str  # the new run, or the one that existed before


class Committed(msgspec.Struct, frozen=True):
    """The outcome of one `commit`."""

    created: Sequence[Created]  # one for each Creation, in the same order
    conflicts: frozenset[str]  # runs whose version was not the expected one: their changes are not written


class Snapshot(msgspec.Struct):
    """A committed run. `definition` and `payload` are the bytes of its Creation."""

    head: RunHead
    definition: bytes
    payload: bytes
    tasks: list[Task]


class Due(msgspec.Struct, frozen=True, gc=False):
    """A timer that is due. `task` is None for the run's own timer."""

    run_id: str
    task: int | None = None


class Unsent(msgspec.Struct, frozen=True, gc=False):
    """A committed command, or dead letter of a failed task, that is not recorded as sent."""

    run_id: str
    task: int
    attempt: int


class Store(Protocol):
    """Runs as the engine needs them: create, load, commit, and find what is due or unsent."""

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        """Write all creations and changes in one durable step.

        A run's changes are written only where the stored version is `changes.based_on`. Then the stored version, and
        `changes.run.head.version`, increase by one. A creation is written whole, at version 1. The caller passes at
        most one Changes for a run.
        """
        ...

    async def created_with(self, idempotency_key: str, fingerprint: str) -> str | None:
        """Return the id of the run that was created with this key and fingerprint, or None."""
        ...

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        """Return the runs that exist, by id."""
        ...

    async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        """Return the heads of the runs that exist, by id. Cheap, whatever their width."""
        ...

    async def task(self, run_id: str, number: int) -> Task | None:
        """Return one task of a run, or None. Cheap, whatever the run's width."""
        ...

    async def unchanged(self, copies: Sequence[RunHead]) -> frozenset[str]:
        """Return the ids of the copies that are still the stored version. As cheap as `heads`."""
        ...

    async def due(self, now: float, limit: int) -> Sequence[Due]:
        """Return timers at or before `now`, oldest first. They stay until a commit moves or clears them."""
        ...

    async def next_due(self) -> float | None:
        """Return the time of the next timer, or None."""
        ...

    async def unsent(self, limit: int, after: tuple[str, int] | None = None) -> Sequence[Unsent]:
        """Return unsent commands of open tasks and unsent dead letters of failed tasks.

        The order is stable. The list starts after the (run id, task) of `after`.
        """
        ...

    async def brokers_in_use(self) -> Sequence[str | None]:
        """Return the brokers that took commands of tasks in work. None stands for a broker that was not recorded."""
        ...

    async def held_by(
        self, via: str | None, limit: int, after: str = "", *, dead_letters: bool = False
    ) -> Sequence[str]:
        """Return runs with commands in work, or with dead letters, that this broker took.

        The order is stable. The list starts after the run `after`.
        """
        ...

    async def forget_sent(self) -> int:
        """Count every command in work (`em_execucao`) and every dead letter as unsent: the broker lost its memory.

        Returns how many there were. Run versions do not change, so call it before the engine takes work.
        """
        ...


class StoreUpkeep(Protocol):
    """Opening, checking, migrating and closing a store, and deleting old runs."""

    @property
    def name(self) -> str:
        """The kind of store, in logs and lists: `sqlite`, `postgresql`, …"""
        ...

    async def start(self) -> None:
        """Open the store. An empty one gets its schema. Idempotent.

        Raises StoreError, which names the command to run, when the schema is newer than this program's, or is older and
        others may be using it.
        """
        ...

    async def migrate(self) -> Sequence[str]:
        """Bring the schema up to date. Return the steps that were done, in order.

        Idempotent, and safe when several processes do it at once. It needs no `start` before, and leaves the store
        open.
        """
        ...

    async def check(self) -> str:
        """Return the store's version, once reading and writing work. Raises StoreUnavailable with the reason.

        A text after a semicolon is a warning: its settings allow runs to be lost.
        """
        ...

    async def prune(self, ended_before: float, limit: int) -> int:
        """Delete runs that ended before then and have nothing left to deliver. Return how many."""
        ...

    async def close(self) -> None:
        """Finish the work that was accepted, and close. Idempotent."""
        ...


class Storage(Store, StoreUpkeep, Browse, Registry, Protocol):
    """A whole store adapter. Callers that use a part of it ask for that part's Protocol."""


@runtime_checkable
class LaidOutAtStart(Protocol):
    """A store that creates its schema at the first start, and that can be inspected without doing so."""

    async def look(self) -> str | None:
        """Return the store's version, as `check` does, when it is empty and its schema could be created.

        It tries that and undoes it. Returns None when the schema exists. Needs no `start`. Raises StoreError when
        creating the schema, or what a run needs, is refused.
        """
        ...
