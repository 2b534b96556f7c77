"""What the callbacks tell, read: a value, or why there is none."""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import msgspec
from kombu.utils import json as kombu_json

from oraculo.bridges.celery.tasks import ADDRESS, FAILED, RETURNED, ReturnAddress, read_address
from oraculo.core import naming
from oraculo.core.answer_writer import describe
from oraculo.errors import Fault, InvalidMessage, OraculoError

NO_REASON = "the Celery task failed; its worker did not tell why"
# What would happen again in just the same way.
_HOPELESS = frozenset({"NotRegistered", "EncodeError", "TaskRevokedError"})
_PICKLE = "application/x-python-serialize"
_JSON = "application/json"
_WRAPPER = "UnpickleableExceptionWrapper"
_MOST_TEXT = 2000
_LONGEST_NAME = 200


class Report(msgspec.Struct, frozen=True):
    """What became of a task. `reason` is None when it succeeded, with `value`."""

    command: ReturnAddress
    value: Any = None
    reason: str | None = None
    retry: bool = True


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
    error = args[1] if len(args) > 1 else None
    return failure(command, *_told_by(error)) if isinstance(error, _Stub) else failure(command, "", "")


def failure(command: ReturnAddress, kind: str, text: str) -> Report:
    """`kind`: the name of the exception's class, `text`: what it says."""
    reason = f"{kind}: {text}" if kind and text else kind or text or NO_REASON
    return Report(command, reason=reason[:_MOST_TEXT], retry=kind not in _HOPELESS)


def reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, OraculoError) else describe(error)


def _contents(body: bytes | str, content_type: str | None) -> tuple[object, Sequence[Any], dict[str, Any]]:
    """The task's name, where it is in the body, and its arguments."""
    try:
        read = _unpickled(body) if content_type == _PICKLE else kombu_json.loads(body, object_hook=_typed)
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


# -- reading a pickle without running it -----------------------------------------------------------------------------


class _Stub:
    """Stands for every class and function that a pickle names: it keeps what it was called with, and does nothing."""

    name = ""

    def __new__(cls, *args: Any, **_keywords: Any) -> "_Stub":
        made = object.__new__(cls)
        made.args = args
        return made

    args: tuple[Any, ...]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.args))})"

    def __setstate__(self, state: Any) -> None:
        pass

    # What a pickle may do to a list, a set or a mapping of its own class.
    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type("_Named", (_Stub,), {"name": name.rpartition(".")[2][:_LONGEST_NAME]})

    def persistent_load(self, _pid: Any) -> Any:
        return None


def _unpickled(body: bytes | str) -> Any:
    return _Reader(io.BytesIO(body.encode("latin-1") if isinstance(body, str) else body)).load()


def _told_by(error: _Stub) -> tuple[str, str]:
    """That it failed is certain, even when a strange exception cannot be put in words."""
    try:
        return _described(error)
    except Exception:  # noqa: BLE001 - it holds what others wrote
        return error.name, ""


def _described(error: _Stub) -> tuple[str, str]:
    """The name of the exception's class, and what str() of it would be, as far as that can be known here."""
    name, args = error.name, error.args
    if name == _WRAPPER and len(args) == 4:  # Celery's, for what cannot be pickled: module, class, args, text
        name, args = str(args[1]), args[2]
    return name, str(args[0]) if len(args) == 1 else ", ".join(map(repr, args))
