"""Checks of a JSON text before anything reads it.

msgspec leaves payloads unparsed (`msgspec.Raw`), so four faults slip past it that a worker would choke on:
- bytes that are not UTF-8 inside an unparsed value
- the NUL character, which PostgreSQL and C programs cannot hold
- nesting so deep that a recursive parser overflows
- numbers too large for a parser
"""

import re
from collections.abc import Iterator
from itertools import accumulate

import msgspec

from oraculo.errors import Fault, InvalidJson

MAX_DEPTH = 128  # of a request or an answer
# A command or an aggregate holds the result of an answer three levels down.
HANDED_ON_DEPTH = MAX_DEPTH + 3
HALF_A_PAIR = "a text holds half a surrogate pair (\\ud800 to \\udfff)"
# The errors of reading an unchecked text. msgspec notices another encoding only between quotation marks.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
# Numbers, because `in` first tries bytes as a number, which raises an error each time.
_NUL, _BACKSLASH = b"\0\\"
_SLICE = 256 * 1024
_DROPPED = bytes(set(range(256)) - set(b'[]{}"'))
# By how much a bracket changes the depth, as a signed byte.
_CHANGES = bytes(1 if sign in b"[{" else 255 for sign in range(256))
# Each digit becomes a 0, and so does the plus sign of an exponent, so that one search finds both ways to write it.
# A number beyond a float's range has an exponent of three digits, or more than 200 digits before its point.
_FIGURES = bytes(ord("0") if sign in b"0123456789+" else ord("e") if sign in b"eE" else sign for sign in range(256))
_MANY_DIGITS = b"0" * 200
_SHORT = 4096  # bytes, which are parsed as fast as they are searched


def check_json_text(body: bytes, max_depth: int = MAX_DEPTH) -> None:
    """Raise InvalidJson when `body` is not UTF-8, holds a NUL or nests deeper than `max_depth`."""
    if (fault := _encoding_fault(body)) is not None:
        raise InvalidJson(fault)
    bare = _bare(body)
    if _NUL in bare or (_BACKSLASH in bare and b"\\u0000" in bare):
        raise InvalidJson(Fault("", "holds a NUL character (\\u0000); send plain JSON text in UTF-8 without it"))
    if _is_too_deep(bare, max_depth):
        raise InvalidJson(depth_fault(max_depth))


def depth_fault(limit: int = MAX_DEPTH) -> Fault:
    return Fault("", f"nested deeper than {limit} levels")


def _encoding_fault(body: bytes) -> Fault | None:
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            return Fault("", f"not UTF-8: byte {error.start} cannot be read; send plain JSON text in UTF-8")
    return None


def json_fault(body: bytes, error: Exception) -> Fault:
    """Return why `body` could not be read, when reading it raised `error`.

    msgspec may call a text with half a surrogate pair truncated. Looking for one takes longer than reading.
    """
    if not body.strip():
        return Fault("", "not valid JSON: it is empty")
    if (fault := _encoding_fault(body)) is not None:
        return fault
    if has_half_a_pair(body):
        return Fault("", f"not valid JSON: {HALF_A_PAIR}")
    if body.startswith(b"\xef\xbb\xbf"):
        return Fault("", "not valid JSON: it begins with a byte order mark (U+FEFF); leave it out")
    return Fault("", f"not valid JSON: {error}")


def has_half_a_pair(body: bytes) -> bool:
    """Return whether a text holds half a surrogate pair, as JavaScript leaves when it cuts a character in two."""
    return _HALF.search(_PAIR.sub(b" ", _bare(body))) is not None


def holds_far_number(value: bytes) -> bool:
    """Return whether a number in a value is too large for Python, and so for a worker of the SDK (`1e999`)."""
    if len(value) > _SHORT and not _may_hold_far_number(value):
        return False
    try:
        msgspec.json.decode(value)
    except msgspec.ValidationError:  # without a type to check, msgspec raises it only for such a number
        return True
    except UNREADABLE:
        return False
    return False


def _may_hold_far_number(value: bytes) -> bool:
    """Search without parsing. False is certain; True may be due to digits between quotation marks."""
    figures = value.translate(_FIGURES)
    return b"0e000" in figures or _MANY_DIGITS in figures


def is_too_deep(body: bytes, max_depth: int = MAX_DEPTH) -> bool:
    """Return whether a text nests too deep. The limit of msgspec itself depends on the version of Python."""
    return _is_too_deep(_bare(body), max_depth)


def _is_too_deep(bare: bytes, max_depth: int) -> bool:
    # The number of opening brackets bounds the depth. Taking them out is several times as fast as counting them.
    if len(bare) - len(bare.replace(b"[", b"").replace(b"{", b"")) <= max_depth:
        return False
    depth = 0
    for brackets in _brackets(bare):
        depths = accumulate(memoryview(brackets.translate(_CHANGES)).cast("b"), initial=depth)
        for depth in depths:
            if depth > max_depth:
                return True
    return False


def _bare(body: bytes) -> bytes:
    """Return a text without its escaped backslashes. Each backslash that is left escapes the next character."""
    return body.replace(b"\\\\", b"") if _BACKSLASH in body else body


def _brackets(bare: bytes) -> Iterator[bytes]:
    """Yield the brackets outside of JSON strings, in slices.

    A bracket with an odd number of quotes before it is in a string, so any two quotes side by side can go.
    """
    signs = bare.replace(b'\\"', b"").translate(None, _DROPPED).replace(b'""', b"")
    inside = 0
    for start in range(0, len(signs), _SLICE):
        parts = signs[start : start + _SLICE].split(b'"')
        yield b"".join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2
