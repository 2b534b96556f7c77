"""The headers `Prefer` and `Accept`: how long to wait, and which kind of answer."""

import math
import re
from collections.abc import Iterable

EVENT_STREAM = "text/event-stream"

_WAIT = re.compile(r'wait\s*(?:=\s*"?([0-9]*)"?)?', re.IGNORECASE)
_MOST_DIGITS = 9
DEFAULT_WAIT = 30.0  # seconds, for `Prefer: wait` without a number


def wait_of(prefer: Iterable[str], longest: float) -> float | None:
    """Return the seconds of `Prefer: wait=N` (RFC 7240), at most `longest`; None without it.

    The first of several counts, and a bad N is ignored, as the RFC says. Without N it is DEFAULT_WAIT.
    """
    for preference in ",".join(prefer).split(","):
        found = _WAIT.fullmatch(preference.partition(";")[0].strip())
        if found:
            return min(_seconds(found[1]), longest)
    return None


def _seconds(digits: str | None) -> float:
    if not digits:
        return DEFAULT_WAIT
    return math.inf if len(digits.lstrip("0")) > _MOST_DIGITS else float(digits)


def applied(wait: float | None) -> dict[str, str]:
    return {} if wait is None else {"Preference-Applied": f"wait={wait:g}"}


def wants_events(accept: str) -> bool:
    """Return whether `Accept` names the event stream, and ranks it no lower than JSON."""
    ranks = dict(map(_media_range, accept.split(",")))
    stream = ranks.get(EVENT_STREAM, 0.0)
    return stream > 0 and stream >= ranks.get("application/json", 0.0)


def _media_range(text: str) -> tuple[str, float]:
    kind, *parameters = (part.strip().lower() for part in text.split(";"))
    quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
    try:
        return kind, float(quality)
    except ValueError:
        return kind, 1.0
