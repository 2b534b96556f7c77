"""Records of what happens inside. Logs, metrics and traces subscribe to them.

The engine emits one record for a whole batch, to keep the cost low.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from oraculo.core.history import HistoryEntry
from oraculo.core.run import Task
from oraculo.pipeline.definition import Step


class Record(msgspec.Struct, frozen=True, gc=False):
    """One thing that happened."""


class BatchCommitted(Record, frozen=True, gc=False):
    inputs: int
    runs: int
    created: int
    conflicts: int
    seconds: float  # from the first input taken to the commit


class HistoryAdded(Record, frozen=True, gc=False):
    """The entries that a commit added to a run's history. Read it at once: the tasks go on changing."""

    run_id: str
    name: str
    entries: Sequence[HistoryEntry]
    steps: Sequence[Step]
    tasks: Sequence[Task]


class RunFinished(Record, frozen=True, gc=False):
    run_id: str
    name: str
    status: str
    edition: int
    tasks: int
    seconds: float


class AnswerTaken(Record, frozen=True, gc=False):
    """An answer was decided. `verdict` is applied, late, duplicate or unknown."""

    run_id: str
    verdict: str
    kind: str


class CommandsPublished(Record, frozen=True, gc=False):
    count: int
    seconds: float


class PublishFailed(Record, frozen=True, gc=False):
    count: int
    reason: str


class DeadLettered(Record, frozen=True, gc=False):
    queue: str
    reason: str
    run_id: str | None = None
    task: str | None = None
    attempt: int | None = None


class DeliveryAttempted(Record, frozen=True, gc=False):
    run_id: str
    channel: str
    outcome: str  # delivered, failed, given_up
    reason: str | None = None


class LoopFailed(Record, frozen=True, gc=False):
    """A background task of the engine met an error, and goes on after a pause."""

    duty: str
    reason: str


class PipelineFileRejected(Record, frozen=True, gc=False):
    """A file of the pipelines folder cannot be used as it is now."""

    file: str  # empty: the folder itself
    pipeline: str
    reason: str
    in_use: bool  # its last good version is used


class PipelineFileMended(Record, frozen=True, gc=False):
    """A file of the pipelines folder that was rejected can be used again, or is gone."""

    file: str


class ConsumerRebuilt(Record, frozen=True, gc=False):
    """A consumer that was connected and received nothing is made again."""

    broker: str
    queue: str
    reason: str


class BrokerChanged(Record, frozen=True, gc=False):
    """A broker was lost or is back. `trouble` is None when it is back."""

    broker: str
    trouble: str | None


class StoreBack(Record, frozen=True, gc=False):
    """The store works again. Each duty that failed meanwhile emitted a LoopFailed."""

    store: str


class CommandsTakenBack(Record, frozen=True, gc=False):
    """Commands of runs are sent again, because the broker that took them was lost."""

    broker: str
    runs: int


class EnginesChanged(Record, frozen=True, gc=False):
    """An engine joined or left. `engines` are those that share the store now, including this one."""

    engine: str
    engines: tuple[str, ...]


class RunsPruned(Record, frozen=True, gc=False):
    count: int


class Telemetry(Protocol):
    def emit(self, record: Record) -> None:
        """Hand a record to the subscribers. Never raises and never blocks."""
        ...


Subscriber = Callable[[Record], None]


class Silent:
    """A Telemetry that discards every record."""

    def emit(self, record: Record) -> None:
        pass
