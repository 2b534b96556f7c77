"""ISO 8601 on the wire, seconds since the epoch inside."""

import math
from datetime import UTC, datetime
from functools import lru_cache

_LONGEST = 64
_THOUSANDTHS = [f".{number:03}Z" for number in range(1000)]


# The same moments are written and read again and again: the deadline of a run in each of its commands, the time of a
# batch in each of its messages.
@lru_cache(maxsize=256)
def to_iso(seconds: float) -> str:
    whole = math.floor(seconds)
    whole, millionths = divmod(whole * 1_000_000 + round((seconds - whole) * 1_000_000), 1_000_000)
    return _whole_second(whole) + _THOUSANDTHS[millionths // 1000]


@lru_cache(maxsize=256)
def _whole_second(seconds: int) -> str:
    """Apart, because a calendar is slow, and most moments of a run are in the same few seconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:-6]


def from_iso(text: str) -> float | None:
    """Seconds since the epoch, or None when `text` is not ISO 8601 with an offset."""
    return None if len(text) > _LONGEST else _read(text)


@lru_cache(maxsize=256)
def _read(text: str) -> float | None:
    """Apart, so that no long text is kept: whatever anybody sends comes by here."""
    try:
        moment = datetime.fromisoformat(text.upper())  # RFC 3339 lets `t` and `z` pass
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment.timestamp()


def in_words(seconds: float) -> str:
    """`1.5 s`, `30 s`, `2 min 5 s`, `3 h`: a length of time as a sentence says it."""
    if seconds < 60:
        return f"{seconds:.1f}".removesuffix(".0") + " s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
