"""The count of written bytes that a client has not read yet."""

import struct
from contextlib import suppress
from typing import Any

_INT = struct.Struct("i")

try:
    from fcntl import ioctl
    from termios import TIOCOUTQ
except ImportError:  # Windows, where only the buffer of the process can be counted
    ioctl = None  # type: ignore[assignment]


def unread_bytes(transport: Any) -> int:
    """Return the unread bytes, in the buffers of the process and of the system, which may hold megabytes."""
    count: int = transport.get_write_buffer_size()
    with suppress(OSError):  # not every system counts them for sockets
        if ioctl is not None and (connection := transport.get_extra_info("socket")) is not None:
            [kept] = _INT.unpack(ioctl(connection.fileno(), TIOCOUTQ, bytes(_INT.size)))
            count += kept
    return count
