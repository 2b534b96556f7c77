"""Reads what Celery says of a task in callbacks and events: its value, or why it failed."""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from kombu.utils import json as kombu_json

from oraculo.bridges.celery.tasks import ADDRESS, FAILED, RETURNED, ReturnAddress, read_address
from oraculo.errors import Fault, InvalidMessage, OraculoError
from oraculo.wire import naming
from oraculo.wire.answers import describe

NO_REASON = "the Celery task failed; no event of its worker said why, its log does"
PICKLED = "is pickle, which ORÁCULO does not read; the app must leave the serializer of `oraculo.*` at json"

_NOT_WORTH_A_RETRY = frozenset({"NotRegistered", "EncodeError", "TaskRevokedError"})
_PICKLE = "application/x-python-serialize"
_MAX_TEXT = 2000
_MAX_UNQUOTED = 10_000  # characters; a longer text stays quoted
_EXCEPTION = re.compile(r"(\w+)\((.*)\)", re.DOTALL)  # as repr() shows it
_POOL_EXCEPTION = "ExceptionWithTraceback("  # Celery's pool wraps exceptions in this; the traceback names the real one


class Outcome(msgspec.Struct, frozen=True):
    """The end of a task: its `value`, or the `reason` of its failure.

    `failed_id` is the id of a failed task whose reason has to come from an event of its worker.
    """

    command: ReturnAddress
    value: Any = None
    reason: str | None = None
    retry: bool = True
    failed_id: str = ""


class Reason(NamedTuple):
    """The reason of a failure: the name of the exception's class, and its text."""

    kind: str
    text: str


def read_reply(body: bytes | str, content_type: str | None, task: object) -> Outcome:
    """Return what a callback reports. Raises InvalidMessage if it is no callback of ours."""
    args, keywords = _arguments(body, content_type)
    command = read_address(keywords.get(ADDRESS))
    if task == RETURNED:
        return Outcome(command, value=args[0] if args else None)
    if task != FAILED:
        raise InvalidMessage(Fault("task", f"{naming.shown(task)} is none of ours"))
    return Outcome(command, reason=NO_REASON, failed_id=str(args[0]) if args else "")


def failure(command: ReturnAddress, reason: Reason) -> Outcome:
    text = ": ".join(filter(None, reason)) or NO_REASON
    return Outcome(command, reason=text[:_MAX_TEXT], retry=reason.kind not in _NOT_WORTH_A_RETRY)


def reason_in(event: Mapping[str, Any]) -> Reason:
    """Return the exception that a `task-failed` event shows."""
    shown = str(event.get("exception") or "")
    if shown.startswith(_POOL_EXCEPTION):
        name, _, text = str(event.get("traceback") or "").rstrip().rpartition("\n")[2].partition(": ")
        kind = name.rpartition(".")[2]
    else:
        found = _EXCEPTION.fullmatch(shown)
        kind, text = (found[1], _unquoted(found[2])) if found else ("", shown)
    return Reason(kind[:_MAX_TEXT], text[:_MAX_TEXT])


def _unquoted(arguments: str) -> str:
    """Return an exception's argument without quotes when it is a single text, else its arguments as they are."""
    if arguments[:1] not in ("'", '"') or len(arguments) > _MAX_UNQUOTED:
        return arguments
    try:
        read = ast.literal_eval(arguments)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return arguments
    return read if isinstance(read, str) else arguments


def text_of(error: Exception) -> str:
    return str(error) if isinstance(error, OraculoError) else describe(error)


def _arguments(body: bytes | str, content_type: str | None) -> tuple[Sequence[Any], dict[str, Any]]:
    # Unpickling runs code, and a few bytes of pickle can take gigabytes. So pickle is never read.
    if content_type == _PICKLE:
        raise InvalidMessage(Fault("body", PICKLED))
    try:
        args, keywords, _ = kombu_json.loads(body, object_hook=_typed)
    except Exception as error:  # noqa: BLE001 - reading the bytes of others may fail in any way
        raise InvalidMessage(Fault("body", f"cannot be read as JSON ({content_type}): {error}")) from None
    if not isinstance(args, list) or not isinstance(keywords, dict):
        raise InvalidMessage(Fault("body", "does not hold a task's arguments"))
    return args, keywords


def _typed(read: dict[str, Any]) -> Any:
    """Return the date or number that kombu encoded in an object. An object of any other type stays as it is."""
    try:
        return kombu_json.object_hook(read)
    except Exception:  # noqa: BLE001 - the object may hold anything in the place of a value
        return read
