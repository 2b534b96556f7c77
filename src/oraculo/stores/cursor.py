"""The cursor of a list of runs: opaque to the client, and checked when it comes back."""

import base64
import binascii
import zlib

from oraculo.errors import InvalidInput

NEWEST = 2**63 - 1


def make_cursor(n: int) -> str:
    return seal(n.to_bytes(8, "big"))


def read_cursor(cursor: str | None) -> int:
    """Return the number below which the page begins. Raises InvalidInput when the cursor is not one of ours."""
    if cursor is None:
        return NEWEST
    place = unseal(cursor)
    n = int.from_bytes(place, "big")
    if len(place) != 8 or n > NEWEST:
        raise _not_ours()
    return n


def seal(place: bytes) -> str:
    return base64.urlsafe_b64encode(place + zlib.crc32(place).to_bytes(4, "big")).decode()


def unseal(cursor: str) -> bytes:
    """Return what was sealed. Raises InvalidInput when the cursor is not one of ours."""
    try:
        place = base64.b64decode(cursor, altchars=b"-_", validate=True)[:-4]
    except (binascii.Error, ValueError):
        raise _not_ours() from None
    if seal(place) != cursor:
        raise _not_ours()
    return place


def _not_ours() -> InvalidInput:
    return InvalidInput.at("cursor", "is not one that a page of this list gave; leave it out to begin at the first")
