"""How much of what was written to a connection its client has not taken yet."""

import struct
from contextlib import suppress
from typing import Any

_INT = struct.Struct("i")

try:
    from fcntl import ioctl
    from termios import TIOCOUTQ
except ImportError:  # Windows, where only the buffer of the process is seen
    ioctl = None  # type: ignore[assignment]


def unread_bytes(transport: Any) -> int:
    """Count them, those that the system keeps included: it may keep megabytes, of which a slow client takes some."""
    count: int = transport.get_write_buffer_size()
    with suppress(OSError):  # not every system tells it of sockets
        if ioctl is not None and (connection := transport.get_extra_info("socket")) is not None:
            [kept] = _INT.unpack(ioctl(connection.fileno(), TIOCOUTQ, bytes(_INT.size)))
            count += kept
    return count
