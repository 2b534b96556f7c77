"""Reads what Celery's callbacks and events say of a task: its value, or that it failed, and why."""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from kombu.utils import json as kombu_json

from oraculo.bridges.celery.tasks import ADDRESS, FAILED, RETURNED, ReturnAddress, read_address
from oraculo.errors import Fault, InvalidMessage, OraculoError
from oraculo.wire import naming
from oraculo.wire.answers import describe

NO_REASON = "the Celery task failed; no event of its worker said why, its log does"
PICKLED = (
    "Celery's worker answered with pickle, which ORÁCULO does not read: "
    "an earlier version sent the task, or the app overrides the serializer of `oraculo.*`, which must be json"
)
# What would happen again in just the same way.
_HOPELESS = frozenset({"NotRegistered", "EncodeError", "TaskRevokedError"})
_PICKLE = "application/x-python-serialize"
_JSON = "application/json"
_MOST_TEXT = 2000
_MOST_UNQUOTED = 10_000  # characters; longer texts stay as they are quoted
_SHOWN = re.compile(r"(\w+)\((.*)\)", re.DOTALL)  # an exception, as repr() shows it
_POOLS_OWN = "ExceptionWithTraceback("  # Celery's pool shows its own exceptions so; their traceback names them


class Report(msgspec.Struct, frozen=True):
    """What became of a task. `reason` is None when it succeeded, with `value`.

    `failed_id`: the id of a failed task; only an event of its worker knows the reason.
    """

    command: ReturnAddress
    value: Any = None
    reason: str | None = None
    retry: bool = True
    failed_id: str = ""


def read_report(body: bytes | str, content_type: str | None, task: object) -> Report:
    """Raises InvalidMessage, saying why it is no report of ours."""
    try:
        return _read(body, content_type, task)
    except InvalidMessage:
        raise
    except Exception as error:  # whatever others wrote, and however it breaks the reading, it is no report of ours
        raise InvalidMessage(Fault("", f"cannot be read: {describe(error)}")) from error


def _read(body: bytes | str, content_type: str | None, task: object) -> Report:
    named, args, keywords = _contents(body, content_type)
    task = task or named
    command = read_address(keywords.get(ADDRESS))
    if task == RETURNED:
        return Report(command, value=args[0] if args else None)
    if task != FAILED:
        raise InvalidMessage(Fault("task", f"{naming.shown(task)} is none of ours"))
    return Report(command, reason=NO_REASON, failed_id=str(args[0]) if args else "")


def failure(command: ReturnAddress, kind: str, text: str) -> Report:
    """`kind`: the name of the exception's class, `text`: what it says."""
    reason = f"{kind}: {text}" if kind and text else kind or text or NO_REASON
    return Report(command, reason=reason[:_MOST_TEXT], retry=kind not in _HOPELESS)


def is_pickle(content_type: str | None) -> bool:
    """Return whether a report is a pickle. A few bytes of it may take gigabytes or seconds, so none is read."""
    return content_type == _PICKLE


def told_by(event: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of the exception's class and its text, of an event `task-failed`."""
    shown = str(event.get("exception") or "")
    if shown.startswith(_POOLS_OWN):
        name, _, text = str(event.get("traceback") or "").rstrip().rpartition("\n")[2].partition(": ")
        kind = name.rpartition(".")[2]
    else:
        found = _SHOWN.fullmatch(shown)
        kind, text = (found[1], _unquoted(found[2])) if found else ("", shown)
    return kind[:_MOST_TEXT], text[:_MOST_TEXT]  # many are kept, whoever's they are


def _unquoted(arguments: str) -> str:
    """Return the text where it is the only argument, else the arguments as they are."""
    if arguments[:1] not in ("'", '"') or len(arguments) > _MOST_UNQUOTED:
        return arguments
    try:
        read = ast.literal_eval(arguments)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return arguments
    return read if isinstance(read, str) else arguments


def reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, OraculoError) else describe(error)


def _contents(body: bytes | str, content_type: str | None) -> tuple[object, Sequence[Any], dict[str, Any]]:
    """The task's name, where it is in the body, and its arguments."""
    if is_pickle(content_type):
        raise InvalidMessage(Fault("body", PICKLED))
    try:
        read = kombu_json.loads(body, object_hook=_typed)
        if isinstance(read, dict):  # version 1 of Celery's protocol
            named, args, keywords = read.get("task"), read["args"], read["kwargs"]
        else:
            named, (args, keywords, _) = None, read
    except Exception as error:  # noqa: BLE001 - bytes that others wrote: reading them may fail in any way
        raise InvalidMessage(Fault("body", f"cannot be read as {content_type or _JSON}: {error}")) from None
    if not isinstance(args, list | tuple) or not isinstance(keywords, dict):
        raise InvalidMessage(Fault("body", "does not hold a task's arguments"))
    return named, args, keywords


def _typed(read: dict[str, Any]) -> Any:
    """What kombu wrote for a date or a number. A type that only the app knows stays the object that was written."""
    try:
        return kombu_json.object_hook(read)
    except Exception:  # noqa: BLE001 - it may hold anything where a value of that type should be
        return read
