"""JSON objects as the command line takes them."""

import sys
from pathlib import Path

import msgspec

from oraculo.errors import Fault, InvalidRequest
from oraculo.wire.json_guard import HALF_A_PAIR, has_half_a_pair


def read_payload(text: str) -> msgspec.Raw:
    """JSON, `@FILE`, or `-` for stdin. Raises InvalidRequest, naming where the text came from."""
    if text == "-":
        return read_object("--payload, from stdin", sys.stdin.buffer.read())
    if not text.startswith("@"):
        return read_object("--payload", text.encode())
    try:
        return read_object(f"--payload {text}", Path(text[1:]).read_bytes())
    except OSError as error:
        raise InvalidRequest(Fault(f"--payload {text}", f"cannot be read: {error.strerror}")) from None


def read_object(where: str, text: bytes, example: str = '{"produto": "café"}') -> msgspec.Raw:
    """As it is: a number that JSON can write and Python cannot hold goes through unchanged."""
    try:
        msgspec.json.decode(text.decode(), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        told = HALF_A_PAIR if has_half_a_pair(text) else error
        raise InvalidRequest(Fault(where, f"must be a JSON object, as {example}: {told}")) from None
    return msgspec.Raw(text.strip())
