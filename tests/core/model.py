"""A model of a run, written from the contract in another way than the core.

The core keeps counters and follows dependencies step by step, because a run may be ten thousand wide. The model looks
at the whole run after every event until nothing changes, so that the two can hardly be wrong in the same way. Its
words are those of the wire. `view` returns what a user sees.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from oraculo.core.machine.delivery import DELIVERY_LEASE
from oraculo.wire.timestamps import in_words, to_iso

from .model_state import Asked, Delivery, Reply, Task

CHANNELS = ("webhook", "fila")
MAX_BACKOFF = 60.0
SUMMARY = {
    "concluidas": "concluida",
    "erros": "erro",
    "timeouts": "timeout",
    "ignoradas": "ignorada",
    "canceladas": "cancelada",
}


@dataclass
class Model:
    asked: Asked
    created_at: float
    status: str = "em_execucao"
    edition: int = 0
    late: int = 0
    repeated: int = 0
    is_cancelled: bool = False
    ended_at: float | None = None
    deadline: float = field(init=False)
    deliveries: list[Delivery] = field(default_factory=lambda: [Delivery() for _ in CHANNELS])
    to_deliver: set[int] = field(default_factory=set)  # by whoever commits this
    decided: set[str] = field(default_factory=set)  # what whoever commits this sends, if it is still to be sent then
    recorded: list[tuple[str, str | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.deadline = self.created_at + self.asked.timeout
        self.tasks = {step.id: Task(step, step.attempts) for step in self.asked.steps}
        self.recorded.append(("orquestracao_iniciada", None))
        self._follow(self.created_at)

    def copied(self) -> "Model":
        twin = copy(self)
        twin.tasks = {name: copy(task) for name, task in self.tasks.items()}
        twin.deliveries = [copy(one) for one in self.deliveries]
        twin.to_deliver, twin.decided, twin.recorded = set(self.to_deliver), set(self.decided), list(self.recorded)
        return twin

    @property
    def is_open(self) -> bool:
        return self.status == "em_execucao"

    @property
    def succeeded(self) -> int:
        return sum(task.has_succeeded for task in self.tasks.values())

    @property
    def rings_at(self) -> float | None:
        if self.is_open:
            return self.deadline
        return min((one.due_at for one in self.deliveries if one.due_at is not None), default=None)

    # -- what workers and brokers say ---------------------------------------------------------------------------

    def whose(self, reply: Reply, redelivered: bool) -> Task | None:
        """Return the task of an answer, by `tarefa`, by a name in the payload, or by its kind.

        Of several tasks it is the one that had this message before, or the only one that awaits an answer.
        """
        if reply.tarefa in self.tasks:
            return self.tasks[reply.tarefa]
        kin = [task for task in self.tasks.values() if task.step.answers_with == reply.event]
        named = [meant for name in reply.names if (meant := [task for task in kin if name in task.step.names])]
        for meant in named or [kin]:
            counted = [task for task in meant if redelivered and task.counted == reply]
            awaited = [task for task in meant if task.is_open and task.attempts]
            for found in (meant, counted[:1], awaited):
                if len(found) == 1:
                    return found[0]
        return None

    def answered(self, reply: Reply, redelivered: bool, jitter: float, now: float) -> str | None:
        """Apply an answer. Return the verdict, or None for an answer without a task."""
        task = self.whose(reply, redelivered)
        if task is None:
            return None
        if not task.attempts:
            return "unknown"
        if not task.is_open:
            return self._answered_late(task, reply, redelivered, now)
        if reply.reason is None:
            self._succeed(task, reply, "tarefa_concluida", now)
        elif self._was_counted(task, reply, redelivered):
            return self._stray(task, "duplicate")
        else:
            task.counted, task.failure = reply, reply.reason
            self._fail(task, reply, jitter, now)
        self._follow(now)
        return "applied"

    def _was_counted(self, task: Task, reply: Reply, redelivered: bool) -> bool:
        if task.retry_at is not None:
            return True
        if task.was_made(reply.tentativa):
            return reply.tentativa != task.attempts
        return redelivered and task.counted == reply

    def _answered_late(self, task: Task, reply: Reply, redelivered: bool, now: float) -> str:
        by_time = task.status == "timeout" or task.ended_by == "quorum"
        if self.asked.amends and reply.reason is None and by_time and self.status != "cancelada":
            was_open = self.is_open
            self._succeed(task, reply, "resposta_tardia_aceita", now)
            self._blame_others([task])
            self._follow(now)
            if not was_open:
                self._end(now, self.ended_at)
            return "applied"
        is_repeat = reply.reason is not None and redelivered and task.counted == reply
        return self._stray(task, "duplicate" if is_repeat or task.status in ("concluida", "erro") else "late")

    def _stray(self, task: Task, verdict: str) -> str:
        if verdict == "late":
            self.late += 1
        else:
            self.repeated += 1
        self._record("resposta_tardia" if verdict == "late" else "resposta_repetida", task)
        return verdict

    def _succeed(self, task: Task, reply: Reply, what: str, now: float) -> None:
        if task.is_open:
            task.counted = reply
            task.progress = (None if task.progress[0] is None else 100.0, task.progress[1])
        task.result = reply.payload
        self._close(task, "concluida", None, "", now)
        self._record(what, task)
        if not self.is_open:
            return
        self._send_and_skip(now)
        if self.succeeded == self.asked.quorum:
            self._cancel_open("quorum", f"the quorum of {self.asked.quorum} was met without it", now)

    def _fail(self, task: Task, reply: Reply, jitter: float, now: float) -> None:
        if self._passed(task, now):
            self._record("tentativa_falhou", task)
            self._time_out(task, now, has_failed=True)
            return
        delay = min(MAX_BACKOFF, task.step.backoff * 2 ** (task.attempts - 1)) * jitter
        may_retry = reply.may_retry and task.attempts < task.allowed
        if may_retry and now + delay < self.deadline_of(task):
            task.status, task.to_send, task.retry_at, task.progress = "pendente", False, now + delay, (None, None)
            task.is_at_work = False
            self._record("tentativa_falhou", task)
            return
        self._close(task, "erro", "answer", f"^{reply.reason}{' .no time left' if may_retry else '$'}", now)
        task.has_letter = True
        self._decide_to_send(task)
        self._record("tarefa_erro", task)

    def progressed(self, name: str, percent: float | None, note: str | None, attempt: int | None) -> str:
        task = self.tasks[name]
        if not task.attempts:
            return "unknown"
        is_overtaken = attempt is not None and (attempt != task.attempts or task.retry_at is not None)
        if is_overtaken or not task.is_open:
            return "late"
        task.progress, task.is_at_work = (task.progress[0] if percent is None else percent, note), True
        self._record("progresso", task)
        return "applied"

    def sent(self, name: str, attempt: int, letter: bool, via: str, at: float) -> str:
        """A broker confirmed a command, or a dead letter."""
        task = self.tasks[name]
        if not task.to_send or attempt != task.attempts or letter != task.has_letter:
            return "nothing"
        task.to_send, task.via = False, via
        if letter:
            task.sent_at = task.sent_at or at
        else:
            task.status, task.sent_at = "em_execucao", at
            self._record("tarefa_enviada", task)
        return "applied"

    def unsendable(self, name: str, attempt: int, reason: str, now: float) -> str:
        """No broker takes its command, and none had it before. A dead letter would be as large."""
        task = self.tasks[name]
        is_asked_for = task.to_send and attempt == task.attempts and task.status == "pendente"
        if not is_asked_for or self._passed(task, now):
            return "nothing"
        self._close(task, "erro", "size", f"^{reason}$", now)
        self._record("tarefa_erro", task)
        self._follow(now)
        return "applied"

    def lost(self, via: str, letters: bool, before: float | None, now: float) -> str:
        """Send again what the broker took.

        A dead letter counts from the end of its task, by a clock that may be a little ahead, or from its last sending.
        A time in the future is from before the clock was set back.
        """
        before = before + 1.5 if before is not None and letters else before
        lost = [
            task
            for task in self.tasks.values()
            if task.via == via
            and not task.to_send
            and (before is None or not before < max(task.sent_at or 0, (letters and task.ended_at) or 0) <= now)
            and (task.has_letter if letters else task.status == "em_execucao")
        ]
        for task in lost:
            self._decide_to_send(task)
            if letters:
                task.sent_at = None
        if lost:
            self.recorded.append(("broker_perdido", None))
        return "applied" if lost else "nothing"

    # -- timers -------------------------------------------------------------------------------------------------

    def deadline_of(self, task: Task) -> float:
        return self.deadline if task.deadline is None else min(task.deadline, self.deadline)

    def _passed(self, task: Task, now: float) -> bool:
        return self.deadline_of(task) <= now

    def task_rings(self, name: str, now: float) -> str:
        task = self.tasks[name]
        if task.rings_at is None or task.rings_at > now:
            return "nothing"
        if self._passed(task, now):
            self._time_out(task, now)
        else:
            self._begin(task, now)
        self._follow(now)
        return "applied"

    def run_rings(self, now: float) -> str:
        if self.rings_at is None or self.rings_at > now:
            return "nothing"
        for number, one in enumerate(self.deliveries):
            if not self.is_open and one.due_at is not None and one.due_at <= now:
                one.due_at = now + DELIVERY_LEASE
                self.to_deliver.add(number)
        for task in self.tasks.values():
            if task.is_open and task.is_begun:
                self._time_out(task, now)
        self._follow(now)
        return "applied"

    def _time_out(self, task: Task, now: float, *, has_failed: bool = False) -> None:
        is_own = task.deadline is not None and task.deadline <= self.deadline
        limit = task.step.timeout if is_own else self.asked.timeout
        was_sent = not task.to_send or task.status == "em_execucao"
        what = "no success" if has_failed or task.retry_at is not None else "no answer" if was_sent else "not sent"
        motive = f"{what}.* in {in_words(limit or 0)}.*{task.failure or ''}"
        self._close(task, "timeout", "own deadline" if is_own else "run deadline", motive, now)
        self._record("tarefa_timeout", task)

    # -- what operators ask -------------------------------------------------------------------------------------

    def cancel(self, now: float) -> str:
        if not self.is_open:
            return "refused"
        self.is_cancelled = True
        self._cancel_open("request", "cancelled on request", now)
        self._follow(now)
        return "applied"

    def repeat(self, now: float) -> str:
        again = [task for task in self.tasks.values() if not task.has_succeeded]
        if self.is_open or not again or self.is_quorum_met:
            return "refused"
        self._reopen(again, now)
        return "applied"

    def redrive(self, name: str, now: float) -> str:
        task = self.tasks[name]
        if task.is_open or task.has_succeeded or not task.attempts:
            return "refused"
        again = [task]
        while more := [one for one in self.tasks.values() if one not in again and self._hopes_again(one, again)]:
            again += more
        self._reopen(again, now)
        self._blame_others(again)
        return "applied"

    def _hopes_again(self, task: Task, reopened: Sequence[Task]) -> bool:
        """Return whether a skipped task depends on a reopened one, and on no other that failed."""
        may_succeed = all(one in reopened for one in self._failed_before(task))
        return task.status == "ignorada" and may_succeed and any(one in reopened for one in self._before(task))

    def _reopen(self, again: Sequence[Task], now: float) -> None:
        if not self.is_open:
            self.deadline = now + self.asked.timeout
            self.status, self.ended_at, self.is_cancelled = "em_execucao", None, False
            self.to_deliver.clear()
            self.recorded.append(("orquestracao_reaberta", None))
        for task in again:
            task.status, task.is_begun, task.allowed = "pendente", False, task.attempts + task.step.attempts
            task.deadline = task.ended_at = task.ended_by = task.failure = None
            task.progress, task.has_letter, task.to_send = (None, None), False, False
            task.is_at_work = False
            self._record("tarefa_reaberta", task)
        self._follow(now)

    def discard(self, name: str) -> str:
        task = self.tasks[name]
        if not task.has_letter:
            return "nothing"
        task.has_letter = task.to_send = False
        self._record("carta_morta_descartada", task)
        return "applied"

    # -- delivery -----------------------------------------------------------------------------------------------

    def delivered(self, channel: int, edition: int, error: str | None, retry_at: float | None) -> str:
        one = self.deliveries[channel]
        if edition != self.edition or one.status != "pendente":
            return "nothing"
        one.attempts += 1
        one.error, one.due_at = error, retry_at
        if error is None:
            one.status, what = "entregue", "entrega_concluida"
        elif retry_at is None:
            one.status, what = "nao_entregue", "entrega_abandonada"
        else:
            what = "entrega_falhou"
        self.recorded.append((what, None))
        return "applied"

    # -- what follows by itself ---------------------------------------------------------------------------------

    def _follow(self, now: float) -> None:
        self._send_and_skip(now)
        if self.is_open and not any(task.is_open for task in self.tasks.values()):
            self._end(now, now)

    def _send_and_skip(self, now: float) -> None:
        """Send tasks behind successes alone and skip tasks behind a failure, until nothing changes."""
        skipped: list[Task] = []
        for task in self._until_none(lambda task: all(one.has_succeeded for one in self._before(task))):
            self._begin(task, now)
        for task in self._until_none(lambda task: bool(self._failed_before(task))):
            self._close(task, "ignorada", "dependency", "", now)
            self._record("tarefa_ignorada", task)
            skipped.append(task)
        for task in skipped:  # any of those that stood in its way may be named as the reason
            self._blame(task, self._in_its_way(task))

    def _blame_others(self, causes: Sequence[Task]) -> None:
        """These have failed no more: what stays skipped must not say so; if nothing else is in its way, they came too
        late for it."""
        openings = tuple(f"'{one.step.id}' ended as" for one in causes)
        for task in self.tasks.values():
            if task.status == "ignorada":
                left = frozenset(said for said in task.blamed if not said.startswith(openings))
                late = frozenset(
                    f"'{one.step.id}' succeeded too late for it"
                    for one in causes
                    if any(said.startswith(f"'{one.step.id}' ended as") for said in task.blamed)
                )
                self._blame(task, left | self._in_its_way(task) or late or task.blamed)

    def _in_its_way(self, task: Task) -> frozenset[str]:
        return frozenset(f"'{one.step.id}' ended as {one.status}" for one in self._failed_before(task))

    def _blame(self, task: Task, said: frozenset[str]) -> None:
        task.blamed, task.motive = said, f"^({'|'.join(sorted(said))})$"

    def _until_none(self, condition: Callable[[Task], bool]) -> Iterator[Task]:
        def found() -> Task | None:
            waiting = (task for task in self.tasks.values() if task.is_open and not task.is_begun)
            return next((task for task in waiting if condition(task)), None)

        while (task := found()) is not None:
            yield task

    def _before(self, task: Task) -> list[Task]:
        return [self.tasks[name] for name in task.step.depends_on]

    def _failed_before(self, task: Task) -> list[Task]:
        return [one for one in self._before(task) if not one.is_open and not one.has_succeeded]

    def _begin(self, task: Task, now: float) -> None:
        task.attempts += 1
        task.is_begun, task.retry_at = True, None
        self._decide_to_send(task)
        if task.deadline is None and task.step.timeout is not None:
            task.deadline = now + task.step.timeout

    def _decide_to_send(self, task: Task) -> None:
        task.to_send = True
        self.decided.add(task.step.id)

    def _close(self, task: Task, status: str, by: str | None, motive: str, now: float) -> None:
        task.status, task.ended_by, task.motive, task.ended_at = status, by, motive, now
        task.to_send, task.retry_at = False, None

    def _cancel_open(self, by: str, motive: str, now: float) -> None:
        for task in self.tasks.values():
            if task.is_open:
                self._close(task, "cancelada", by, f"^{motive}$", now)
                self._record("tarefa_cancelada", task)

    def _end(self, now: float, ended_at: float | None) -> None:
        self.status, self.ended_at = self._end_status(), ended_at
        self.edition += 1
        self.deliveries = [Delivery(edition=self.edition, due_at=now + DELIVERY_LEASE) for _ in CHANNELS]
        self.to_deliver = set(range(len(CHANNELS)))
        self.recorded.append(("orquestracao_encerrada", None))

    @property
    def is_quorum_met(self) -> bool:
        return self.asked.quorum is not None and self.succeeded >= self.asked.quorum

    def _end_status(self) -> str:
        if self.succeeded == len(self.tasks):
            return "concluida"
        if self.is_cancelled:
            return "cancelada"
        ends = {task.ended_by for task in self.tasks.values() if not task.step.optional}
        if self.asked.is_pipeline and not self.is_quorum_met:
            if ends & {"answer", "size", "own deadline"}:
                return "erro"
            if "run deadline" in ends:
                return "timeout"
        if self.succeeded:
            return "parcial"
        statuses = [task.status for task in self.tasks.values()]
        return next((status for status in ("erro", "timeout") if status in statuses), "cancelada")

    def _record(self, what: str, task: Task) -> None:
        self.recorded.append((what, task.step.id))

    # -- what a user sees ---------------------------------------------------------------------------------------

    def view(self) -> dict[str, Any]:
        seen: dict[str, Any] = {
            "status": self.status,
            "versao": self.edition,
            "resumo": self._summary(),
            "iniciada_em": to_iso(self.created_at),
            "prazo": to_iso(self.deadline),
            "concluida_em": _moment(self.ended_at),
            "duracao_ms": self._milliseconds(),
            "respostas_tardias": self.late,
            "respostas_repetidas": self.repeated,
            "entregas": [self._delivery_view(*one) for one in zip(CHANNELS, self.deliveries, strict=True)],
            "tarefas": {name: self._task_view(task) for name, task in self.tasks.items()},
        }
        if not self.is_open:
            lost = {name: task for name, task in self.tasks.items() if not task.has_succeeded}
            seen["resultados"] = {name: task.result for name, task in self.tasks.items() if task.has_succeeded}
            seen["falhas"] = {name: {"status": one.status, "tentativas": one.attempts} for name, one in lost.items()}
        return seen

    def _summary(self) -> dict[str, int]:
        statuses = [task.status for task in self.tasks.values()]
        return {"total": len(statuses)} | {word: statuses.count(status) for word, status in SUMMARY.items()}

    def _milliseconds(self) -> int | None:
        return None if self.ended_at is None else max(0, round((self.ended_at - self.created_at) * 1000))

    def _delivery_view(self, channel: str, one: Delivery) -> dict[str, Any]:
        return {
            "canal": channel,
            "status": one.status,
            "versao": one.edition,
            "tentativas": one.attempts,
            "proxima_tentativa_em": _moment(one.due_at),
            "erro": one.error,
        }

    def _task_view(self, task: Task) -> dict[str, Any]:
        percent, note = task.progress
        return {
            "id": task.step.id,
            "fila": task.step.queue,
            "status": task.status,
            "tentativas": task.attempts,
            "max_tentativas": task.allowed,
            "depende_de": list(task.step.depends_on),
            "opcional": task.step.optional,
            "fase": self._phase(task),
            "progresso": {"percentual": percent, "mensagem": note} if task.is_at_work else None,
            "enviada_em": _moment(task.shown_sent_at),
            "prazo": _moment(task.deadline),
            "proxima_tentativa_em": _moment(task.retry_at),
            "concluida_em": _moment(task.ended_at),
            "na_dlq": task.has_letter,
        }

    def _phase(self, task: Task) -> str | None:
        """Return the phase, as far as it is known without a look at the queue."""
        if task.retry_at is not None:
            return "aguardando_nova_tentativa"
        is_sent = task.status == "em_execucao" and not task.to_send
        return "em_trabalho" if is_sent and task.is_at_work else None

    def outgoing(self) -> list[dict[str, Any]]:
        """The messages that workers get, or that rest among the dead letters."""
        return [self._command(name) for name in sorted(self.decided) if self.tasks[name].to_send]

    def _command(self, name: str) -> dict[str, Any]:
        task = self.tasks[name]
        return {
            "is_letter": task.has_letter,
            "tipo_evento": task.step.answers_with.replace("resultado", "iniciar"),
            "tarefa": name,
            "tentativa": task.attempts,
            "prazo": to_iso(self.deadline_of(task)),
            "resultados": {before: self.tasks[before].result for before in task.step.depends_on},
        }


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else to_iso(seconds)
