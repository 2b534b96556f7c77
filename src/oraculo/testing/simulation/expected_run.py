"""The outcome of one run by the contract, worked out apart from the engine.

Nothing is imported from the engine or the core: this states their contract a second time. After each event it evaluates
the whole run until nothing changes, where the core keeps counters and follows dependencies.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

import msgspec

from oraculo.settings import RunSettings
from oraculo.wire.timestamps import in_words

OPEN = ("pendente", "em_execucao")
SUMMARY = {
    "concluidas": "concluida",
    "erros": "erro",
    "timeouts": "timeout",
    "ignoradas": "ignorada",
    "canceladas": "cancelada",
}
JOB_QUEUES = {
    "ENHANCED_IMAGES": "images-queue",
    "VIRAL_COPY": "text-queue",
    "VOICE_OVER": "voiceover-queue",
    "CAPTIONS": "captions-queue",
    "PROMOTIONAL_VIDEO": "video-queue",
}
FAILURE_WORDS = ("erro", "error", "falha", "failed", "failure")
TOO_LATE_TO_BEGIN = "deadline passed before it was started"

_EMPTY = msgspec.Raw(b"{}")


# -- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpectedStep:
    """A step of a request."""

    id: str
    queue: str
    depends_on: tuple[str, ...]
    attempts: int
    backoff: float
    max_backoff: float
    timeout: float | None
    optional: bool
    config: dict[str, Any]
    payload: msgspec.Raw | None  # of this destination alone

    @property
    def collects(self) -> bool:
        return self.queue.startswith("escavador")

    def longest_pause(self, attempt: int) -> float:
        """Return the exponential backoff before jitter."""
        return min(self.max_backoff, self.backoff * 2.0 ** min(attempt - 1, 60))


@dataclass(frozen=True)
class Asked:
    """One request, with the definition that it names."""

    run_id: str
    name: str | None
    steps: tuple[ExpectedStep, ...]
    is_pipeline: bool
    timeout: float
    needed: int | None  # successes that end the run early; None: all are needed
    amends: bool
    priority: int
    payload: msgspec.Raw
    channels: tuple[str, ...]


class _Request(msgspec.Struct):
    """The body of a request."""

    correlation_id: str = ""
    destinos: list[str | dict[str, msgspec.Raw]] | None = None
    pipeline: str | None = None
    payload: msgspec.Raw = _EMPTY
    timeout: float | None = None
    webhook: str | None = None
    responder_em: str | None = None
    prioridade: int | None = None
    quorum: int | str | None = None


def read_asked(body: bytes, pipelines: Mapping[str, Mapping[str, Any]], defaults: RunSettings) -> Asked:
    """Read the body of a request, which the simulation knows to be valid."""
    request = msgspec.json.decode(body, type=_Request)
    source: Mapping[str, Any] = {} if request.pipeline is None else pipelines[request.pipeline]
    if request.pipeline is None:
        steps = tuple(_destination(each, defaults) for each in request.destinos or ())
    else:
        steps = tuple(_step(each, defaults) for each in source["steps"])
    quorum = source.get("quorum") if request.quorum is None else request.quorum
    channels = (("webhook", request.webhook), ("fila", request.responder_em))
    return Asked(
        run_id=request.correlation_id,
        name=request.pipeline,
        steps=steps,
        is_pipeline=request.pipeline is not None,
        timeout=request.timeout or source.get("timeout") or defaults.timeout,
        needed=_needed(quorum, len(steps)),
        amends=source.get("onLate") == "amend",
        priority=request.prioridade or 0,
        payload=request.payload,
        channels=tuple(name for name, target in channels if target is not None),
    )


def _destination(item: str | dict[str, msgspec.Raw], defaults: RunSettings) -> ExpectedStep:
    given: dict[str, Any]
    given = {"fila": item} if isinstance(item, str) else {key: msgspec.json.decode(raw) for key, raw in item.items()}
    queue = given.get("fila") or given["id"]
    own = None if isinstance(item, str) else item.get("payload")
    return ExpectedStep(
        id=given.get("id") or queue,
        queue=queue,
        depends_on=(),
        attempts=defaults.max_attempts,
        backoff=defaults.backoff,
        max_backoff=defaults.max_backoff,
        timeout=given.get("timeout"),
        optional=False,
        config={},
        payload=own,
    )


def _step(item: Mapping[str, Any], defaults: RunSettings) -> ExpectedStep:
    kind = item.get("type") or item["queue"]
    before = item.get("dependsOn") or ()
    retry = item.get("retry") or {}
    return ExpectedStep(
        id=item.get("id") or kind,
        queue=item.get("queue") or JOB_QUEUES.get(kind, kind),
        depends_on=(before,) if isinstance(before, str) else tuple(dict.fromkeys(before)),
        attempts=retry.get("maxAttempts", defaults.max_attempts),
        backoff=retry.get("backoff", defaults.backoff),
        max_backoff=retry.get("maxBackoff", defaults.max_backoff),
        timeout=item.get("timeout"),
        optional=bool(item.get("optional")),
        config=item.get("config") or {},
        payload=None,
    )


def _needed(quorum: int | str | None, total: int) -> int | None:
    if quorum is None or quorum == "all":
        return None
    if isinstance(quorum, int):
        return quorum
    return max(1, ceil(total * Fraction(quorum.removesuffix("%")) / 100))


# -- answers --------------------------------------------------------------------------------------------------------


class WorkerMessage(msgspec.Struct):
    """A command to a worker, or a message of one."""

    correlation_id: str
    tipo_evento: str
    payload: msgspec.Raw
    timestamp: str = ""
    tarefa: str | None = None
    tentativa: int | None = None
    prazo: str | None = None
    responder_em: str | None = None


@dataclass(frozen=True)
class ExpectedAnswer:
    """A worker's answer. Two equal ones are one message that came twice."""

    run_id: str
    task: str
    attempt: int | None
    payload: bytes
    timestamp: str
    reason: str | None  # None for a success
    may_retry: bool


def read_answer(body: bytes) -> ExpectedAnswer | None:
    """Return the answer in a body. None when it is none, or names no task, which the simulation's workers always do."""
    try:
        message = msgspec.json.decode(body, type=WorkerMessage)
        payload = msgspec.json.decode(message.payload)
    except msgspec.DecodeError:
        return None
    if message.tipo_evento not in ("resultado_coleta", "resultado_execucao") or not isinstance(payload, dict):
        return None
    task = message.tarefa or payload.get("tarefa")
    if not isinstance(task, str):
        return None
    status, errors = payload.get("status"), payload.get("erros")
    failed = status.lower() in FAILURE_WORDS if isinstance(status, str) else status is None and bool(errors)
    return ExpectedAnswer(
        run_id=message.correlation_id,
        task=task,
        attempt=message.tentativa,
        payload=bytes(message.payload),
        timestamp=message.timestamp,
        reason=None if not failed else str(errors[0]) if isinstance(errors, list) and errors else "",
        may_retry=payload.get("repetir") is not False,
    )


# -- outcomes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """The command that a worker has to get for one attempt."""

    deadline: float
    results: Mapping[str, frozenset[bytes]]  # dependency -> its possible results


@dataclass(eq=False)
class ExpectedTask:
    """A task, and how it must look to users."""

    step: ExpectedStep
    allowed: int  # attempts before a failure is final
    status: str = "pendente"
    attempts: int = 0
    is_begun: bool = False  # an attempt was begun since it was opened
    deadline: float | None = None
    retry_between: tuple[float, float] | None = None  # earliest and latest time of the next attempt
    retry_at: float | None = None  # the chosen time, once it is known
    results: frozenset[bytes] = frozenset()  # possible results
    ended_by: str = ""  # "answer", "size", "own deadline", "run deadline", "dependency", "quorum" or "request"
    counted: ExpectedAnswer | None = None  # the last failure that was counted
    reason: str = ""  # a part of the shown reason
    has_dead_letter: bool = False
    ended_at: float | None = None
    commands: dict[int, Command] = field(default_factory=dict)  # by attempt

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def has_succeeded(self) -> bool:
        return self.status == "concluida"


@dataclass
class ExpectedDelivery:
    """A delivery of an aggregate."""

    channel: str
    status: str = "pendente"
    edition: int = 0
    attempts: int = 0


@dataclass
class ExpectedRun:
    """A run, and how it must look to users."""

    asked: Asked
    created_at: float
    status: str = "em_execucao"
    edition: int = 0
    late: int = 0
    repeated: int = 0
    is_cancelled: bool = False
    ended_at: float | None = None
    # Consequences that the history must list, and how often. One that is found there is removed.
    follows: Counter[tuple[str, str | None]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.deadline = self.created_at + self.asked.timeout
        self.tasks = {step.id: ExpectedTask(step, step.attempts) for step in self.asked.steps}
        self.deliveries = [ExpectedDelivery(name) for name in self.asked.channels]
        self._follow(self.created_at)

    @property
    def is_open(self) -> bool:
        return self.status == "em_execucao"

    @property
    def succeeded(self) -> int:
        return sum(task.has_succeeded for task in self.tasks.values())

    @property
    def is_quorum_met(self) -> bool:
        return self.asked.needed is not None and self.succeeded >= self.asked.needed

    def deadline_of(self, task: ExpectedTask) -> float:
        return self.deadline if task.deadline is None else min(task.deadline, self.deadline)

    # -- effects of answers -------------------------------------------------------------------------------------

    def verdict(self, answer: ExpectedAnswer, *, redelivered: bool) -> str:
        """Return what an answer does now, in the history's word; for a failure `falha`."""
        task = self.tasks[answer.task]
        if not task.attempts:
            return "resposta_recusada"
        is_counted = answer.reason is not None and redelivered and task.counted == answer
        if task.is_open:
            if answer.reason is None:
                return "tarefa_concluida"
            named = answer.attempt if answer.attempt is not None and answer.attempt <= task.attempts else None
            if task.retry_between is not None or (named is not None and named < task.attempts):
                return "resposta_repetida"
            return "resposta_repetida" if named is None and is_counted else "falha"
        ended_by_time = task.status == "timeout" or task.ended_by == "quorum"
        if answer.reason is None and self.asked.amends and ended_by_time and self.status != "cancelada":
            return "resposta_tardia_aceita"
        return "resposta_repetida" if is_counted or task.status in ("concluida", "erro") else "resposta_tardia"

    def succeed(self, task: ExpectedTask, results: Iterable[bytes], now: float) -> None:
        self._close(task, "concluida", "", now)
        task.results = frozenset(results)
        self._advance(now)
        if self.is_open and self.succeeded == self.asked.needed:
            self._cancel_open("quorum", "quorum", now)
        self._end_if_over(now)

    def amend(self, task: ExpectedTask, results: Iterable[bytes], now: float) -> None:
        """Replace a timeout by a late success. Skipped tasks stay skipped."""
        was_open = self.is_open
        self.succeed(task, results, now)
        if not was_open:
            self._end(self.ended_at)

    def attempt_failed(self, task: ExpectedTask, answer: ExpectedAnswer, now: float) -> None:
        """Expect another attempt, or the end if the deadline has passed."""
        task.counted, task.reason = answer, answer.reason or ""
        if self.deadline_of(task) <= now:
            self.follows["tarefa_timeout", task.step.id] += 1
            self._time_out(task, now)
        else:
            pause = task.step.longest_pause(task.attempts)
            task.status, task.retry_between, task.retry_at = "pendente", (now, now + pause), None
        self._follow(now)

    def fail(self, task: ExpectedTask, answer: ExpectedAnswer, now: float) -> None:
        task.counted, task.has_dead_letter = answer, True
        self._close(task, "erro", "answer", now, answer.reason or "")
        self._follow(now)

    def cannot_send(self, task: ExpectedTask, now: float) -> None:
        self._close(task, "erro", "size", now, "too large")
        self._follow(now)

    def why_final(self, task: ExpectedTask, answer: ExpectedAnswer, now: float) -> str | None:
        """Return why a failure now ends the task, or None when another attempt must follow.

        If only the jitter decides whether there is time for another, both are right. Then this returns the reason, and
        `must_be_final` returns False.
        """
        if self.must_be_final(task, answer, now):
            return "no attempt is left, or the worker wants none"
        latest = now + task.step.longest_pause(task.attempts)
        return "there may be no time left" if latest >= self.deadline_of(task) else None

    def must_be_final(self, task: ExpectedTask, answer: ExpectedAnswer, now: float) -> bool:
        """Return True when the failure must end the task.

        A worker whose clock is ahead refuses commands that still have time, and these must be tried again.
        """
        is_mistaken = answer.reason == TOO_LATE_TO_BEGIN and self.deadline_of(task) - now >= 1.0
        return task.attempts >= task.allowed or not (answer.may_retry or is_mistaken)

    # -- effects of the clock -----------------------------------------------------------------------------------

    def time_out(self, task: ExpectedTask, now: float) -> None:
        self._time_out(task, now)
        self._follow(now)

    def _time_out(self, task: ExpectedTask, now: float) -> None:
        is_own = task.deadline is not None and task.deadline <= self.deadline
        limit = task.step.timeout if is_own else self.asked.timeout
        self._close(task, "timeout", "own deadline" if is_own else "run deadline", now, f"in {in_words(limit or 0)}")

    def begin_again(self, task: ExpectedTask, now: float) -> None:
        """Begin the next attempt: the pause after a failure is over."""
        self._begin(task, now)

    # -- operators ----------------------------------------------------------------------------------------------

    def cancel(self, now: float) -> None:
        self.is_cancelled = True
        self._cancel_open("request", "cancelled", now)
        self._follow(now)

    def unsuccessful(self) -> set[str]:
        return {name for name, task in self.tasks.items() if not task.has_succeeded}

    def hopeful_with(self, name: str) -> set[str]:
        """Return the tasks that a redrive of this one opens: itself, and those skipped only because of these."""
        again = {name}
        while more := {one for one in self.tasks if one not in again and self._may_hope(one, again)}:
            again |= more
        return again

    def _may_hope(self, name: str, reopened: set[str]) -> bool:
        task = self.tasks[name]
        failed = {one for one in task.step.depends_on if self._has_failed(one)}
        return task.status == "ignorada" and failed <= reopened and bool(reopened & set(task.step.depends_on))

    def reopen(self, names: Iterable[str], now: float) -> None:
        if not self.is_open:
            self.deadline = now + self.asked.timeout
            self.status, self.ended_at, self.is_cancelled = "em_execucao", None, False
            self.follows["orquestracao_reaberta", None] += 1
        for name in names:
            task = self.tasks[name]
            task.status, task.is_begun, task.allowed = "pendente", False, task.attempts + task.step.attempts
            task.deadline = task.ended_at = task.retry_between = task.retry_at = None
            task.ended_by, task.reason, task.has_dead_letter = "", "", False
            self.follows["tarefa_reaberta", name] += 1
        self._follow(now)

    # -- consequences -------------------------------------------------------------------------------------------

    def _follow(self, now: float) -> None:
        self._advance(now)
        self._end_if_over(now)

    def _advance(self, now: float) -> None:
        """Begin tasks whose dependencies all succeeded and skip tasks behind a failure, until nothing changes."""
        for task in self._until_none(lambda task: all(self.tasks[one].has_succeeded for one in task.step.depends_on)):
            self._begin(task, now)
        for task in self._until_none(lambda task: any(map(self._has_failed, task.step.depends_on))):
            blamed = next(one for one in task.step.depends_on if self._has_failed(one))
            self._close(task, "ignorada", "dependency", now, "" if len(task.step.depends_on) > 1 else f"'{blamed}'")
            self.follows["tarefa_ignorada", task.step.id] += 1

    def _end_if_over(self, now: float) -> None:
        if self.is_open and not any(task.is_open for task in self.tasks.values()):
            self._end(now)

    def _until_none(self, condition: Any) -> Iterator[ExpectedTask]:
        def found() -> ExpectedTask | None:
            waiting = (task for task in self.tasks.values() if task.is_open and not task.is_begun)
            return next((task for task in waiting if condition(task)), None)

        while (task := found()) is not None:
            yield task

    def _has_failed(self, name: str) -> bool:
        task = self.tasks[name]
        return not task.is_open and not task.has_succeeded

    def _begin(self, task: ExpectedTask, now: float) -> None:
        task.attempts += 1
        task.is_begun, task.retry_between, task.retry_at = True, None, None
        if task.deadline is None and task.step.timeout is not None:
            task.deadline = now + task.step.timeout
        results = {name: self.tasks[name].results for name in task.step.depends_on}
        task.commands[task.attempts] = Command(self.deadline_of(task), results)

    def _close(self, task: ExpectedTask, status: str, by: str, now: float, reason: str = "") -> None:
        task.status, task.ended_by, task.ended_at, task.reason = status, by, now, reason
        task.retry_between = task.retry_at = None

    def _cancel_open(self, by: str, reason: str, now: float) -> None:
        for name, task in self.tasks.items():
            if task.is_open:
                self._close(task, "cancelada", by, now, reason)
                self.follows["tarefa_cancelada", name] += 1

    def _end(self, ended_at: float | None) -> None:
        self.status, self.ended_at = self._end_status(), ended_at
        self.edition += 1
        for one in self.deliveries:
            one.status, one.edition, one.attempts = "pendente", self.edition, 0
        self.follows["orquestracao_encerrada", None] += 1

    def _end_status(self) -> str:
        if self.succeeded == len(self.tasks):
            return "concluida"
        if self.is_cancelled:
            return "cancelada"
        if self.asked.is_pipeline and not self.is_quorum_met:
            ends = {task.ended_by for task in self.tasks.values() if not task.step.optional}
            if ends & {"answer", "size", "own deadline"}:
                return "erro"
            if "run deadline" in ends:
                return "timeout"
        if self.succeeded:
            return "parcial"
        statuses = [task.status for task in self.tasks.values()]
        return next((status for status in ("erro", "timeout") if status in statuses), "cancelada")

    # -- views of users -----------------------------------------------------------------------------------------

    def summary(self) -> dict[str, int]:
        statuses = [task.status for task in self.tasks.values()]
        return {"total": len(statuses)} | {word: statuses.count(status) for word, status in SUMMARY.items()}

    def as_it_is(self) -> "ExpectedRun":
        """Return a copy, for the aggregate of this moment."""
        twin = copy(self)
        twin.tasks = {name: copy(task) for name, task in self.tasks.items()}
        return twin


def collector_parameters(payload: msgspec.Raw, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `parametros` of an escavador: the run's payload, overlaid by the step's config."""
    given = msgspec.json.decode(payload).get("parametros")
    return {**(given if isinstance(given, dict) else {}), **config}


def first_difference(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Return the first field whose value is not the expected one."""
    for name, value in expected.items():
        if value != found.get(name):
            return f"{name} is {found.get(name)!r}, and must be {value!r}"
    return None
