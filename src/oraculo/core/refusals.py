"""Gathers the errors that several checks of one request raise, so that its caller hears of all faults at once."""

from collections.abc import Awaitable, Callable, Sequence
from typing import ParamSpec, TypeVar

from oraculo.errors import Fault, InvalidInput, InvalidRequest, PayloadTooLarge, UnknownPipeline
from oraculo.pipeline.definition import MAX_FAULTS

P = ParamSpec("P")
T = TypeVar("T")
Refusal = InvalidInput | PayloadTooLarge


class Refusals:
    """The refusals of one request. A single one is raised as it is, several as one InvalidRequest."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        """`faults`: what was found before, in another place of the request."""
        self._found: list[Refusal] = [InvalidRequest(faults)] if faults else []

    def add(self, refusal: Refusal) -> None:
        self._found.append(refusal)

    def check(self, check: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
        """Return what a check returns, or None when it refuses."""
        try:
            return check(*args, **named)
        except (InvalidInput, PayloadTooLarge) as refusal:
            self.add(refusal)
            return None

    def raise_any(self) -> None:
        """Raise what was found. A pipeline that is not known keeps its kind: another process may have put it."""
        if not self._found:
            return
        if len(self._found) == 1:
            raise self._found[0]
        faults = [fault for refusal in self._found for fault in refusal.faults][:MAX_FAULTS]
        if any(isinstance(refusal, UnknownPipeline) for refusal in self._found):
            raise UnknownPipeline(faults)
        raise InvalidRequest(faults)


async def refuse_with(faults: Sequence[Fault], check: Awaitable[object]) -> None:
    """Raise InvalidRequest with the faults, and with those that a check of the same request raises."""
    refusals = Refusals(faults)
    try:
        await check
    except (InvalidInput, PayloadTooLarge) as refusal:
        refusals.add(refusal)
    refusals.raise_any()
