"""Timestamps: ISO 8601 on the wire, seconds since the epoch inside."""

import math
from datetime import UTC, datetime
from functools import lru_cache

_MAX_LENGTH = 64
_THOUSANDTHS = [f".{number:03}Z" for number in range(1000)]


# The same moments recur: a run's deadline in each of its commands, the time of a batch in each of its messages.
@lru_cache(maxsize=256)
def to_iso(seconds: float) -> str:
    whole = math.floor(seconds)
    whole, millionths = divmod(whole * 1_000_000 + round((seconds - whole) * 1_000_000), 1_000_000)
    return _whole_second(whole) + _THOUSANDTHS[millionths // 1000]


@lru_cache(maxsize=256)
def _whole_second(seconds: int) -> str:
    """Write a whole second. It is cached, because a calendar is slow and a run's moments share a few seconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:-6]


def from_iso(text: str) -> float | None:
    """Return seconds since the epoch, or None when `text` is not ISO 8601 with an offset."""
    return None if len(text) > _MAX_LENGTH else _read(text)


@lru_cache(maxsize=256)
def _read(text: str) -> float | None:
    """Read a short text. `from_iso` refuses long ones, so that the cache keeps none."""
    try:
        moment = datetime.fromisoformat(text.upper())  # RFC 3339 lets `t` and `z` pass
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment.timestamp()


def in_words(seconds: float) -> str:
    """Return a length of time for a sentence: `1.5 s`, `30 s`, `2 min 5 s` or `3 h`."""
    if seconds < 60:
        return f"{seconds:.1f}".removesuffix(".0") + " s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
