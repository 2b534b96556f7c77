"""What is refused of a JSON text before anything reads it.

msgspec decodes fast and leaves payloads unparsed (`msgspec.Raw`), so three things slip past it that a worker in another
language would choke on: bytes that are not UTF-8 inside an unparsed value, the NUL character (which PostgreSQL and C
programs cannot hold) and nesting so deep that a recursive parser overflows.
"""

import re

from oraculo.errors import Fault, InvalidJson

MAX_DEPTH = 128

# Possessive, and content with a text that never ends: one that backtracked, or looked for a string again at every
# quote in it, would take a time that grows with the square of the text.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_json_text(body: bytes) -> None:
    """Raises InvalidJson when `body` is not UTF-8, holds a NUL or nests deeper than MAX_DEPTH."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise InvalidJson(Fault("", f"not UTF-8: byte {error.start} cannot be read")) from None
    if b"\0" in body or (b"\\u0000" in body and _ESCAPED_NUL.search(body)):
        raise InvalidJson(Fault("", "holds a NUL character (\\u0000); remove it"))
    # Counting brackets bounds the depth at no cost; only a text with many of them is looked at closely.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise InvalidJson(Fault("", f"nested deeper than {MAX_DEPTH} levels"))


def _depth(body: bytes) -> int:
    depth = deepest = 0
    for bracket in _STRING.sub(b"", body).translate(None, _NOT_BRACKETS):
        if bracket in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest
