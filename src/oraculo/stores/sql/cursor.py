"""The cursor of a list of runs: opaque to the client, and checked when it comes back."""

import base64
import binascii
import zlib

from oraculo.errors import InvalidInput

NEWEST = 2**63 - 1


def make_cursor(n: int) -> str:
    place = n.to_bytes(8, "big")
    return base64.urlsafe_b64encode(place + zlib.crc32(place).to_bytes(4, "big")).decode()


def read_cursor(cursor: str | None) -> int:
    """Return the number below which the page begins. Raises InvalidInput when the cursor is not one of ours."""
    if cursor is None:
        return NEWEST
    try:
        text = base64.b64decode(cursor, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        text = b""
    n = int.from_bytes(text[:8], "big")
    if len(text) != 12 or n > NEWEST or make_cursor(n) != cursor:
        raise InvalidInput.at("cursor", "is not one that a page of this list gave; leave it out to begin at the first")
    return n
