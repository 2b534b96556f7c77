"""A Lua script, which the server runs in one step."""

import hashlib
from typing import NamedTuple


class Script(NamedTuple):
    """A script and its SHA-1."""

    text: str
    sha: str  # the server's name for it

    @classmethod
    def of(cls, text: str) -> "Script":
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
