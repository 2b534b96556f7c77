"""The oracle: compares each run with the outcome that the contract gives it.

It sees requests, answers that workers published, answers that reached an engine, and all that users see of a run: its
document, history, commands and aggregates. From the history it takes only the order of an engine's decisions. Each line
must have its reason in an event at that moment, and all its consequences must be there. Where the contract allows two
outcomes, both are allowed: an answer in flight at the deadline, or the jitter of a pause. Nothing is imported from the
engine or the core.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from oraculo.settings import RunSettings
from oraculo.testing.simulation.documents import (
    LISTED_STRAYS,
    Document,
    aggregate_fault,
    read,
    read_document,
    run_fault,
    seconds,
    shown,
    tasks_fault,
)
from oraculo.testing.simulation.expected_run import (
    Asked,
    ExpectedAnswer,
    ExpectedRun,
    ExpectedTask,
    collector_parameters,
    first_difference,
    read_answer,
    read_asked,
)
from oraculo.testing.simulation.timeline import Timeline, is_shown_as

COURTESY = 2.0  # seconds for which each engine leaves a timer to the engine before it
Identity = tuple[str, str, int | None]  # run, task, attempt
PATIENCE = 4.0  # seconds within which an engine decides what is due
MOST_DECIDED = 20

_SLACK = 0.0011


class Claim(NamedTuple):
    """One line of a run's history."""

    what: str
    task: str | None
    attempt: int | None
    detail: str
    time: float


class Stretch(NamedTuple):
    """The moments between which an engine decided a commit."""

    since: float
    until: float


@dataclass(eq=False)
class _Taken:
    """An answer that an engine took from the broker."""

    answer: ExpectedAnswer
    host: str
    consumer: object
    at: float
    redelivered: bool
    left: int = 1  # decisions that it may still explain; more after a lost commit


@dataclass(eq=False)
class _RunRecord:
    """One run, and what the oracle keeps for it."""

    run: ExpectedRun
    aggregates: dict[int, ExpectedRun] = field(default_factory=dict)  # by `versao`
    delivered: set[tuple[str, int]] = field(default_factory=set)
    dead_letters: set[tuple[str, int]] = field(default_factory=set)  # published dead letters: task, attempt


class Oracle:
    """The oracle of runs."""

    def __init__(
        self,
        pipelines: Mapping[str, Mapping[str, Any]],
        defaults: RunSettings,
        engines: int,
        brokers: int,
        timeline: Timeline,
        report: Callable[[str], None],
    ) -> None:
        self._pipelines = pipelines
        self._defaults = defaults
        self.timeline = timeline
        self.report = report
        # Engines wait for one that died for a while, so even a single engine has another before it.
        self.patience = PATIENCE + COURTESY * engines
        self._asked: dict[str, list[tuple[float, Asked]]] = {}
        self._requests: dict[tuple[str | None, bytes], str] = {}  # key and body -> the run that is asked for
        self._keys: dict[str, tuple[str, bytes]] = {}  # idempotency key -> the run and body that came first
        self.operators: list[tuple[str, str]] = []  # the operation, and its run or queue
        self._watched: dict[str, _RunRecord] = {}
        self._taken: dict[str, list[_Taken]] = {}  # run -> answers
        self.used: dict[str, list[_Taken]] = {}  # host -> answers that explain its last commit
        self.published: set[tuple[str, str, int]] = set()  # commands that a broker took
        self._brokers = brokers
        self._too_large_for: dict[Identity, set[str]] = {}  # command -> the brokers that refused it

    # -- requests and answers -------------------------------------------------------------------------------------

    def asked(self, body: bytes, key: str | None, moment: float) -> str:
        """Record a request and return the id of its run."""
        asked = read_asked(body, self._pipelines, self._defaults)
        self._asked.setdefault(asked.run_id, []).append((moment, asked))
        self._requests[key, body] = asked.run_id
        return asked.run_id

    def accepted(self, run_id: str, key: str | None, body: bytes) -> None:
        """Record that a client's request was accepted as this run."""
        if key is not None and self._keys.setdefault(key, (run_id, body)) != (run_id, body):
            self.report(f"run {run_id} was given under the key {key}, which another request has")

    def refused(self, key: str | None, body: bytes, why: str) -> None:
        """Check a refusal: a valid request is refused only when another has its key or its `correlation_id`."""
        run_id = self._requests[key, body]
        others = (one for one in self._requests.items() if one[0] != (key, body))
        if not any(another == run_id or (key is not None and its_key == key) for (its_key, _), another in others):
            self.report(f"the request for run {run_id} under the key {key} was refused: {why}")

    def operator_asks(self, kind: str, subject: str) -> None:
        self.operators.append((kind, subject))

    def took(self, host: str, consumer: object, body: bytes, *, redelivered: bool, moment: float) -> None:
        """Record that an engine took an answer from the broker."""
        answer = read_answer(body)
        if answer is not None:
            taken = _Taken(answer, host, consumer, moment, redelivered)
            self._taken.setdefault(answer.run_id, []).append(taken)

    def acked(self, host: str, body: bytes) -> None:
        answer = read_answer(body)
        watched = None if answer is None else self._watched.get(answer.run_id)
        if answer is None or watched is None or answer.task not in watched.run.tasks:
            return
        theirs = [one for one in self.answers_at(answer.run_id, host) if one.answer.task == answer.task]
        mine = sorted((one for one in theirs if one.answer == answer), key=lambda one: one.left > 0)
        spent = next((one for one in theirs if one.left <= 0), None)
        if not mine:
            return
        if mine[0].left > 0:
            if spent is None:
                if watched.run.late + watched.run.repeated < LISTED_STRAYS:
                    self.report(f"run {answer.run_id}: an answer of '{answer.task}' was acked and had no effect")
                return
            spent.left, mine[0].left = mine[0].left, 0  # of two late answers, this was the other one
        self._taken[answer.run_id].remove(mine[0])

    def put_aside(self, consumer: object, body: bytes) -> None:
        """Record that an engine dead-lettered an answer, or gave it back."""
        answer = read_answer(body)
        if answer is not None:
            theirs = self._taken.get(answer.run_id, [])
            one = next((one for one in theirs if one.consumer is consumer and one.answer == answer), None)
            if one is not None:
                theirs.remove(one)

    def released(self, consumer: object) -> None:
        """Record that the unsettled messages of a consumer went back to the broker."""
        for theirs in self._taken.values():
            for one in theirs:
                if one.consumer is consumer:
                    one.consumer = None

    def died(self, host: str) -> None:
        for run_id in self._taken:
            self._taken[run_id] = [one for one in self._taken[run_id] if one.host != host]

    def commit_was_lost(self, host: str) -> None:
        """Record that a commit was written and the engine does not know it: it decides the same answers once more."""
        for one in self.used.get(host, ()):
            one.left += 1

    def too_large(self, server: str, command: Identity) -> None:
        self._too_large_for.setdefault(command, set()).add(server)

    def is_too_large_for_all(self, command: Identity) -> bool:
        return len(self._too_large_for.get(command, ())) == self._brokers

    def answers_at(self, run_id: str, host: str) -> list[_Taken]:
        return [one for one in self._taken.get(run_id, ()) if one.host == host]

    # -- commits --------------------------------------------------------------------------------------------------

    def begins_commit(self, host: str) -> None:
        self.used[host] = []

    def committed(self, host: str, run_id: str, claims: Sequence[Claim], document: bytes, moment: float) -> None:
        """Check an engine's commit of a run: its history, and the document that users see now."""
        view = read_document(document)
        stretch = Stretch(self.timeline.began_to_decide(host, moment), moment)
        watched = self._watched.get(run_id)
        if watched is None:
            watched = self._created(run_id, claims, view, stretch)
            if watched is None:
                return
            claims = claims[1:]
        _Commit(self, watched, host, stretch, view).follow(claims)

    def _created(self, run_id: str, claims: Sequence[Claim], view: Document, stretch: Stretch) -> _RunRecord | None:
        asked = self._asked.get(run_id, [])
        if not asked or not claims or claims[0].what != "orquestracao_iniciada":
            self.report(f"run {run_id} was created and nobody asked for it")
            return None
        first = min(moment for moment, _ in asked)
        created_at = claims[0].time
        if self.timeline.moment_of(created_at, first, stretch.until) is None:
            self.report(f"run {run_id} says that it began at a moment that was not, since it was asked for")
            return None
        candidates = [ExpectedRun(each, created_at) for _, each in asked]
        fits = (one for one in candidates if tasks_fault(one, view) is None)
        watched = self._watched[run_id] = _RunRecord(next(fits, candidates[0]))
        watched.run.follows.clear()
        return watched

    # -- commands and aggregates ----------------------------------------------------------------------------------

    def command_sent(self, queue: str, body: bytes, priority: int, letter_reason: str | None) -> None:
        """Check a command, or the dead letter of a task, that an engine published."""
        message = read_document(body)
        if "tarefa" not in message:  # a broker mark of engines
            return
        run_id, name = read(message["correlation_id"]), read(message["tarefa"])
        watched = self._watched.get(run_id)
        if watched is None or name not in watched.run.tasks:
            return
        task, attempt = watched.run.tasks[name], read(message["tentativa"])
        at = f"the command of '{name}' of run {run_id}, attempt {attempt},"
        if queue != task.step.queue:
            self.report(f"{at} was sent to {queue}, and must go to {task.step.queue}")
        if letter_reason is not None:
            watched.dead_letters.add((name, attempt))
            if task.has_dead_letter and attempt == task.attempts and task.reason not in letter_reason:
                self.report(f"{at} rests with the reason {letter_reason!r}, which lacks {task.reason!r}")
            return
        self.published.add((run_id, name, attempt))
        if attempt in task.commands and (fault := self._command_fault(watched.run, task, attempt, message, priority)):
            self.report(f"{at} {fault}")

    def _command_fault(
        self, run: ExpectedRun, task: ExpectedTask, attempt: int, message: Document, priority: int
    ) -> str | None:
        command, step = task.commands[attempt], task.step
        event = "iniciar_coleta" if step.collects else "iniciar_execucao"
        if read(message["tipo_evento"]) != event:
            return f"is {read(message['tipo_evento'])}, and must be {event}"
        if not is_shown_as(command.deadline, seconds(read(message["prazo"]))):
            return f"has the prazo {read(message['prazo'])}, and must have {shown(command.deadline)}"
        if priority != run.asked.priority:
            return f"has priority {priority}, and must have {run.asked.priority}"
        if not run.asked.is_pipeline:
            own = read(step.payload or run.asked.payload)
            return None if read(message["payload"]) == own else f"hands on another payload than {own}"
        return self._payload_fault(run, task, attempt, read_document(message["payload"]))

    def _payload_fault(self, run: ExpectedRun, task: ExpectedTask, attempt: int, payload: Document) -> str | None:
        expected: dict[str, Any] = {"config": task.step.config, "entrada": read(run.asked.payload)}
        if task.step.collects:
            expected["fonte"] = task.step.queue.removeprefix("escavador_")
            expected["parametros"] = collector_parameters(run.asked.payload, task.step.config)
        fault = first_difference(expected, {key: read(raw) for key, raw in payload.items()})
        if fault is not None:
            return f"is wrong: {fault}"
        given = read_document(payload["resultados"])
        allowed = task.commands[attempt].results
        if given.keys() != allowed.keys() or any(bytes(given[name]) not in allowed[name] for name in allowed):
            return f"hands on {bytes(payload['resultados'])!r}, and its dependencies gave {dict(allowed)}"
        return None

    def delivered(self, run_id: str, channel: str, body: bytes) -> None:
        aggregate = read_document(body)
        watched, edition = self._watched.get(run_id), read(aggregate["versao"])
        if watched is None:
            return
        watched.delivered.add((channel, edition))
        expected = watched.aggregates.get(edition)
        if expected is None:
            self.report(f"run {run_id} was delivered as versao {edition}, which it never had")
        elif (fault := aggregate_fault(expected, aggregate)) is not None:
            self.report(f"run {run_id} was delivered to {channel} as versao {edition}: {fault}")

    # -- time passes ----------------------------------------------------------------------------------------------

    def second(self, moment: float) -> None:
        """Check that nothing is overdue while nothing holds the engines up."""
        for run_id, watched in self._watched.items():
            run = watched.run
            for name, task in run.tasks.items():
                if task.is_open and task.is_begun:
                    due = run.deadline_of(task) if task.retry_at is None else task.retry_at
                    if self.is_late(due, moment):
                        self.report(f"run {run_id}: '{name}' was due at {shown(due)} and nothing happens")
        for run_id, theirs in self._taken.items():
            for one in theirs:
                is_waiting = one.left > 0 and one.consumer is not None and run_id in self._watched
                if is_waiting and self.timeline.calm_within(one.at, moment) > self.patience:
                    self.report(f"run {run_id}: an engine has an answer of '{one.answer.task}' and decides nothing")

    def is_late(self, due: float, moment: float) -> bool:
        passed = self.timeline.passed_at(due, moment)
        return passed is not None and self.timeline.calm_within(passed, moment) > self.patience

    def at_rest(self, documents: Mapping[str, bytes], resting: Iterable[tuple[str, str, int]] | None) -> None:
        """Check everything at the end. `resting` are the commands among the dead letters.

        It is None when some may be lost.
        """
        for run_id, watched in self._watched.items():
            run = watched.run
            if (fault := run_fault(run, read_document(documents[run_id]))) is not None:
                self.report(f"run {run_id} at rest: {fault}")
            for name in run.asked.channels:
                if not run.is_open and (name, run.edition) not in watched.delivered:
                    self.report(f"run {run_id} ended as versao {run.edition}, which never reached {name}")
            for name, task in run.tasks.items():
                if task.has_dead_letter and (name, task.attempts) not in watched.dead_letters:
                    self.report(f"run {run_id}: '{name}' failed for good and no dead letter was sent")
        if resting is not None:
            there = set(resting)
            for run_id, watched in self._watched.items():
                for name, task in watched.run.tasks.items():
                    if task.has_dead_letter and (run_id, name, task.attempts) not in there:
                        self.report(f"run {run_id}: the dead letter of '{name}' is not among the others")


class _Commit:
    """The claims of one commit about one run, followed line by line."""

    def __init__(self, oracle: Oracle, watched: _RunRecord, host: str, stretch: Stretch, view: Document) -> None:
        self._oracle = oracle
        self._timeline = oracle.timeline
        self._watched = watched
        self._run = watched.run
        self._host = host
        self._stretch = stretch
        self._view = view
        self._tasks = {each["id"]: each for each in read(view["tarefas"])}

    def _report(self, how: str) -> None:
        self._oracle.report(f"run {self._run.asked.run_id}: {how}")

    def follow(self, claims: Sequence[Claim]) -> None:
        left = list(claims)
        while left:
            claim = left.pop(0)
            for each in [
                claim,
                *takewhile(_is_cancelled, left),
            ]:  # these may have just begun
                if each.task is not None and each.attempt is not None:
                    self._begin_until(self._run.tasks[each.task], each.attempt)
            if self._run.follows[claim.what, claim.task] > 0:
                self._run.follows[claim.what, claim.task] -= 1
            elif (fault := self._fault_of(claim, left)) is not None:
                self._report(f"{claim.what} {claim.task or ''} {claim.detail!r}: {fault}")
                return
        for name, task in self._run.tasks.items():
            if task.is_begun:
                self._begin_until(task, self._tasks[name]["tentativas"])
                self._learn_retry(task)
        missing = +self._run.follows
        if missing:
            self._report(
                f"{', '.join(f'{what} {task or str()}'.strip() for what, task in missing)} is missing in the history"
            )
        elif (fault := run_fault(self._run, self._view)) is not None:
            self._report(fault)
        self._run.follows.clear()
        self._learn_results()
        if not self._run.is_open:
            self._watched.aggregates.setdefault(self._run.edition, self._run.as_it_is())

    def _fault_of(self, claim: Claim, following: list[Claim]) -> str | None:
        """Return why this line has no reason in what happened, or None. Then its effect is expected from now on."""
        task = None if claim.task is None else self._run.tasks[claim.task]
        moment = self._timeline.moment_of(claim.time, *self._stretch)
        if moment is None:
            return "says a moment at which it cannot have been decided"
        if claim.what == "tarefa_cancelada":
            return self._cancelled(claim)
        if claim.what in ("orquestracao_reaberta", "tarefa_reaberta"):
            return self._reopened(claim, following)
        if task is None:
            return self._of_the_run(claim)
        if claim.what == "tarefa_timeout":
            return self._timed_out(task, claim, moment)
        if claim.what == "tarefa_enviada":
            return self._sent(task, claim)
        if claim.what == "carta_morta_descartada":
            task.has_dead_letter = False
            return None if ("discard", task.step.queue) in self._oracle.operators else "nobody asked for it"
        if claim.what in _ANSWERED:
            return self._answered(task, claim, moment)
        return None if claim.what in ("progresso", "resposta_recusada") else "does not follow from anything"

    # -- answers --------------------------------------------------------------------------------------------------

    def _answered(self, task: ExpectedTask, claim: Claim, moment: float) -> str | None:
        verdict = _ANSWERED[claim.what]
        if self._is_too_large(task, claim):
            self._run.cannot_send(task, claim.time)
            return None
        there = [one for one in self._theirs(task) if one.left > 0]
        fits = [one for one in there if self._run.verdict(one.answer, redelivered=one.redelivered) == verdict]
        if claim.what in ("resposta_tardia", "resposta_repetida"):
            fits = [one for one in fits if self._is_of(one, task, claim)]
        if verdict == "falha":
            fits = [one for one in fits if (one.answer.reason or "") in claim.detail and self._fits(one, task, claim)]
        if not fits:
            known = [(one.answer.attempt, one.answer.payload) for one in there]
            return f"none of the answers that {self._host} has makes it so: {known}"
        one = fits[0]
        one.left -= 1
        self._oracle.used.setdefault(self._host, []).append(one)
        return self._take_in(task, one, {each.answer.payload for each in fits}, claim, moment)

    def _theirs(self, task: ExpectedTask) -> list[_Taken]:
        mine = self._oracle.answers_at(self._run.asked.run_id, self._host)
        return [one for one in mine if one.answer.task == task.step.id]

    def _is_too_large(self, task: ExpectedTask, claim: Claim) -> bool:
        key = (self._run.asked.run_id, task.step.id, claim.attempt)
        return claim.what == "tarefa_erro" and "too large" in claim.detail and self._oracle.is_too_large_for_all(key)

    def _is_of(self, one: _Taken, task: ExpectedTask, claim: Claim) -> bool:
        """Return True when the answer is of that task and of an attempt that was made."""
        attempt = one.answer.attempt
        return (None if attempt is None or attempt > task.attempts else attempt) == claim.attempt

    def _fits(self, one: _Taken, task: ExpectedTask, claim: Claim) -> bool:
        """Return True when the failure's outcome is right: final, over the deadline, or followed by another attempt."""
        if claim.attempt != task.attempts:
            return False
        has_passed = self._run.deadline_of(task) <= claim.time
        if claim.what == "tarefa_erro":
            return not has_passed and self._run.why_final(task, one.answer, claim.time) is not None
        return has_passed or not self._run.must_be_final(task, one.answer, claim.time)

    def _take_in(
        self, task: ExpectedTask, one: _Taken, payloads: set[bytes], claim: Claim, moment: float
    ) -> str | None:
        run = self._run
        if task.is_open and self._oracle.is_late(run.deadline_of(task), moment):
            return f"its deadline was {shown(run.deadline_of(task))}"
        if claim.what == "tarefa_concluida":
            run.succeed(task, payloads, claim.time)
        elif claim.what == "resposta_tardia_aceita":
            run.amend(task, payloads, claim.time)
        elif claim.what == "tentativa_falhou":
            run.attempt_failed(task, one.answer, claim.time)
        elif claim.what == "tarefa_erro":
            run.fail(task, one.answer, claim.time)
        elif claim.what == "resposta_tardia":
            run.late += 1
        else:
            run.repeated += 1
        return None

    def _learn_results(self) -> None:
        """Learn from the document which of several answers that came together was taken."""
        if "resultados" in self._view:
            for name, raw in read_document(self._view["resultados"]).items():
                self._run.tasks[name].results &= {bytes(raw)}

    # -- time -----------------------------------------------------------------------------------------------------

    def _timed_out(self, task: ExpectedTask, claim: Claim, moment: float) -> str | None:
        due = self._run.deadline_of(task)
        if not task.is_open or not task.is_begun:
            return "it was not awaited"
        if due > claim.time:
            return f"its deadline is {shown(due)}"
        if self._oracle.is_late(due, moment):
            return f"its deadline was {shown(due)}, and nothing held this engine up"
        passed = self._timeline.passed_at(due, moment)
        if passed is not None and any(self._would_succeed(one, passed) for one in self._theirs(task)):
            return "its answer was there in time"
        self._run.time_out(task, claim.time)
        return None

    def _would_succeed(self, one: _Taken, deadline: float) -> bool:
        """Return True when an engine had a success for long enough before the deadline."""
        if one.left <= 0 or one.consumer is None:
            return False
        verdict = self._run.verdict(one.answer, redelivered=one.redelivered)
        had_time = self._timeline.calm_within(one.at, deadline) > self._oracle.patience
        return verdict == "tarefa_concluida" and had_time

    def _begin_until(self, task: ExpectedTask, attempt: int) -> None:
        """Begin attempts whose pause is over, up to the one that the document shows."""
        if task.retry_between is None or attempt != task.attempts + 1:
            return
        earliest = task.retry_between[0] if task.retry_at is None else task.retry_at
        until = self._stretch.until
        if self._timeline.latest_time(self._stretch.since, until) < earliest - _SLACK:
            self._report(f"attempt {attempt} of '{task.step.id}' began before {shown(earliest)}")
        elif task.retry_at is not None and self._oracle.is_late(task.retry_at, until):
            self._report(f"attempt {attempt} of '{task.step.id}' was due at {shown(task.retry_at)}")
        self._run.begin_again(task, self._timeline.time(until))

    def _learn_retry(self, task: ExpectedTask) -> None:
        next_at = seconds(self._tasks[task.step.id]["proxima_tentativa_em"])
        if task.retry_between is None or task.retry_at is not None or next_at is None:
            return
        earliest, latest = task.retry_between
        if not earliest - _SLACK <= next_at <= latest + _SLACK or next_at > self._run.deadline_of(task) + _SLACK:
            stretch = f"{shown(earliest)} to {shown(min(latest, self._run.deadline_of(task)))}"
            self._report(f"the next attempt of '{task.step.id}' is due at {shown(next_at)}, not within {stretch}")
        task.retry_at = next_at

    def _sent(self, task: ExpectedTask, claim: Claim) -> str | None:
        if (self._run.asked.run_id, task.step.id, claim.attempt or 0) not in self._oracle.published:
            return "no broker took its command"
        if claim.attempt != task.attempts or not task.is_open or task.retry_between is not None:
            return "it was not to be sent"
        task.status = "em_execucao"
        return None

    # -- operators ------------------------------------------------------------------------------------------------

    def _cancelled(self, claim: Claim) -> str | None:
        if ("cancel", self._run.asked.run_id) not in self._oracle.operators or not self._run.is_open:
            return "nobody asked for it"
        self._run.cancel(claim.time)
        self._run.follows[claim.what, claim.task] -= 1
        return None

    def _reopened(self, claim: Claim, following: list[Claim]) -> str | None:
        """Handle a reopening by `repetir` or by a redrive. The following lines say of which tasks."""
        names: list[str] = []
        for each in [claim, *following]:
            if each.what == "tarefa_reaberta" and each.task is not None:
                names.append(each.task)
            elif each is not claim:
                break
        opened = self._opened_by(names)
        if not opened:
            return f"nobody asked for it, or not of these: {names}"
        self._run.reopen(opened, claim.time)
        self._run.follows[claim.what, claim.task] -= 1
        return None

    def _opened_by(self, names: list[str]) -> set[str]:
        run, asked = self._run, self._oracle.operators
        everything = run.unsuccessful()
        may_repeat = not run.is_open and not run.is_quorum_met and ("repeat", run.asked.run_id) in asked
        if may_repeat and set(names) == everything:
            return everything
        if not names or run.tasks[names[0]].is_open or run.tasks[names[0]].has_succeeded:
            return set()
        hopeful = run.hopeful_with(names[0])
        was_asked = ("redrive", run.tasks[names[0]].step.queue) in asked
        return hopeful if was_asked and hopeful == set(names[: len(hopeful)]) else set()

    def _of_the_run(self, claim: Claim) -> str | None:
        if claim.what in ("broker_perdido", "resposta_recusada"):
            return None
        if claim.what not in ("entrega_concluida", "entrega_falhou", "entrega_abandonada"):
            return "does not follow from anything"
        channel = claim.detail.split(" ", 1)[0]
        one = next((one for one in self._run.deliveries if one.channel == channel), None)
        if one is None or one.status != "pendente":
            return "there was nothing to deliver"
        one.attempts += 1
        if claim.what == "entrega_concluida":
            one.status = "entregue"
            return None if (channel, one.edition) in self._watched.delivered else "it was not brought there"
        one.status = "nao_entregue" if claim.what == "entrega_abandonada" else one.status
        return None


def _is_cancelled(claim: Claim) -> bool:
    return claim.what == "tarefa_cancelada"


_ANSWERED = {
    "tarefa_concluida": "tarefa_concluida",
    "resposta_tardia_aceita": "resposta_tardia_aceita",
    "tentativa_falhou": "falha",
    "tarefa_erro": "falha",
    "resposta_tardia": "resposta_tardia",
    "resposta_repetida": "resposta_repetida",
}
