"""What a handler says. How it is written is in `core.answer_writer`, which the bridges use too."""

from typing import NamedTuple

from oraculo.core.answer_writer import MAX_ERROR_TEXT, Answer, AnswerWriter, describe

__all__ = ["MAX_ERROR_TEXT", "Answer", "AnswerWriter", "DoNotRetry", "Failure", "describe", "failure_of"]


class DoNotRetry(Exception):
    """Raised by a handler: it failed, and would fail again. The orchestrator makes no further attempt."""


class Failure(NamedTuple):
    reason: str
    retry: bool


def failure_of(error: BaseException) -> Failure:
    """What a handler's exception says to its run. Of a group, as a TaskGroup raises it, its members speak: the group's
    own text tells only how many there are."""
    first, *others = _members(error)
    more = f" (and {len(others)} more)" if others else ""
    return Failure(describe(first) + more, retry=not any(isinstance(each, DoNotRetry) for each in (first, *others)))


def _members(error: BaseException) -> list[BaseException]:
    members, rest = list[BaseException](), [error]
    while rest:
        each = rest.pop()
        if isinstance(each, BaseExceptionGroup):
            rest.extend(reversed(each.exceptions))
        else:
            members.append(each)
    return members
