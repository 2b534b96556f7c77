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
    members = _members(error)
    final = next((each for each in members if isinstance(each, DoNotRetry)), None)
    more = f" (and {len(members) - 1} more)" if len(members) > 1 else ""
    return Failure(describe(final or members[0]) + more, retry=final is None)


def _members(error: BaseException) -> list[BaseException]:
    members, rest = list[BaseException](), [error]
    while rest:
        each = rest.pop()
        if isinstance(each, BaseExceptionGroup):
            rest.extend(reversed(each.exceptions))
        else:
            members.append(each)
    return members
