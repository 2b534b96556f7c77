"""Reading a worker's answer: did it fail, and which task is it about."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from math import inf
from typing import Any

import msgspec

from oraculo.core.command import deadline_of
from oraculo.core.events import Answered, Event, Progressed
from oraculo.core.run import Run
from oraculo.wire import naming
from oraculo.wire.answers import NOT_IN_TIME
from oraculo.wire.message import Message
from oraculo.wire.tracebacks import bounded_traceback

SUCCESS_WORD = "ok"
FAILURE_WORDS = frozenset({"erro", "error", "falha", "failed", "failure"})
_MAX_REASON = 500
_OTHER_KIND = {naming.COLLECTED: naming.EXECUTED, naming.EXECUTED: naming.COLLECTED}
_NAMED = 10  # open tasks that a reason names
_CLOCKS_AGREE = 1.0  # seconds within which they do


class _Reply(msgspec.Struct):
    """The fields of an answer's payload that mean something to the orchestrator. Any type is let through: a worker
    that writes an odd `status` must not have its answer refused."""

    status: Any = None
    erros: Any = None
    repetir: Any = None
    rastreamento: Any = None
    tarefa: Any = None
    destino: Any = None
    fonte: Any = None
    percentual: Any = None
    mensagem: Any = None


_reply_decoder = msgspec.json.Decoder(_Reply)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def read_answer(
    run: Run,
    message: Message,
    jitter: float,
    *,
    now: float = inf,
    prefix: str = "",
    redelivered: bool = False,
    tracebacks: bool = True,
) -> Event | str:
    """The event that the message means for this run, or, in words, why no task could be found for it. `prefix`: what
    the installation puts before the names of its queues, and a worker may know its own by. `now`: when it came.
    `tracebacks`: whether they are kept."""
    payload = bytes(message.payload)
    try:
        reply = _read_reply(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"payload cannot be read: {error}"
    number = None if message.tarefa is None else run.plan.by_id.get(message.tarefa)
    if number is None:
        names = _names(reply, prefix)
        if (number := _find_task(run, message, names, redelivered)) is None:
            return _why_not_found(run, message, names)
    attempt = _attempt(run, number, message.tentativa)
    if message.tipo_evento == naming.PROGRESS:
        return Progressed(number, _percent(reply.percentual), _text(reply.mensagem), attempt)
    if not has_failed(reply.status, reply.erros):
        is_named = message.tarefa in run.plan.by_id  # then it is found again without a mark
        return Answered(number, attempt, payload, mark=0 if is_named else _mark_of(message))
    reason = _reason(reply)
    doubt = _doubt(run, number, reason, now)
    return Answered(
        number,
        attempt,
        payload,
        failed=True,
        retryable=reply.repetir is not False or doubt is not None,
        reason=doubt or reason,
        mark=_mark_of(message),
        redelivered=redelivered,
        jitter=jitter,
        traceback=_traceback(reply) if tracebacks else None,
    )


def _read_reply(payload: bytes) -> _Reply:
    try:
        return _reply_decoder.decode(payload)
    except msgspec.DecodeError:  # a number that no double holds, say: it must not cost the fields that can be read
        fields = _fields_decoder.decode(payload)
    return _Reply(**{name: _value(fields[name]) for name in _Reply.__struct_fields__ if name in fields})


def _value(raw: msgspec.Raw) -> Any:
    """A list stays one, whatever is in it: that there are `erros` makes an answer a failure."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        if bytes(raw).startswith(b"["):
            return [_item(item) for item in _items_decoder.decode(raw)]
        return _as_written(raw)


def _item(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return _as_written(raw)


def _as_written(raw: msgspec.Raw) -> str:
    return bytes(raw).decode(errors="replace")


def has_failed(status: object, errors: object) -> bool:
    if status is None:
        return isinstance(errors, list) and bool(errors)
    return isinstance(status, str) and status.lower() in FAILURE_WORDS


def is_result_payload(value: Mapping[Any, Any]) -> bool:
    """Return whether a mapping reads as an answer's payload: its `status` is one, or it has only `erros`."""
    status, errors = value.get("status"), value.get("erros")
    if status is None:
        return isinstance(errors, list | tuple) and bool(errors)
    return isinstance(status, str) and (status.lower() == SUCCESS_WORD or status.lower() in FAILURE_WORDS)


def failure_reason(payload: bytes) -> str | None:
    """Return why the worker that answered with this payload has failed, or None if it has not."""
    reply = _read_reply(payload)
    return _reason(reply) if has_failed(reply.status, reply.erros) else None


def is_failure(payload: bytes) -> bool:
    """Whether an answer with this payload is one; also when it cannot be told."""
    try:
        reply = _read_reply(payload)
    except (msgspec.DecodeError, RecursionError):
        return True
    return has_failed(reply.status, reply.erros)


def _mark_of(message: Message) -> int:
    """Tells it from others; never 0."""
    return zlib.crc32(message.payload, zlib.crc32(message.timestamp.encode())) | 1


def _find_task(run: Run, message: Message, names: Sequence[str], redelivered: bool) -> int | None:
    """Where `tarefa` does not tell: by a name in the payload, or the only task that awaits such an answer."""
    named = [found for name in names if (found := _named(run, name, message.tipo_evento))]
    mark = _mark_of(message) if redelivered else None
    for numbers in named:
        if (number := _one_of(run, numbers, mark)) is not None:
            return number
    if named:  # it said whose it is: it must not be taken for the answer of another destination
        return None
    if message.tipo_evento == naming.PROGRESS:
        kinds = [numbers for numbers in run.awaited.values() if numbers]
        if not kinds:
            return 0 if len(run.plan) == 1 else None
        return _only(kinds[0]) if len(kinds) == 1 else None
    kind = message.tipo_evento == naming.COLLECTED
    of_kind = (number for number, collects in enumerate(run.plan.is_collector) if collects is kind)
    if (number := _counted_for(run, of_kind, mark)) is not None:
        return number
    # With nothing awaited it is late or a repeat, and can only be of the one task that ever awaited its kind.
    return _only(run.awaited[kind]) if run.awaited[kind] else run.plan.only_of_kind[kind]


def _counted_for(run: Run, numbers: Iterable[int], mark: int | None) -> int | None:
    """The task that had this very message before: its ack was lost, and another may be awaited now."""
    return None if mark is None else next((number for number in numbers if run.tasks[number].mark == mark), None)


def _names(reply: _Reply, prefix: str) -> list[str]:
    names = (name for name in (reply.tarefa, reply.destino, reply.fonte) if isinstance(name, str))
    return list(dict.fromkeys(spelling for name in names for spelling in (name, name.removeprefix(prefix))))


def _named(run: Run, name: str, event: str) -> Sequence[int]:
    """A name that a worker only echoes, as a processor does the `fonte` it was given, does not make the answer
    another's: the destination must be of the kind that answers with this event."""
    return run.plan.named(name, collects=None if event == naming.PROGRESS else event == naming.COLLECTED)


def _one_of(run: Run, numbers: Sequence[int], mark: int | None) -> int | None:
    """Of the tasks of one destination, its only one, the one that had this answer, or the only one that awaits one."""
    if len(numbers) == 1:
        return numbers[0]
    if (number := _counted_for(run, numbers, mark)) is not None:
        return number
    return _only(run.awaited_on.get(run.plan.steps[numbers[0]].queue, set()))


def _only(numbers: set[int]) -> int | None:
    return next(iter(numbers)) if len(numbers) == 1 else None


def _attempt(run: Run, number: int, told: int | None) -> int | None:
    """An attempt that was never made tells nothing; nor may a number of any size reach the store."""
    return told if told is not None and told <= run.tasks[number].attempt else None


def _why_not_found(run: Run, message: Message, names: Sequence[str]) -> str:
    numbers = sorted(islice(chain(run.awaited[True], run.awaited[False]), _NAMED))
    awaited = [run.plan.steps[number].id for number in numbers]
    total = len(run.awaited[True]) + len(run.awaited[False])
    more = f" and {total - len(awaited)} more" if total > len(awaited) else ""
    waiting = f"open were: {', '.join(awaited)}{more}" if awaited else "none was open"
    told = _told_of(run, message, names)
    return f"no task of run {run.id} could be told for this {message.tipo_evento}: {told}; {waiting}"


def _told_of(run: Run, message: Message, names: Sequence[str]) -> str:
    if message.tarefa:
        return f"{naming.shown(message.tarefa)} is not one of its tasks"
    if names and not any(map(run.plan.named, names)):
        return f"{naming.shown(names[0])} in its payload is none of its destinations"
    collects = message.tipo_evento == naming.COLLECTED
    if message.tipo_evento in naming.ANSWER_EVENTS and run.awaited[not collects] and not run.awaited[collects]:
        return f"it says no tarefa, and those that are open answer with {_OTHER_KIND[message.tipo_evento]}"
    return "the message does not tell which"


def _reason(reply: _Reply) -> str:
    errors = reply.erros if isinstance(reply.erros, list) else [] if reply.erros is None else [reply.erros]
    texts = [error if isinstance(error, str) else msgspec.json.encode(error).decode() for error in errors[:5]]
    text = "; ".join(texts) or _text(reply.mensagem) or "the worker answered with status erro"
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"


def _doubt(run: Run, number: int, reason: str, now: float) -> str | None:
    """A worker whose clock is ahead refuses commands that have time enough: another may not, so they are tried again,
    and it is said whose clock is to be looked at."""
    left = deadline_of(run, run.tasks[number]) - now
    if reason != NOT_IN_TIME or left < _CLOCKS_AGREE:
        return None
    return f"{reason} by the clock of its worker, {left:.0f} s too early: let the clocks of all machines be set by NTP"


def _traceback(reply: _Reply) -> str | None:
    text = reply.rastreamento
    return bounded_traceback(text) if isinstance(text, str) and text else None


def _percent(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(min(100, max(0, value)))


def _text(value: object) -> str | None:
    return value[:_MAX_REASON] if isinstance(value, str) and value else None
