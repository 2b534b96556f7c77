"""How much a process asks JetStream for at a time.

A server ends the connection of a client that leaves too much unread (its `max_pending`, 64 MB unless set; all queues of
a process share one connection), and does not say why. Whoever asked for as much again would be cut off again, until
what came each time had been delivered too often.
"""

import asyncio

PULL_BYTES = 8 * 1024 * 1024  # that come for one pull
LEAST_PULL_BYTES = 64 * 1024
GROWS_AFTER = 60.0  # seconds that a connection holds


class Appetite:
    """Each connection that is lost halves it, each minute that one holds doubles it."""

    def __init__(self) -> None:
        self._bytes = PULL_BYTES
        self._since = 0.0

    @property
    def bytes(self) -> int:
        minutes = int((asyncio.get_running_loop().time() - self._since) / GROWS_AFTER)
        return min(self._bytes << min(minutes, PULL_BYTES.bit_length()), PULL_BYTES)

    def note_connected(self) -> None:
        self._since = asyncio.get_running_loop().time()

    def note_lost(self) -> None:
        self._bytes = max(self.bytes // 2, LEAST_PULL_BYTES)
        self.note_connected()
