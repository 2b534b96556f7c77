"""The state that the model of a run keeps: what was asked, and its tasks, answers and deliveries."""

from dataclasses import dataclass

OPEN = ("pendente", "em_execucao")


@dataclass(frozen=True)
class Step:
    id: str
    queue: str
    depends_on: tuple[str, ...] = ()
    attempts: int = 3
    backoff: float = 1.0
    optional: bool = False
    timeout: float | None = None

    @property
    def answers_with(self) -> str:
        return "resultado_coleta" if self.queue.startswith("escavador") else "resultado_execucao"

    @property
    def names(self) -> set[str]:
        """Return the names that a worker may use for the step."""
        return {self.id, self.queue, self.queue.removeprefix("escavador_").removeprefix("executador_")}


@dataclass(frozen=True)
class Asked:
    """The request of a run."""

    steps: tuple[Step, ...]
    is_pipeline: bool
    timeout: float
    quorum: int | None = None
    amends: bool = False


@dataclass(frozen=True)
class Reply:
    """A worker's answer as it was written. Two that are equal are one message that came twice."""

    event: str
    payload: bytes
    timestamp: str
    tarefa: str | None = None
    tentativa: int | None = None
    names: tuple[str, ...] = ()  # in its payload
    reason: str | None = None  # None: a success
    may_retry: bool = True


@dataclass(eq=False)
class Task:
    step: Step
    allowed: int  # attempts, before a failure is final
    status: str = "pendente"
    attempts: int = 0
    is_begun: bool = False  # an attempt was decided since it was opened
    to_send: bool = False  # its command, or its dead letter, is decided, and no broker has confirmed it
    has_letter: bool = False
    deadline: float | None = None
    retry_at: float | None = None
    result: bytes | None = None
    ended_by: str | None = None  # "answer", "size", "own deadline", "run deadline", "dependency", "quorum" or "request"
    motive: str = ""  # a pattern of the reason
    blamed: frozenset[str] = frozenset()  # of a skipped one: the possible reasons, in the same words
    failure: str | None = None  # what a worker said last
    counted: Reply | None = None  # the answer that was counted last
    progress: tuple[float | None, str | None] = (None, None)
    is_at_work: bool = False  # its worker said so
    sent_at: float | None = None
    ended_at: float | None = None
    via: str | None = None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def has_succeeded(self) -> bool:
        return self.status == "concluida"

    @property
    def rings_at(self) -> float | None:
        return None if not self.is_open else self.deadline if self.retry_at is None else self.retry_at

    @property
    def shown_sent_at(self) -> float | None:
        """Return when the command was sent. A time after the end is that of the dead letter."""
        was_before = self.sent_at is None or self.ended_at is None or self.sent_at <= self.ended_at
        return self.sent_at if was_before else None

    def was_made(self, attempt: int | None) -> bool:
        return attempt is not None and attempt <= self.attempts


@dataclass
class Delivery:
    status: str = "pendente"
    edition: int = 0
    attempts: int = 0
    due_at: float | None = None
    error: str | None = None
