"""The state of a run, its tasks and deliveries, and the changes of a batch of events."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from oraculo.core.history import Happened, HistoryEntry
from oraculo.core.plan import Plan


class TaskStatus(StrEnum):
    """The statuses of a task, by their names on the wire."""

    PENDING = "pendente"
    RUNNING = "em_execucao"
    SUCCEEDED = "concluida"
    FAILED = "erro"
    TIMED_OUT = "timeout"
    SKIPPED = "ignorada"
    CANCELLED = "cancelada"


class RunStatus(StrEnum):
    """The statuses of a run, by their names on the wire."""

    RUNNING = "em_execucao"
    SUCCEEDED = "concluida"
    PARTIAL = "parcial"
    FAILED = "erro"
    TIMED_OUT = "timeout"
    CANCELLED = "cancelada"


OPEN = frozenset({TaskStatus.PENDING, TaskStatus.RUNNING})
# Python 3.11 takes longer to find a member of an enum than to call a function, so hot paths here and elsewhere keep
# such members in globals.
_RUNNING, _SUCCEEDED = RunStatus.RUNNING, TaskStatus.SUCCEEDED


class Cause(StrEnum):
    """The cause for which a task did not succeed. The run's end status depends on it."""

    ANSWER = "answer"
    UNSENDABLE = "unsendable"
    TASK_DEADLINE = "task_deadline"
    RUN_DEADLINE = "run_deadline"
    DEPENDENCY = "dependency"
    QUORUM = "quorum"
    REQUEST = "request"


class Task(msgspec.Struct, gc=False):
    """The state of one task. `number` is its place in the plan."""

    number: int
    status: TaskStatus = TaskStatus.PENDING
    attempt: int = 0
    last_attempt: int = 0  # the attempt after which a failure is final
    unsent: bool = False  # its command or dead letter is decided, and no broker has confirmed it yet
    due_at: float | None = None  # the next attempt or the deadline
    deadline: float | None = None
    result: bytes | None = None  # the answer's payload, exactly as it came
    cause: Cause | None = None
    reason: str | None = None
    mark: int = 0  # identifies the answer that was counted last, should the broker deliver it again
    percent: float | None = None
    note: str | None = None
    sent_at: float | None = None
    ended_at: float | None = None
    dead_letter: bool = False  # its command is in the dead-letter queue, or on its way there
    via: str | None = None  # the broker that took its command, or its dead letter
    missing: int = 0  # dependencies that have not succeeded; not stored, but counted on load

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def awaits_retry(self) -> bool:
        """Return whether an attempt failed and the next one is not due yet."""
        return self.status is TaskStatus.PENDING and self.attempt > 0 and not self.unsent and self.missing == 0


class DeliveryStatus(StrEnum):
    """The statuses of a delivery, by their names on the wire."""

    PENDING = "pendente"
    DELIVERED = "entregue"
    UNDELIVERED = "nao_entregue"


class Channel(StrEnum):
    """The ways by which an aggregate is delivered."""

    WEBHOOK = "webhook"
    QUEUE = "fila"


class RunDelivery(msgspec.Struct):
    """One delivery of the aggregate. `edition` is the last one attempted."""

    channel: Channel
    target: str
    status: DeliveryStatus = DeliveryStatus.PENDING
    edition: int = 0
    attempts: int = 0
    due_at: float | None = None
    error: str | None = None
    via: str | None = None  # the broker that brought the request, because its sender listens there


class RunHead(msgspec.Struct, weakref=True):
    """The part of a run that every change rewrites: all but its tasks, payload and definition."""

    id: str
    name: str  # of the pipeline or route; empty for a list of destinations
    definition_hash: str
    created_at: float
    deadline: float
    timeout: float
    total: int
    version: int = 0
    status: RunStatus = RunStatus.RUNNING
    priority: int = 0
    traceparent: str | None = None
    ended_at: float | None = None
    due_at: float | None = None
    edition: int = 0  # `versao` of the aggregate, which grows with each end and amendment
    cancelled: bool = False
    entries: int = 0  # history entries so far
    late: int = 0
    duplicates: int = 0
    succeeded: int = 0
    failed: int = 0
    timed_out: int = 0
    skipped: int = 0
    task_cancelled: int = 0
    deliveries: list[RunDelivery] = []


class Run:
    """A run in memory. The engine that loaded it owns it and changes it one event at a time."""

    __slots__ = (
        "awaited",
        "awaited_on",
        "definition",
        "head",
        "hopeless",
        "open_tasks",
        "payload",
        "plan",
        "required_failed",
        "required_timed_out",
        "tasks",
    )

    def __init__(self, head: RunHead, plan: Plan, definition: bytes, payload: bytes, tasks: list[Task]) -> None:
        self.head = head
        self.plan = plan
        self.definition = definition  # encoded, as it is stored
        self.payload = payload
        self.tasks = tasks
        self.open_tasks = 0
        # The sent and open tasks, by kind (collectors under True) and by queue. An answer that names no task finds its
        # task here, without a look at every task.
        self.awaited: dict[bool, set[int]] = {True: set(), False: set()}
        self.awaited_on: dict[str, set[int]] = {}
        # Counts of tasks without success. They give the end status, and the tasks that a redrive reopens, without a
        # look at every task.
        self.required_failed = 0  # required tasks that failed or reached their own deadline
        self.required_timed_out = 0  # required tasks that reached the run's deadline
        self.hopeless = [0] * len(plan)  # by task, how many of its dependencies ended without success
        for task in tasks:
            self._count(task)

    def _count(self, task: Task) -> None:
        if dependencies := self.plan.dependencies[task.number]:
            task.missing = sum(self.tasks[n].status is not _SUCCEEDED for n in dependencies)
        if task.is_open:
            self.open_tasks += 1
            if task.attempt and not task.missing:
                self.expect_answer(task.number)
        elif task.status is not _SUCCEEDED:
            self.count_unsuccessful(task, task.status, 1)

    def count_unsuccessful(self, task: Task, status: TaskStatus, by: int) -> None:
        """Count a task that ends without success (`by` 1), or no longer does (-1), under its cause."""
        for number in self.plan.dependents[task.number]:
            self.hopeless[number] += by
        if self.plan.steps[task.number].optional:
            return
        if status is TaskStatus.FAILED or task.cause is Cause.TASK_DEADLINE:
            self.required_failed += by
        elif task.cause is Cause.RUN_DEADLINE:
            self.required_timed_out += by

    def expect_answer(self, number: int) -> None:
        self.awaited[self.plan.is_collector[number]].add(number)
        self.awaited_on.setdefault(self.plan.steps[number].queue, set()).add(number)

    def expect_no_answer(self, number: int) -> None:
        self.awaited[self.plan.is_collector[number]].discard(number)
        self.awaited_on[self.plan.steps[number].queue].discard(number)

    @property
    def id(self) -> str:
        return self.head.id

    @property
    def is_open(self) -> bool:
        return self.head.status is _RUNNING


class Changes:
    """The changes of one batch of events to one run: what is to be written, sent and delivered."""

    __slots__ = (
        "based_on",
        "commands",
        "dead_letters",
        "deliver",
        "dirty",
        "ended",
        "history",
        "run",
        "tasks",
    )

    def __init__(self, run: Run) -> None:
        self.run = run
        self.based_on = run.head.version
        self.tasks: dict[int, Task] = {}
        self.history: list[HistoryEntry] = []
        self.commands: list[tuple[int, int]] = []  # (task, attempt) to send
        self.dead_letters: list[tuple[int, int]] = []  # (task, attempt) whose command goes to the dead letters
        self.dirty = False  # the store must write something
        self.ended = False  # the run has a new aggregate
        self.deliver: Sequence[int] = ()  # the numbers of the deliveries that this engine attempts

    def touch(self, task: Task) -> None:
        self.dirty = True
        self.tasks[task.number] = task

    def record(
        self,
        at: float,
        what: Happened,
        task: int | None = None,
        attempt: int | None = None,
        detail: str | None = None,
    ) -> None:
        """Add an entry to the run's history."""
        self.dirty = True
        head = self.run.head
        head.entries += 1
        self.history.append(HistoryEntry(head.entries, at, what, task, attempt, detail))
