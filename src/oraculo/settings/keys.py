"""API keys as the settings write them: `KEY`, or `reader:KEY` with a role."""

from collections.abc import Sequence
from enum import StrEnum

SHORTEST_KEY = 16  # characters
_MAKE = "make one with: openssl rand -hex 24"


class KeyRole(StrEnum):
    """The role of a key, from the least to the most. Each may do what those before it may."""

    READER = "reader"
    OPERATOR = "operator"
    ADMIN = "admin"

    def allows(self, needed: "KeyRole") -> bool:
        ranks = list(KeyRole)
        return ranks.index(self) >= ranks.index(needed)


def read_key(entry: str) -> tuple[KeyRole, str]:
    """Return the role and the key. A bare key is an admin's."""
    role, colon, key = entry.partition(":")
    return (KeyRole(role), key) if colon and role in list(KeyRole) else (KeyRole.ADMIN, entry)


def keys_fault(entries: Sequence[str]) -> str | None:
    """Return the fault of the first bad key. It names the key by its place, and never shows it."""
    seen: set[str] = set()
    for number, entry in enumerate(entries, 1):
        key = read_key(entry)[1]
        if key == entry and ":" in entry:
            roles = ", ".join(KeyRole)
            return f"has no role before the ':' of key {number}; the roles are {roles}, as reader:KEY"
        if len(key) < SHORTEST_KEY:
            return f"has {len(key)} characters in key {number}, and needs {SHORTEST_KEY} or more; {_MAKE}"
        if key in seen:
            return f"has key {number} twice; each key has one role"
        seen.add(key)
    return None
