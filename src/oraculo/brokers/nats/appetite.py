"""How much a process asks JetStream for at a time.

A server ends the connection of a client that leaves too much unread (its `max_pending`, 64 MB unless set; all queues of
a process share one connection), and does not say why. Whoever asked for as much again would be cut off again, until
what came each time had been delivered too often.
"""

import asyncio

PULL_BYTES = 8 * 1024 * 1024  # that come for one pull
LEAST_PULL_BYTES = 64 * 1024
GROWS_AFTER = 60.0  # seconds that a connection holds
MOST_SLOWED = 64  # so that it grows again after an hour at the latest


class Appetite:
    """Each connection that is lost halves it, each minute that one holds doubles it; twice as many minutes each time
    that it was too much again, until one has held for long."""

    def __init__(self) -> None:
        self._bytes = PULL_BYTES
        self._since = 0.0
        self._slowed = 1

    @property
    def bytes(self) -> int:
        return min(self._bytes << min(int(self._times_held), PULL_BYTES.bit_length()), PULL_BYTES)

    @property
    def _times_held(self) -> float:
        """For how many times as long as it takes to grow."""
        return (asyncio.get_running_loop().time() - self._since) / (GROWS_AFTER * self._slowed)

    def note_connected(self) -> None:
        self._since = asyncio.get_running_loop().time()

    def note_lost(self) -> None:
        had = self.bytes
        if self._times_held > PULL_BYTES.bit_length():
            self._slowed = 1
        elif had > self._bytes:
            self._slowed = min(2 * self._slowed, MOST_SLOWED)
        self._bytes = max(had // 2, LEAST_PULL_BYTES)
        self.note_connected()
