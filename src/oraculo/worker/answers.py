"""What a handler says. How it is written is in `core.answer_writer`, which the bridges use too."""

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

_MACHINERY = ("oraculo.worker.", "asyncio.", "concurrent.")  # modules whose frames say nothing of the handler


class DoNotRetry(Exception):
    """Raised by a handler: it failed, and would fail again. The orchestrator makes no further attempt."""


class Failure(NamedTuple):
    reason: str
    retry: bool


def failure_of(error: BaseException) -> Failure:
    """What a handler's exception says to its run. Of a group, as a TaskGroup raises it, its members speak: the group's
    own text tells only how many there are."""
    members = _members(error)
    final = next((each for each in members if isinstance(each, DoNotRetry)), None)
    more = f" (and {len(members) - 1} more)" if len(members) > 1 else ""
    return Failure(describe(final or members[0]) + more, retry=final is None)


def traceback_of(error: BaseException) -> str | None:
    """Return the traceback of what a handler raised, from the handler on; None: it cannot be written."""
    frames = error.__traceback__
    while frames is not None and str(frames.tb_frame.f_globals.get("__name__")).startswith(_MACHINERY):
        frames = frames.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    except Exception:  # noqa: BLE001 - the error's own code is asked for its text
        return None


def as_answer(value: object) -> object:
    """Return a handler's value as the Answer that it reads as: a mapping with a `status`, as plain workers write it.

    Any other value is returned as it is.
    """
    return Answer(dict(value)) if isinstance(value, Mapping) and is_result_payload(value) else value


def answered_failure(value: object, body: bytes) -> str | None:
    """Return the reason of a failure that a handler returned, not raised. `body`: the answer made of its value."""
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
