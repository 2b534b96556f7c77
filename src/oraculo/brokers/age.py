"""Servers that are older than what the adapters were made for."""

import re

_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def warning_of_age(version: str, oldest: tuple[int, int]) -> str:
    """What the words of a check end with: nothing for a version that is new enough, or that cannot be read."""
    found = _NUMBERS.match(version)
    if found is None or (int(found[1]), int(found[2])) >= oldest:
        return ""
    return f"; it is too old: {oldest[0]}.{oldest[1]} or newer is needed"
