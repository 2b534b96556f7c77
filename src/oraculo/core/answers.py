"""The reading of a worker's answer: which task it is about, and whether it failed."""

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
_MAX_NAMED = 10  # open tasks in a reason
_CLOCKS_DIFFER = 1.0  # seconds, at most, between two clocks that agree


class _Reply(msgspec.Struct):
    """The fields of an answer's payload that the orchestrator reads. They take any type, because an odd `status` is no
    reason to refuse an answer."""

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
    """Return the event that a message means for this run, or why no task was found for it.

    `prefix` is the installation's prefix of queue names, with which a worker may name its queue. `now` is the moment at
    which the message came. `tracebacks` keeps the traceback of a failure.
    """
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
        is_named = message.tarefa in run.plan.by_id  # a repeat finds its task by this name and needs no mark
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
    except msgspec.DecodeError:  # one bad field, such as a number that no double holds, must not hide the others
        fields = _fields_decoder.decode(payload)
    return _Reply(**{name: _value(fields[name]) for name in _Reply.__struct_fields__ if name in fields})


def _value(raw: msgspec.Raw) -> Any:
    """Return a value, or its text. A list stays a list, because `erros` of any kind make an answer a failure."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        text = bytes(raw).decode(errors="replace")
        return [text] if text.startswith("[") else text


def has_failed(status: object, errors: object) -> bool:
    if status is None:
        return isinstance(errors, list) and bool(errors)
    return isinstance(status, str) and status.lower() in FAILURE_WORDS


def is_result_payload(value: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is an answer's payload: it has a known `status`, or only `erros`."""
    status, errors = value.get("status"), value.get("erros")
    if status is None:
        return isinstance(errors, list | tuple) and bool(errors)
    return isinstance(status, str) and (status.lower() == SUCCESS_WORD or status.lower() in FAILURE_WORDS)


def failure_reason(payload: bytes) -> str | None:
    """Return why the worker that answered with this payload has failed, or None if it has not."""
    reply = _read_reply(payload)
    return _reason(reply) if has_failed(reply.status, reply.erros) else None


def is_failure(payload: bytes) -> bool:
    """Return whether this payload is a failure. One that cannot be read counts as a failure."""
    try:
        reply = _read_reply(payload)
    except (msgspec.DecodeError, RecursionError):
        return True
    return has_failed(reply.status, reply.erros)


def _mark_of(message: Message) -> int:
    """Return a hash that identifies the message, and is never 0."""
    return zlib.crc32(message.payload, zlib.crc32(message.timestamp.encode())) | 1


def _find_task(run: Run, message: Message, names: Sequence[str], redelivered: bool) -> int | None:
    """Return the task of an answer without a known `tarefa`.

    A name in the payload decides, or else the only task that awaits such an answer.
    """
    named = [found for name in names if (found := _named(run, name, message.tipo_evento))]
    mark = _mark_of(message) if redelivered else None
    for numbers in named:
        if (number := _one_of(run, numbers, mark)) is not None:
            return number
    if named:  # the payload names a destination, so the answer belongs to no other
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
    # When nothing is awaited, the answer is late or a repeat, and only the sole task of its kind can have it.
    return _only(run.awaited[kind]) if run.awaited[kind] else run.plan.only_of_kind[kind]


def _counted_for(run: Run, numbers: Iterable[int], mark: int | None) -> int | None:
    """Return the task that had this very message before. Its ack was lost, and another task may be awaited now."""
    return None if mark is None else next((number for number in numbers if run.tasks[number].mark == mark), None)


def _names(reply: _Reply, prefix: str) -> list[str]:
    names = (name for name in (reply.tarefa, reply.destino, reply.fonte) if isinstance(name, str))
    return list(dict.fromkeys(spelling for name in names for spelling in (name, name.removeprefix(prefix))))


def _named(run: Run, name: str, event: str) -> Sequence[int]:
    """Return the tasks of a destination that answers with this event.

    A processor may echo the `fonte` of its command, which names a collector and not its own task.
    """
    return run.plan.named(name, collects=None if event == naming.PROGRESS else event == naming.COLLECTED)


def _one_of(run: Run, numbers: Sequence[int], mark: int | None) -> int | None:
    """Return the task of a destination: its only one, the one that had this answer, or the only one awaited."""
    if len(numbers) == 1:
        return numbers[0]
    if (number := _counted_for(run, numbers, mark)) is not None:
        return number
    return _only(run.awaited_on.get(run.plan.steps[numbers[0]].queue, set()))


def _only(numbers: set[int]) -> int | None:
    return next(iter(numbers)) if len(numbers) == 1 else None


def _attempt(run: Run, number: int, given: int | None) -> int | None:
    """Return the attempt of an answer, or None for one that was never made, which may be too large for the store."""
    return given if given is not None and given <= run.tasks[number].attempt else None


def _why_not_found(run: Run, message: Message, names: Sequence[str]) -> str:
    numbers = sorted(islice(chain(run.awaited[True], run.awaited[False]), _MAX_NAMED))
    awaited = [run.plan.steps[number].id for number in numbers]
    total = len(run.awaited[True]) + len(run.awaited[False])
    more = f" and {total - len(awaited)} more" if total > len(awaited) else ""
    waiting = f"open were: {', '.join(awaited)}{more}" if awaited else "none was open"
    problem = _name_problem(run, message, names)
    return f"no task of run {run.id} fits this {message.tipo_evento}: {problem}; {waiting}"


def _name_problem(run: Run, message: Message, names: Sequence[str]) -> str:
    if message.tarefa:
        return f"{naming.shown(message.tarefa)} is not one of its tasks"
    if names and not any(map(run.plan.named, names)):
        return f"{naming.shown(names[0])} in its payload is not one of its destinations"
    collects = message.tipo_evento == naming.COLLECTED
    if message.tipo_evento in naming.ANSWER_EVENTS and run.awaited[not collects] and not run.awaited[collects]:
        return f"it has no tarefa, and the open tasks answer with {_OTHER_KIND[message.tipo_evento]}"
    return "it does not name one"


def _reason(reply: _Reply) -> str:
    errors = reply.erros if isinstance(reply.erros, list) else [] if reply.erros is None else [reply.erros]
    texts = [error if isinstance(error, str) else msgspec.json.encode(error).decode() for error in errors[:5]]
    text = "; ".join(texts) or _text(reply.mensagem) or "the worker answered with status erro"
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"


def _doubt(run: Run, number: int, reason: str, now: float) -> str | None:
    """Return the reason of a refusal that came too early, because the worker's clock is ahead.

    Such a command is tried again, because another worker may accept it.
    """
    left = deadline_of(run, run.tasks[number]) - now
    if reason != NOT_IN_TIME or left < _CLOCKS_DIFFER:
        return None
    return f"{reason} by the clock of its worker, {left:.0f} s too early: set the clocks of all machines by NTP"


def _traceback(reply: _Reply) -> str | None:
    text = reply.rastreamento
    return bounded_traceback(text) if isinstance(text, str) and text else None


def _percent(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(min(100, max(0, value)))


def _text(value: object) -> str | None:
    return value[:_MAX_REASON] if isinstance(value, str) and value else None
