"""What is met again and again, as a server that is away: it is told once, then once a minute with how often it was."""

from collections.abc import Hashable
from math import inf

_PAUSE = 60.0  # seconds between two tellings of the same
_MOST = 1000  # that are remembered


class Repeats:
    def __init__(self) -> None:
        self._met: dict[Hashable, tuple[float, int]] = {}  # when each was told, and how often met since; latest last

    def times(self, what: Hashable, now: float) -> int:
        """How often it was met since it was told last, this time included; 0: it is too early to tell it again."""
        told_at, untold = self._met.pop(what, (-inf, 0))
        is_due = now - told_at >= _PAUSE
        self._met[what] = (now, 0) if is_due else (told_at, untold + 1)
        if len(self._met) > _MOST:
            del self._met[next(iter(self._met))]
        return untold + 1 if is_due else 0
