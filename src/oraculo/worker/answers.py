"""The outcome of a handler: its answer, or the failure that an exception stands for."""

import traceback
from collections.abc import Mapping
from typing import NamedTuple

from oraculo.core.answers import failure_reason, is_result_payload
from oraculo.wire.answers import MAX_ERROR_TEXT, Answer, AnswerWriter, describe
from oraculo.wire.message import decode_message

__all__ = [
    "MAX_ERROR_TEXT",
    "Answer",
    "AnswerWriter",
    "DoNotRetry",
    "Failure",
    "answered_failure",
    "as_answer",
    "describe",
    "failure_of",
    "traceback_of",
]

_MACHINERY = ("oraculo.worker.", "asyncio.", "concurrent.")  # modules whose frames are no part of the handler


class DoNotRetry(Exception):
    """The exception for a failure that another attempt would not cure, such as a missing parameter.

    A handler raises it with the reason. The task fails at once, whatever its retry policy says.
    """


class Failure(NamedTuple):
    """A failed attempt: its reason, and whether another attempt makes sense."""

    reason: str
    retry: bool


def failure_of(error: BaseException) -> Failure:
    """Return the failure that a handler's exception stands for.

    An exception group, as a TaskGroup raises it, is described by its members: its own text only counts them.
    """
    members = _members(error)
    final = next((each for each in members if isinstance(each, DoNotRetry)), None)
    more = f" (and {len(members) - 1} more)" if len(members) > 1 else ""
    return Failure(describe(final or members[0]) + more, retry=final is None)


def traceback_of(error: BaseException) -> str | None:
    """Return the traceback from the handler on, or None when the exception cannot be formatted."""
    frames = error.__traceback__
    while frames is not None and str(frames.tb_frame.f_globals.get("__name__")).startswith(_MACHINERY):
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    except Exception:  # noqa: BLE001 - formatting runs the error's own code
        return None


def as_answer(value: object) -> object:
    """Return a mapping that is a result payload as an Answer, and any other value unchanged."""
    return Answer(dict(value)) if isinstance(value, Mapping) and is_result_payload(value) else value


def answered_failure(value: object, body: bytes) -> str | None:
    """Return the reason of a failure that a handler returned instead of raising, or None. `body` is its answer."""
    return failure_reason(bytes(decode_message(body).payload)) if isinstance(value, Answer) else None


def _members(error: BaseException) -> list[BaseException]:
    members, rest = list[BaseException](), [error]
    while rest:
        each = rest.pop()
        if isinstance(each, BaseExceptionGroup):
            rest.extend(reversed(each.exceptions))
        else:
            members.append(each)
    return members
