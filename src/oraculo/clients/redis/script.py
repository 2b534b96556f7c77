"""A script in Lua, which the server runs in one step."""

import hashlib
from typing import NamedTuple


class Script(NamedTuple):
    text: str
    sha: str  # by which the server knows it

    @classmethod
    def of(cls, text: str) -> "Script":
        return cls(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
