"""JSON objects that options of the command line take."""

import sys
from pathlib import Path

import msgspec

from oraculo.errors import Fault, InvalidRequest


def read_payload(text: str) -> msgspec.Raw:
    """Read JSON, `@FILE`, or `-` for stdin. Raises InvalidRequest, naming where the text came from."""
    if text == "-":
        return read_object("--payload, from stdin", sys.stdin.buffer.read())
    if not text.startswith("@"):
        return read_object("--payload", text.encode())
    try:
        return read_object(f"--payload {text}", Path(text[1:]).read_bytes())
    except OSError as error:
        raise InvalidRequest(Fault(f"--payload {text}", f"cannot be read: {error.strerror}")) from None


def read_object(where: str, text: bytes, example: str = '{"produto": "café"}') -> msgspec.Raw:
    """Return the object as it was written, numbers included. Raises InvalidRequest."""
    try:
        msgspec.json.decode(text.decode(), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(Fault(where, f"must be a JSON object, as {example}: {error}")) from None
    return msgspec.Raw(text.strip())
