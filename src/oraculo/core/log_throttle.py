"""What is met again and again, as a server that is away: it is told once, then once a minute with how often it was."""

from collections.abc import Hashable
from math import inf
from typing import NamedTuple

_PAUSE = 60.0  # seconds between two tellings of the same
_QUIET = 60.0  # seconds without it, after which it is met anew: to meet a server that is frozen takes 15 and more
_MOST = 1000  # that are remembered


class _Met(NamedTuple):
    at: float
    told_at: float
    untold: int  # times since


class LogThrottle:
    def __init__(self) -> None:
        self._met: dict[Hashable, _Met] = {}  # the one met latest is last

    def times(self, what: Hashable, now: float) -> int:
        """How often it was met since it was told last, this time included; 0: it is too early to tell it again."""
        met = self._met.pop(what, None)
        if met is None or now - met.at > _QUIET:
            met = _Met(now, -inf, 0)
        is_due = now - met.told_at >= _PAUSE
        self._met[what] = _Met(now, now, 0) if is_due else _Met(now, met.told_at, met.untold + 1)
        if len(self._met) > _MOST:
            del self._met[next(iter(self._met))]
        return met.untold + 1 if is_due else 0
