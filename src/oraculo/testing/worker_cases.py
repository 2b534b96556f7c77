"""The cases that any worker must pass, in any language and with no SDK, played over its broker.

Every command asks with `responder_em` for an answer on a queue of the check. `resultados` is read too, because a worker
that ignores that field answers there. Messages of others are given back. When an engine reads `resultados`, the check
does not: it would take answers of real runs, and the engine would take those of the check.

Run one check at a time for each queue, because everything on the check's own queue counts as its answer.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from oraculo.core import machine
from oraculo.core.answers import read_answer
from oraculo.core.plan import Plan
from oraculo.core.run import Run, RunHead, Task
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.pipeline.definition import Definition, Kind, Step
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.broker_admin import DeadLetter, FullBroker, QueueState
from oraculo.ports.clock import Clock, Entropy
from oraculo.testing.mailbox import MARK, MOST_FOREIGN, Mailbox, MailboxAnswer
from oraculo.wire import naming
from oraculo.wire.message import correlation_id_of
from oraculo.wire.timestamps import in_words, to_iso

LARGE = 500_000  # bytes
UNICODE = 'ação, coração, ÀÉÎÕÜ; 漢字 かな; Ελληνικά; עברית; 🧭👩‍🔬; \u2028 "aspas" \\ barra'

_GRACE = 0.5  # seconds for an optional answer, once a later command was answered
_DEAD_LETTERING = 2.0  # seconds within which a rejected message must be a dead letter
_ONCE, _ACKED = "once", "acked"
_SETTLING = 2.0  # seconds within which an answered command must have left its queue
_PAUSE = 0.1
_MOST_DEAD_LETTERS = 10_000  # dead letters that are read


class CaseState(StrEnum):
    """The outcome of a case."""

    PASSED = "ok"
    NOTED = "aviso"  # passed, with a remark
    FAILED = "erro"
    SKIPPED = "ignorada"


class CaseVerdict(msgspec.Struct, frozen=True, rename={"name": "nome", "state": "estado", "detail": "detalhe"}):
    """The outcome of one case, with its detail."""

    name: str
    state: CaseState
    detail: str


class CaseReport(msgspec.Struct, frozen=True):
    """The verdicts of all cases, and warnings."""

    verdicts: Sequence[CaseVerdict]
    warnings: Sequence[str]

    @property
    def has_passed(self) -> bool:
        return all(verdict.state in (CaseState.PASSED, CaseState.NOTED) for verdict in self.verdicts)


class _Failed(Exception):
    """A case failed. The text says what was seen, and what would be right."""


class _Silent(_Failed):
    """A normal command got no answer, so the other cases cannot be played."""


_Finding = tuple[CaseState, str]


class _Left(NamedTuple):
    """The messages of a queue that workers hold, and those that nobody took."""

    held: int
    waiting: int


class WorkerCheck:
    """A check that plays every case against the workers of one queue. `payload` is that of a normal command."""

    def __init__(
        self,
        broker: FullBroker,
        names: naming.QueueNames,
        queue: str,
        *,
        clock: Clock,
        entropy: Entropy,
        timeout: float = 10.0,
        payload: dict[str, Any] | None = None,
    ) -> None:
        self.reply_queue = names.physical(f"verificacao.{queue}")
        self._broker = broker
        self._names = names
        self._queue = queue
        self._physical = names.physical(queue)
        self._clock = clock
        self._timeout = timeout
        self._payload = usual_payload(queue) if payload is None else payload
        self._mark = f"{MARK}{entropy.new_id()}"
        self._mail = Mailbox(broker, self._mark)
        self._reads_answers = False  # `resultados` is read
        self._warnings: list[str] = []
        self._given_ids: set[str] = set()
        self._sent: Counter[str] = Counter()  # correlation_id -> how often the command was sent
        self._before = _Left(0, 0)  # messages of others when the check began
        self._is_alone = False  # there is no engine, so nobody else has sent anything
        self._is_owed = True  # some command may still be unanswered in its queue
        self._usual: MailboxAnswer | None = None

    async def play(self) -> CaseReport:
        """Play all cases. Raises BrokerError when the broker fails, which does not concern the worker."""
        try:
            await self._open()
            report = CaseReport(await self._play_all(), self._warnings)
            owed = (one for one in report.verdicts if one.name not in (_ONCE, _ACKED))  # these two send nothing
            self._is_owed = any(one.state in (CaseState.FAILED, CaseState.SKIPPED) for one in owed)
            return report
        finally:
            await self._mail.close()
            with suppress(BrokerError):
                await self._clean()

    async def _play_all(self) -> list[CaseVerdict]:
        verdicts: list[CaseVerdict] = []
        silent_at: str | None = None
        for name, case in _CASES:
            if silent_at is not None:
                verdicts.append(CaseVerdict(name, CaseState.SKIPPED, f"not played: see {silent_at}"))
                continue
            self._mail.forget_oddities()
            try:
                verdicts.append(CaseVerdict(name, *await case(self)))
            except _Failed as failure:
                silent_at = name if isinstance(failure, _Silent) else None
                verdicts.append(CaseVerdict(name, CaseState.FAILED, str(failure)))
        return verdicts

    # -- cases: a normal command and its answer ---------------------------------------------------------------------

    async def normal_command(self) -> _Finding:
        self._usual = answer = await self._expect_normal_answer("comando")
        if answer.failure:
            return CaseState.NOTED, f"answered {answer.outcome}; give it a payload that it can work on with --payload"
        return CaseState.PASSED, f"answered on {answer.queue}"

    async def event(self) -> _Finding:
        event, right = self._usual_answer.message.tipo_evento, naming.answer_event(self._queue)
        if event != right:
            kind = "begins" if naming.is_collector(self._queue) else "does not begin"
            rule = f"a destination whose name {kind} with {naming.COLLECTOR_PREFIX} answers with {right}"
            raise _Failed(f"answered with tipo_evento {naming.shown(event)}; {rule}")
        return CaseState.PASSED, event

    async def task(self) -> _Finding:
        """Check `tarefa` as the engine finds it, with other steps of the same queue and alone."""
        message = self._usual_answer.message
        if message.tarefa == self._queue:
            return CaseState.PASSED, "echoed"
        prefix = self._names.prefix
        if not isinstance(read_answer(_run_of(self._queue, f"{self._queue}-2"), message, 0.0, prefix=prefix), str):
            return CaseState.PASSED, "not echoed, and found by a name in the payload"
        why = read_answer(_run_of(self._queue), message, 0.0, prefix=prefix)
        if isinstance(why, str):
            raise _Failed(f"the orchestrator would not know which task was answered: {why}; echo the command's tarefa")
        known = "the answer is known by its correlation_id alone"
        return CaseState.NOTED, f"not echoed: {known}, so of each kind a run can have one destination; echo tarefa"

    async def reply_to(self) -> _Finding:
        if self._usual_answer.queue == self.reply_queue:
            return CaseState.PASSED, "answered where responder_em asks"
        return CaseState.NOTED, f"answers on {self._names.answers} whatever responder_em says, which is allowed"

    # -- cases: unusual commands ------------------------------------------------------------------------------------

    async def repeated(self) -> _Finding:
        command = self._command("repetido")
        await self._send(command, command)
        correlation_id = command["correlation_id"]
        first = await self._expect_answer(correlation_id)
        await self._expect_alive("the same command twice")
        answers = await self._mail.answers(correlation_id, 2, min(_GRACE, self._timeout))
        if contrary := [each for each in answers if bool(each.failure) != bool(first.failure)]:
            seen = f"answered first {first.outcome}, then {contrary[0].outcome}"
            raise _Failed(f"{seen}: a repeat is the same work, so its answers must agree")
        return CaseState.PASSED, "both are answered, alike" if len(answers) > 1 else "answered once"

    async def unknown_fields(self) -> _Finding:
        stranger = {"campo_desconhecido": {"versao": 2, "lista": [None, 1.5, True]}}
        return await self._answered("campos", stranger | {"payload": self._payload | stranger})

    async def empty_payload(self) -> _Finding:
        return await self._answered("vazio", {"payload": {}}, may_fail=True)

    async def unicode(self) -> _Finding:
        return await self._answered("unicode", {"payload": self._payload | {"texto": UNICODE, "chave ☕": UNICODE}})

    async def large_payload(self) -> _Finding:
        try:
            return await self._answered("grande", {"payload": self._payload | {"texto": "x" * LARGE}})
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            return CaseState.NOTED, f"not played, the broker refuses such a message: {error}"

    async def past_deadline(self) -> _Finding:
        command = self._command("atrasado", prazo=to_iso(self._clock.now() - 60))
        await self._send(command)
        await self._expect_alive("a command whose prazo has passed")
        answers = await self._mail.answers(command["correlation_id"], 1, min(_GRACE, self._timeout))
        return CaseState.PASSED, f"answered {answers[0].outcome}" if answers else "left unanswered, as it may be"

    # -- cases: invalid messages ------------------------------------------------------------------------------------

    async def incomplete(self) -> _Finding:
        return await self._garbage("JSON that is no command", b'{"verificacao": "%s"}')

    async def not_an_object(self) -> _Finding:
        return await self._garbage("JSON that is no object", b'["%s"]')

    async def not_json(self) -> _Finding:
        return await self._garbage("what is not JSON", b'{"verificacao": "%s", ')

    async def not_text(self) -> _Finding:
        return await self._garbage("what is not UTF-8", b"\xff\xfe\x00 %s")

    async def _garbage(self, what: str, form: bytes) -> _Finding:
        marked = self._new_id("lixo").encode()
        await publish_all(self._broker, [Outgoing(self._physical, form % marked)])
        await self._expect_alive(what)
        dlq = naming.dlq_of(self._physical)
        letter = await self._resting_place(marked)
        if letter is not None:
            return CaseState.PASSED, f"it lives on; the message is in {dlq} ({letter.reason})"
        return CaseState.NOTED, f"it lives on; the message was dropped, or is still held: it belongs into {dlq}"

    async def _resting_place(self, marked: bytes) -> DeadLetter | None:
        """Return the dead letter with this mark. The worker's client may have changed other bytes of it."""
        deadline = self._clock.now() + min(_DEAD_LETTERING, self._timeout)
        while True:
            for letter in await self._letters(self._physical):
                if marked in letter.body:
                    return letter
            if self._clock.now() >= deadline:
                return None
            await asyncio.sleep(_PAUSE)

    # -- last cases: all answers together, and what is left ---------------------------------------------------------

    async def answered_once(self) -> _Finding:
        """Check all commands so far. Late answers have arrived by now."""
        twice = self._answered_too_often()
        if not twice:
            return CaseState.PASSED, f"{len(self._sent)} commands, none answered more often than it was sent"
        last, count = next(reversed(self._sent.items()))
        await self._mail.answers(last, count + 1, min(_GRACE, self._timeout))  # it should not stay in the queue
        seen = f"{len(twice)} of {len(self._sent)} commands were answered more than once"
        if all(answer.message.tarefa == self._queue for answers in twice for answer in answers):
            return CaseState.NOTED, f"{seen}: the first answer counts, and the others are work for nothing"
        danger = "a further answer may be taken for that of another step"
        raise _Failed(f"{seen}, without their tarefa: {danger}; answer each once, and echo tarefa")

    def _answered_too_often(self) -> list[list[MailboxAnswer]]:
        each = ((self._mail.answers_so_far(given), count) for given, count in self._sent.items())
        return [answers for answers, count in each if len(answers) > count]

    async def acked(self) -> _Finding:
        """Check what is still held, if the broker reports it: RabbitMQ, for one, does not report it here."""
        deadline = self._clock.now() + min(_SETTLING, self._timeout)
        while True:
            left = await self._left()
            if not any(left) or self._clock.now() >= deadline:
                break
            await asyncio.sleep(_PAUSE)
        if left.held:
            return self._unacked(left.held)
        if left.waiting and (finding := await self._untaken(left.waiting)):
            return finding
        return CaseState.PASSED, f"nothing of {self._physical} is held any more, as far as the broker says"

    def _unacked(self, count: int) -> _Finding:
        dlq = naming.dlq_of(self._physical)
        right = f"ack each command once its answer is confirmed, and what is no command once it is in {dlq}"
        seen = f"{count} of the messages in {self._physical} are still held"
        if self._is_alone or count >= len(self._given_ids):
            raise _Failed(f"{seen}: they will come again; {right}")
        return CaseState.NOTED, f"{seen}: an engine's, perhaps; if not, {right}"

    async def _untaken(self, waiting: int) -> _Finding | None:
        """Return a finding for messages that were answered and still wait. None when nothing waiting was answered.

        The messages may belong to others, so only a few are looked at. Nothing is read from a broker that does not say
        what is held: there the messages are left to the workers.
        """
        state = await self._state(self._physical)
        if state is None or state.unacked is None or not (self._is_alone or waiting >= len(self._given_ids)):
            return None
        answered = await self._withdraw()
        if answered == 0:
            return None
        right = "on Redis read with XREADGROUP in the group of that name, on NATS by its durable consumer"
        beside = f"the worker reads beside the queue; {right}"
        if answered is None:
            seen = f"{waiting} more messages wait in {self._physical} than before"
            return CaseState.NOTED, f"{seen}: an engine's, perhaps; if not, {beside}"
        seen = f"{answered} messages that were answered still wait in {self._physical}"
        raise _Failed(f"{seen}: {beside}")

    async def _left(self) -> "_Left":
        """Return how many more messages there are than before the check."""
        now = await self._in_queue()
        return _Left(max(0, now.held - self._before.held), max(0, now.waiting - self._before.waiting))

    async def _in_queue(self) -> "_Left":
        """Return the messages of the queue. A delayed one was taken once, so it does not count as waiting."""
        state = await self._state(self._physical)
        return _Left(0, 0) if state is None else _Left(state.unacked or 0, state.ready - state.delayed)

    # -- asking -----------------------------------------------------------------------------------------------------

    def _new_id(self, label: str) -> str:
        given = f"{self._mark}-{len(self._given_ids)}-{label}"
        self._given_ids.add(given)
        return given

    def _command(self, label: str, **fields: Any) -> dict[str, Any]:
        now = self._clock.now()
        return {
            "correlation_id": self._new_id(label),
            "tipo_evento": naming.command_event(self._queue),
            "payload": self._payload,
            "timestamp": to_iso(now),
            "tarefa": self._queue,
            "tentativa": 1,
            "responder_em": self.reply_queue,
            "prazo": to_iso(now + self._timeout),
        } | fields

    async def _send(self, *commands: dict[str, Any]) -> None:
        self._sent.update(command["correlation_id"] for command in commands)
        await publish_all(
            self._broker, [Outgoing(self._physical, msgspec.json.encode(command)) for command in commands]
        )

    async def _answered(self, label: str, fields: dict[str, Any], *, may_fail: bool = False) -> _Finding:
        """Check that a command which differs from a normal one is answered like it, and the next one too."""
        command = self._command(label, **fields)
        await self._send(command)
        try:
            answer = await self._expect_answer(command["correlation_id"])
        except _Failed as failure:
            await self._expect_alive(f"this ({failure})")
            raise
        await self._expect_alive("this command")
        if answer.failure and not may_fail and not self._usual_answer.failure:
            return CaseState.NOTED, f"answered {answer.outcome}; a normal command succeeds"
        return CaseState.PASSED, f"answered {answer.outcome}"

    async def _expect_alive(self, after_what: str) -> None:
        try:
            await self._expect_normal_answer("vivo")
        except _Failed as failure:
            raise _Silent(f"after {after_what} a normal command is not answered any more: {failure}") from None

    async def _expect_normal_answer(self, label: str) -> MailboxAnswer:
        command = self._command(label)
        await self._send(command)
        try:
            return await self._expect_answer(command["correlation_id"])
        except _Failed as failure:
            raise _Silent(str(failure)) from None

    async def _expect_answer(self, correlation_id: str) -> MailboxAnswer:
        answers = await self._mail.answers(correlation_id, 1, self._timeout)
        if not answers:
            raise _Failed(await self._why_none())
        return answers[0]

    @property
    def _usual_answer(self) -> MailboxAnswer:
        assert self._usual is not None, "no case is played after a first one without an answer"
        return self._usual

    # -- why there is no answer -------------------------------------------------------------------------------------

    async def _why_none(self) -> str:
        waited = f"no answer in {in_words(self._timeout)}"
        if self._mail.malformed:
            return f"{waited}, but on {'; on '.join(self._mail.malformed[:3])}"
        if strange := self._mail.ids_beside(self._given_ids):
            seen = f"came an answer with correlation_id {naming.shown(strange[0])}"
            return f"{waited}, but on {self.reply_queue} {seen}: copy it from the command, unchanged"
        return "; ".join([waited, *await self._clues()])

    async def _clues(self) -> list[str]:
        state = await self._state(self._physical)
        if state is not None and state.consumers == 0:
            return [f"nobody reads {self._physical}: is the worker running, on this broker and with this prefix?"]
        clues = []
        if state is not None and state.ready:
            clues.append(f"{state.ready} waiting in {self._physical}, which the worker does not take")
        if any(self._mark.encode() in letter.body for letter in await self._letters(self._names.answers)):
            clues.append(f"answers of it are in {naming.dlq_of(self._names.answers)}, where an engine put them")
        if not self._reads_answers:
            clues.append(
                f"{self._names.answers} was not read, so a worker that answers there and does not look at responder_em "
                "seems silent: stop the engine, or give worker and check an ORACULO_PREFIX of their own"
            )
        elif state is not None and state.consumers is None:
            clues.append(f"an engine that reads {self._names.answers} may have taken it")
        if self._mail.foreign:
            some = ", ".join(list(self._mail.foreign)[:3])
            clues.append(f"on {self._names.answers} there are messages that are not of this check ({some})")
        if self._names.prefix:
            clues.append(f"answers are awaited on {self._names.answers}, with the prefix, or where responder_em says")
        return clues

    # -- before and after -------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        await self._broker.declare([self._physical, self._names.answers, self.reply_queue])
        self._before = await self._in_queue()
        await self._mail.listen(self.reply_queue, is_own=True)
        state = await self._state(self._names.answers)
        self._is_alone = state is not None and state.consumers == 0
        why_not = _why_not_read(state) if state is not None else None
        if why_not is None:
            self._reads_answers = True
            await self._mail.listen(self._names.answers, is_shared=state is None or state.consumers is None)
        else:
            trust = "the check relies on responder_em; a worker that does not look at it will seem silent"
            self._warnings.append(f"{self._names.answers} is not read: {why_not}; {trust}")

    async def _clean(self) -> None:
        """Remove what the check left behind, except what a worker holds."""
        if self._is_owed:
            await self._withdraw()
        for queue in (self._physical, self._names.answers):
            ours = [letter.id for letter in await self._letters(queue) if self._mark.encode() in letter.body]
            if ours:
                await self._broker.discard(queue, ours)

    async def _withdraw(self) -> int | None:
        """Take back the check's commands that nobody took, and give back all other messages.

        No more are taken than wait at first, so that this ends even while work keeps coming. Returns how many had been
        answered all the same, or None when too many wait.
        """
        state = await self._state(self._physical)
        if state is None or not state.ready:
            return 0
        if state.ready > MOST_FOREIGN:
            return None
        answered, left = 0, state.ready
        consumer = await self._broker.consume(self._physical, prefetch=left)
        try:
            with suppress(TimeoutError):
                while left > 0:
                    async with asyncio.timeout(_GRACE):
                        taken = await consumer.take(left)
                    left -= len(taken)
                    ours = [each for each in taken if self._mark.encode() in each.body]
                    answered += sum(self._was_answered(each.body) for each in ours)
                    await consumer.ack(ours)
        finally:
            await consumer.close()
        return answered

    def _was_answered(self, body: bytes) -> bool:
        given = correlation_id_of(body)
        return given is not None and bool(self._mail.answers_so_far(given))

    async def _state(self, queue: str) -> QueueState | None:
        return next(iter(await self._broker.queues([queue])), None)

    async def _letters(self, queue: str) -> Sequence[DeadLetter]:
        return await self._broker.dead_letters(queue, limit=_MOST_DEAD_LETTERS)


_CASES: tuple[tuple[str, Callable[[WorkerCheck], Awaitable[_Finding]]], ...] = (
    ("command", WorkerCheck.normal_command),
    ("tipo_evento", WorkerCheck.event),
    ("tarefa", WorkerCheck.task),
    ("responder_em", WorkerCheck.reply_to),
    ("repeated", WorkerCheck.repeated),
    ("unknown fields", WorkerCheck.unknown_fields),
    ("empty payload", WorkerCheck.empty_payload),
    ("unicode", WorkerCheck.unicode),
    ("500 kB", WorkerCheck.large_payload),
    ("past prazo", WorkerCheck.past_deadline),
    ("no command", WorkerCheck.incomplete),
    ("no object", WorkerCheck.not_an_object),
    ("not JSON", WorkerCheck.not_json),
    ("not UTF-8", WorkerCheck.not_text),
    (_ONCE, WorkerCheck.answered_once),
    (_ACKED, WorkerCheck.acked),
)
CASE_NAMES = tuple(name for name, _ in _CASES)


def usual_payload(queue: str) -> dict[str, Any]:
    """Return the payload of a plain command. A collector gets its `fonte`, as in a pipeline."""
    return {"fonte": naming.source_of(queue), "parametros": {}} if naming.is_collector(queue) else {}


def _why_not_read(answers: QueueState) -> str | None:
    if answers.consumers:
        return "an engine, or another check, reads it, and would take answers from this check, and this check from it"
    if answers.ready > MOST_FOREIGN:
        return f"{answers.ready} messages of others wait there"
    return None


def _run_of(*queues: str) -> Run:
    """Return a run that waits for the answers of these destinations."""
    steps = tuple(Step(id=queue, queue=queue) for queue in queues)
    plan = Plan(Definition(name="", steps=steps, kind=Kind.FAN_OUT))
    head = RunHead("verificacao", "", "", 0.0, 1.0, 1.0, len(steps))
    run = Run(head, plan, b"", b"{}", [Task(number) for number in range(len(steps))])
    machine.start(run, 0.0)
    return run
