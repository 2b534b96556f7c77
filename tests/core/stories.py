"""Random stories of a run, played on the core and to the model of it; where the two differ is found after each step.

A story is data: a run that is asked for, and steps that depend on nothing that came before, so that any of them can be
left out and what remains is a story too. That is how a long one is made short.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

import msgspec

from oraculo.core import machine
from oraculo.core.aggregate import end_status
from oraculo.core.answers import read_answer
from oraculo.core.command import encode_command
from oraculo.core.events import (
    BrokerLost,
    Cancelled,
    DeadLetterDiscarded,
    Delivered,
    DeliveryFailed,
    Event,
    Progressed,
    Redriven,
    Repeated,
    RunDue,
    Sent,
    TaskDue,
    Unsendable,
)
from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, Run, RunHead, Task
from oraculo.core.views import run_view
from oraculo.wire.message import decode_message
from oraculo.wire.timestamps import to_iso

from .building import RUN_ID, START, check_laws, pipeline, run_of
from .model import CHANNELS, MAX_BACKOFF, Model
from .model_state import Asked, Reply, Step
from .model_state import Task as ModelTask

RUN_TIMEOUT = 30.0
QUEUES = ("escavador_a", "escavador_b", "executador_c", "d-queue")
VIAS = ("rabbitmq", "redis")
SUCCESSES: Sequence[dict[str, Any]] = (
    {"status": "ok"},
    {"resultado": "ok"},
    {"status": "OK", "erros": ["x"]},
    {"erros": []},
)
FAILURES: Sequence[dict[str, Any]] = ({"status": "erro"}, {}, {"status": "Failed"}, {"status": None})
_head = msgspec.json.Decoder(RunHead)
_task = msgspec.json.Decoder(Task)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_IS_AMONG: dict[str, Callable[[ModelTask], bool]] = {
    "all": lambda task: True,
    "open": lambda task: task.is_open and task.attempts > 0,
    "ended": lambda task: not task.is_open and not task.has_succeeded,
    "unsent": lambda task: task.to_send,
}


class Differs(AssertionError):
    """The core and the model do not agree."""


class Act(Protocol):
    def play(self, stage: "Stage") -> None: ...


@dataclass(frozen=True)
class Story:
    asked: Asked
    steps: tuple[tuple[float, Act], ...]  # the seconds that pass before it, and what happens

    def __str__(self) -> str:
        asked = self.asked
        kind = f"{'pipeline' if asked.is_pipeline else 'fan-out'}, quorum {asked.quorum}, amends {asked.amends}"
        lines = [kind, *(f"  {step}" for step in asked.steps), *(f"{wait:+g} s {act}" for wait, act in self.steps)]
        return "\n".join(lines)


class Stage:
    """A run of the core and its model side by side, with a store that keeps what was committed."""

    def __init__(self, asked: Asked) -> None:
        self.now = START
        self.run = _run(asked)
        self.model = Model(asked, START)
        self.changes = machine.start(self.run, self.now)
        self.replies: list[Reply] = []
        self._rows: dict[int, bytes] = {}
        self._check(0)
        self.commit()

    # -- what happens -------------------------------------------------------------------------------------------

    def pick(self, which: int, among: str = "all") -> tuple[int, str]:
        """A task by its number and its name: of all, or of those that are open, ended or unsent, if there are any."""
        tasks = list(self.model.tasks.values())
        fitting = [number for number, task in enumerate(tasks) if _IS_AMONG[among](task)] or range(len(tasks))
        number = fitting[which % len(fitting)]
        return number, tasks[number].step.id

    def apply(self, event: Event, expected: str | None) -> None:
        """`expected`: the verdict of the model, which has had the event."""
        said = len(self.changes.history)
        verdict = str(machine.apply(self.run, event, self.now, self.changes))
        _expect("the verdict", verdict, expected)
        self._check(said)

    def answer(self, reply: Reply, redelivered: bool, jitter: float) -> None:
        self.replies.append(reply)
        event = read_answer(self.run, decode_message(_encoded(reply)), jitter, redelivered=redelivered)
        expected = self.model.answered(reply, redelivered, jitter, self.now)
        if isinstance(event, str):
            _expect("whose it is", event, expected and f"recorded, and the answer is {expected}", same=expected is None)
        else:
            self.apply(event, expected)

    def commit(self) -> None:
        """Write what changed, and nothing else. Then send and deliver."""
        changes = self.changes
        self._rows |= {number: msgspec.json.encode(task) for number, task in changes.tasks.items()}
        if changes.dirty:
            self._stored_head = msgspec.json.encode(self.run.head)
        _expect("what is sent", _outgoing(self.run, changes), self.model.outgoing())
        _expect("what is delivered", set(changes.deliver), self.model.to_deliver)
        if self.run.is_open:
            _expect("the promised end", str(end_status(self.run)), _if_nobody_answers(self.model))
        self.model.to_deliver, self.model.decided = set(), set()
        self._stored_model = self.model.copied()
        self.changes = Changes(self.run)

    def reload(self) -> None:
        """Load the run as after a crash: uncommitted changes are gone."""
        tasks = [_task.decode(self._rows[number]) for number in range(len(self.run.tasks))]
        for task in tasks:
            task.missing = 0
        self.run = Run(_head.decode(self._stored_head), self.run.plan, self.run.definition, self.run.payload, tasks)
        self.model = self._stored_model.copied()
        self.changes = Changes(self.run)
        self._check(0)

    # -- where they differ --------------------------------------------------------------------------------------

    def _check(self, said: int) -> None:
        _expect("the run", _seen(self.run), self.model.view())
        for task in self.run.tasks:
            expected = self.model.tasks[self.run.plan.steps[task.number].id]
            _expect(f"the timer of {expected.step.id}", task.due_at, expected.rings_at)
            _expect(f"whether {expected.step.id} is to be sent", task.unsent, expected.to_send)
            motive = expected.failure if expected.is_open else expected.motive
            matches = (task.reason is None) if not motive else bool(re.search(motive, task.reason or ""))
            _expect(f"the reason of {expected.step.id}", task.reason, motive, same=matches)
        _expect("the timer of the run", self.run.head.due_at, self.model.rings_at)
        _expect(
            "the history",
            sorted(map(self._recorded, self.changes.history[said:])),
            sorted(map(str, self.model.recorded)),
        )
        self.model.recorded.clear()
        check_laws(self.run)

    def _recorded(self, entry: HistoryEntry) -> str:
        return str((str(entry.what), None if entry.task is None else self.run.plan.steps[entry.task].id))


def _expect(what: str, core: object, model: object, *, same: bool | None = None) -> None:
    if same is None:
        same = core == model
    if not same:
        where, core, model = _narrowed(what, core, model)
        raise Differs(f"{where}: the core says {core!r}, the model {model!r}")


def _narrowed(what: str, core: Any, model: Any) -> tuple[str, Any, Any]:
    """Return the first part in which two large objects differ."""
    if isinstance(core, dict) and isinstance(model, dict):
        key = next(key for key in core | model if core.get(key) != model.get(key))
        return _narrowed(f"{what}, {key}", core.get(key), model.get(key))
    return what, core, model


def _seen(run: Run) -> dict[str, Any]:
    """Return what a user sees of the run, but for its names and the words of the reasons."""
    view = run_view(run)
    for name in ("correlation_id", "pipeline", "prioridade", "links", "definicao"):
        del view[name]
    view["tarefas"] = {one["id"]: _without(one, "motivo") for one in map(msgspec.json.decode, view["tarefas"])}
    view["entregas"] = [_without(one, "destino") for one in view["entregas"]]
    if "resultados" in view:
        view["resultados"] = {name: bytes(result) for name, result in view["resultados"].items()}
        view["falhas"] = {name: _without(one, "motivo") for name, one in view["falhas"].items()}
    return view


def _without(view: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in view.items() if key != name}


def _outgoing(run: Run, changes: Changes) -> list[dict[str, Any]]:
    decided = {(*one, False) for one in changes.commands} | {(*one, True) for one in changes.dead_letters}
    messages = []
    for number, attempt, is_letter in decided:
        task = run.tasks[number]
        if task.unsent and task.attempt == attempt and task.is_open is not is_letter:  # else overtaken in its batch
            command = _read_command(encode_command(run, task, to_iso(START), "resultados"))
            messages.append({"is_letter": is_letter} | command)
    return sorted(messages, key=lambda message: str(message["tarefa"]))


def _read_command(body: bytes) -> dict[str, Any]:
    command = decode_message(body)
    payload = _fields.decode(command.payload)
    results = _fields.decode(payload.get("resultados", b"{}"))
    seen = {name: getattr(command, name) for name in ("tipo_evento", "tarefa", "tentativa", "prazo")}
    return seen | {"resultados": {name: bytes(result) for name, result in results.items()}}


def _if_nobody_answers(model: Model) -> str:
    future = model.copied()
    while future.is_open:
        timers = [(task.rings_at, name) for name, task in future.tasks.items() if task.rings_at is not None]
        moment, name = min(timers, default=(future.deadline, ""))
        if moment < future.deadline:
            future.task_rings(name, moment)
        else:
            future.run_rings(future.deadline)
    return future.status


# -- what may happen --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Confirm:
    """A broker's confirm, of this attempt or of one before; also of what was lost and found unsent by a sweep."""

    task: int
    via: str
    is_old: bool
    mistakes_kind: bool  # a letter's for a command's, or the reverse
    ago: float

    def play(self, stage: Stage) -> None:
        number, name = stage.pick(self.task, "unsent")
        task = stage.model.tasks[name]
        attempt, at, letter = task.attempts - self.is_old, stage.now - self.ago, task.has_letter ^ self.mistakes_kind
        expected = stage.model.sent(name, attempt, letter, self.via, at)
        stage.apply(Sent(number, attempt, letter, self.via, at), expected)


@dataclass(frozen=True)
class TooLarge:
    """A command of this attempt, or of one before, is more than any broker takes."""

    task: int
    is_old: bool

    def play(self, stage: Stage) -> None:
        number, name = stage.pick(self.task, "unsent")
        attempt = stage.model.tasks[name].attempts - self.is_old
        expected = stage.model.unsendable(name, attempt, "too large", stage.now)
        stage.apply(Unsendable(number, attempt, "too large"), expected)


@dataclass(frozen=True)
class Answer:
    """An answer that names its task by `tarefa`, by a name in the payload or not at all, and any attempt or none."""

    task: int
    among: str
    ok: bool
    how: str
    of_attempt: int | None
    number: int
    event: str | None = None
    may_retry: bool = True
    redelivered: bool = False
    jitter: float = 0.5

    def play(self, stage: Stage) -> None:
        stage.answer(self._reply(stage), self.redelivered, self.jitter)

    def _reply(self, stage: Stage) -> Reply:
        task = stage.model.tasks[stage.pick(self.task, self.among)[1]]
        names = self._names(task.step)
        return Reply(
            event=self.event or task.step.answers_with,
            payload=json.dumps(names | self._said()).encode(),
            timestamp=to_iso(START + self.number),
            tarefa=task.step.id if self.how == "tarefa" else None,
            tentativa=None if self.of_attempt is None else max(1, task.attempts + self.of_attempt),
            names=tuple(names.values()),
            reason=None if self.ok else self._reason,
            may_retry=self.may_retry,
        )

    def _names(self, step: Step) -> dict[str, str]:
        """Return the fields of the payload that name the destination."""
        short = step.queue.removeprefix("escavador_").removeprefix("executador_")
        said = {
            "task": {"tarefa": step.id},
            "queue": {"destino": step.queue},
            "short": {"fonte": short},
            "both": {"destino": step.queue, "fonte": step.id},
        }
        return said.get(self.how, {})

    def _said(self) -> dict[str, Any]:
        if self.ok:
            return SUCCESSES[self.number % len(SUCCESSES)] | {"n": self.number}
        failure = FAILURES[self.number % len(FAILURES)] | {"erros": [self._reason]}
        return failure if self.may_retry else failure | {"repetir": False}

    @property
    def _reason(self) -> str:
        return f"boom{self.number}"


@dataclass(frozen=True)
class AnswerAgain:
    """The same message once more: the broker's doing, or the worker's."""

    which: int
    redelivered: bool

    def play(self, stage: Stage) -> None:
        if stage.replies:
            stage.answer(stage.replies[-1 - self.which % len(stage.replies)], self.redelivered, 0.5)


@dataclass(frozen=True)
class Progress:
    task: int
    percent: float | None
    note: str | None
    of_attempt: int | None  # 0: the last that was made, -1: the one before

    def play(self, stage: Stage) -> None:
        number, name = stage.pick(self.task)
        made = stage.model.tasks[name].attempts
        attempt = None if self.of_attempt is None or not made else max(1, made + self.of_attempt)
        expected = stage.model.progressed(name, self.percent, self.note, attempt)
        stage.apply(Progressed(number, self.percent, self.note, attempt), expected)


@dataclass(frozen=True)
class Ring:
    """A task's timer, or the run's: on time or not."""

    task: int | None

    def play(self, stage: Stage) -> None:
        if self.task is None:
            stage.apply(RunDue(), stage.model.run_rings(stage.now))
        else:
            number, name = stage.pick(self.task)
            stage.apply(TaskDue(number), stage.model.task_rings(name, stage.now))


@dataclass(frozen=True)
class WaitForTimer:
    """Wait until a timer is due. Then every due timer rings, the run's first or last."""

    run_first: bool

    def play(self, stage: Stage) -> None:
        due = [task.rings_at for task in stage.model.tasks.values()] + [stage.model.rings_at]
        stage.now = max(stage.now, min((moment for moment in due if moment is not None), default=stage.now))
        timers: list[int | None] = [*range(len(stage.run.tasks))]
        for timer in [None, *timers] if self.run_first else [*timers, None]:
            Ring(timer).play(stage)


@dataclass(frozen=True)
class Cancel:
    def play(self, stage: Stage) -> None:
        stage.apply(Cancelled(), stage.model.cancel(stage.now))


@dataclass(frozen=True)
class Repeat:
    def play(self, stage: Stage) -> None:
        stage.apply(Repeated(), stage.model.repeat(stage.now))


@dataclass(frozen=True)
class Redrive:
    task: int
    among: str

    def play(self, stage: Stage) -> None:
        number, name = stage.pick(self.task, self.among)
        stage.apply(Redriven(number), stage.model.redrive(name, stage.now))


@dataclass(frozen=True)
class Discard:
    task: int

    def play(self, stage: Stage) -> None:
        number, name = stage.pick(self.task, "ended")
        stage.apply(DeadLetterDiscarded(number), stage.model.discard(name))


@dataclass(frozen=True)
class LoseBroker:
    via: str
    letters: bool
    ago: float | None

    def play(self, stage: Stage) -> None:
        before = None if self.ago is None else stage.now - self.ago
        said = stage.model.lost(self.via, self.letters, before, stage.now)
        stage.apply(BrokerLost(self.via, self.letters, before), said)


@dataclass(frozen=True)
class Deliver:
    """News of a delivery: of this `versao`, or of the one before."""

    channel: int
    is_old: bool
    error: str | None
    retry_in: float | None

    def play(self, stage: Stage) -> None:
        edition = stage.model.edition - self.is_old
        retry_at = None if self.error is None or self.retry_in is None else stage.now + self.retry_in
        expected = stage.model.delivered(self.channel, edition, self.error, retry_at)
        if self.error is None:
            stage.apply(Delivered(self.channel, edition), expected)
        else:
            stage.apply(DeliveryFailed(self.channel, edition, self.error, retry_at), expected)


@dataclass(frozen=True)
class Commit:
    def play(self, stage: Stage) -> None:
        stage.commit()


@dataclass(frozen=True)
class Reload:
    is_crash: bool

    def play(self, stage: Stage) -> None:
        if not self.is_crash:
            stage.commit()
        stage.reload()


# -- making, playing and shortening -----------------------------------------------------------------------------


def story_of(seed: int) -> Story:
    chance = Random(seed)
    steps = tuple((_wait(chance), _act(chance, number)) for number in range(chance.randint(5, 60)))
    return Story(_asked(chance), steps)


def _asked(chance: Random) -> Asked:
    count = chance.randint(1, 6)
    is_pipeline = chance.random() < 0.75
    steps = [_step(chance, number, is_pipeline) for number in range(count)]
    chance.shuffle(steps)  # what depends on another may stand before it
    quorum = chance.randint(1, count) if chance.random() < 0.5 else None
    return Asked(tuple(steps), is_pipeline, RUN_TIMEOUT, quorum, is_pipeline and chance.random() < 0.5)


def _step(chance: Random, number: int, is_pipeline: bool) -> Step:
    timeout = chance.choice([5.0, 20.0, RUN_TIMEOUT, 45.0]) if chance.random() < 0.5 else None
    step = Step(f"s{number}", chance.choice(QUEUES), timeout=timeout)
    if not is_pipeline:
        return step
    before = tuple(f"s{other}" for other in range(number) if chance.random() < 0.45)
    attempts, backoff = chance.randint(1, 4), chance.choice([0.0, 1.0, 40.0])
    return replace(step, depends_on=before, attempts=attempts, backoff=backoff, optional=chance.random() < 0.3)


def _wait(chance: Random) -> float:
    odd = chance.choice([-20.0, 1.0, 3600.0 if chance.random() < 0.2 else 1.0])
    return chance.choice([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 2.0, 9.0, odd])


def _act(chance: Random, number: int) -> Act:
    task, rarely, often = chance.randrange(60), chance.random() < 0.1, chance.random() < 0.5
    via, ago = chance.choice(VIAS), chance.choice([0.0, 0.0, 1.0, 15.0])
    acts: list[tuple[int, Act]] = [
        (40, _answer(chance, task, number)),
        (14, Confirm(task, via, is_old=rarely, mistakes_kind=chance.random() < 0.1, ago=ago)),
        (2, TooLarge(task, is_old=rarely)),
        (7, AnswerAgain(chance.randrange(3), redelivered=often)),
        (3, Ring(None if rarely else task)),
        (7, WaitForTimer(run_first=often)),
        (10, Commit()),
        (5, Reload(is_crash=often)),
        (3, Cancel()),
        (6, Repeat()),
        (9, Redrive(task, "all" if rarely else "ended")),
        (1, Discard(task)),
        (3, LoseBroker(via, letters=often, ago=chance.choice([None, ago]))),
        (3, _delivery(chance)),
        (2, _progress(chance, task)),
    ]
    return chance.choices([act for _, act in acts], [weight for weight, _ in acts])[0]


def _progress(chance: Random, task: int) -> Progress:
    percent, note = chance.choice([None, 40.0]), chance.choice([None, "meio"])
    return Progress(task, percent, note, of_attempt=chance.choice([None, 0, -1]))


def _answer(chance: Random, task: int, number: int) -> Answer:
    return Answer(
        task,
        among=chance.choice(["open", "open", "ended", "all"]),
        ok=chance.random() < 0.4,
        how=chance.choice(["tarefa", "tarefa", "task", "queue", "short", "both", "nothing"]),
        of_attempt=chance.choice([None, None, 0, 0, -1, 1]),
        number=number,
        event=chance.choice(["resultado_coleta", "resultado_execucao"]) if chance.random() < 0.1 else None,
        may_retry=chance.random() < 0.8,
        redelivered=chance.random() < 0.2,
        jitter=chance.choice([0.0, 0.5, 0.9, 0.9, chance.random()]),
    )


def _delivery(chance: Random) -> Deliver:
    error = chance.choice([None, "answered 500"])
    return Deliver(chance.randrange(len(CHANNELS)), chance.random() < 0.3, error, chance.choice([None, 4.0]))


def _run(asked: Asked) -> Run:
    request = {"webhook": "http://h/x", "responder_em": "q"}
    options: dict[str, Any] = {"timeout": asked.timeout} | ({} if asked.quorum is None else {"quorum": asked.quorum})
    if not asked.is_pipeline:
        destinations = [{"id": step.id, "fila": step.queue} | _own_timeout(step) for step in asked.steps]
        return run_of({"destinos": destinations} | request | options)
    options["onLate"] = "amend" if asked.amends else "record"
    return run_of({"pipeline": "p"} | request, pipeline(*map(_pipeline_step, asked.steps), **options))


def _own_timeout(step: Step) -> dict[str, Any]:
    return {} if step.timeout is None else {"timeout": step.timeout}


def _pipeline_step(step: Step) -> dict[str, Any]:
    retry = {"maxAttempts": step.attempts, "backoff": step.backoff, "maxBackoff": MAX_BACKOFF}
    named = {"type": step.id, "queue": step.queue, "dependsOn": list(step.depends_on), "optional": step.optional}
    return named | {"retry": retry} | _own_timeout(step)


def _encoded(reply: Reply) -> bytes:
    said = {"tarefa": reply.tarefa, "tentativa": reply.tentativa}
    body = {"correlation_id": RUN_ID, "tipo_evento": reply.event, "timestamp": reply.timestamp}
    head = json.dumps(body | {name: value for name, value in said.items() if value is not None})
    return head[:-1].encode() + b', "payload": ' + reply.payload + b"}"


def difference(story: Story) -> str | None:
    """Return the first difference between the core and the model, if there is one."""
    try:
        stage = Stage(story.asked)
        for wait, act in story.steps:
            stage.now += wait
            act.play(stage)
        stage.commit()
        stage.now = max(stage.now, stage.model.deadline)
        WaitForTimer(run_first=False).play(stage)
        stage.commit()
        _expect("whether it has ended", stage.run.is_open, False)
    except Exception as error:  # noqa: BLE001 - one that the core raises is a difference too
        return f"{type(error).__name__}: {error}"
    return None


def shortest(story: Story) -> Story:
    """Return the story without every step that its difference does not need."""
    steps: Sequence[tuple[float, Act]] = story.steps
    for size in (8, 4, 2, 1, 1):
        at = 0
        while at < len(steps):
            fewer = (*steps[:at], *steps[at + size :])
            if difference(replace(story, steps=fewer)):
                steps = fewer
            else:
                at += size
    return replace(story, steps=tuple(steps))
