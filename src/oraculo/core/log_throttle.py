"""Throttling of repeated log lines: a trouble is logged once, then once a minute with its count."""

from collections.abc import Hashable
from math import inf
from typing import NamedTuple

_PAUSE = 60.0  # seconds between two lines about the same trouble
_QUIET = 60.0  # seconds after which a trouble is new again; one attempt at a frozen server takes 15 or more
_MAX_REMEMBERED = 1000


class _Met(NamedTuple):
    at: float
    logged_at: float
    unlogged: int  # times since then


class LogThrottle:
    """The troubles of the last minute, each with the moment of its last log line."""

    def __init__(self) -> None:
        self._met: dict[Hashable, _Met] = {}  # the one met latest is last

    def times(self, what: Hashable, now: float) -> int:
        """Count a trouble. Return how often it came since its last log line, or 0 while it is too early for another."""
        met = self._met.pop(what, None)
        if met is None or now - met.at > _QUIET:
            met = _Met(now, -inf, 0)
        is_due = now - met.logged_at >= _PAUSE
        self._met[what] = _Met(now, now, 0) if is_due else _Met(now, met.logged_at, met.unlogged + 1)
        if len(self._met) > _MAX_REMEMBERED:
            del self._met[next(iter(self._met))]
        return met.unlogged + 1 if is_due else 0
