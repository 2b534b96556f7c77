"""The warning about servers that are older than the adapters support."""

import re

_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def warning_of_age(version: str, oldest: tuple[int, int]) -> str:
    """Return a warning to append to the result of `check`. Empty for a new enough or unreadable version."""
    found = _NUMBERS.match(version)
    if found is None or (int(found[1]), int(found[2])) >= oldest:
        return ""
    return f"; it is too old: {oldest[0]}.{oldest[1]} or newer is needed"
