"""Whose turn it is: attempts wait for their receiver in a line of its own, so that one that is slow, or says nothing,
holds up no other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class _Line:
    """Those who wait for one receiver, or are at it."""

    def __init__(self, places: int) -> None:
        self.places = asyncio.Semaphore(places)
        self.head = asyncio.Lock()
        self.length = 0
        self.bytes = 0
        self.turned_away = 0  # and whose turn would be after theirs
        self.begun: list[float] = []  # when each that is at the receiver came to it
        self.took = 0.0  # seconds, the last of them

    def pace(self, now: float) -> float:
        """Seconds that one takes. A receiver that says nothing shows that before its first attempt is over."""
        return max(self.took, now - min(self.begun, default=now))


class Turns:
    """`places` for attempts, of which one receiver has at most `each`. `most` and `most_bytes`: how many attempts, and
    bytes, are kept here; a receiver has as much of that as it leaves free, so that there is always room for another."""

    def __init__(self, places: int, each: int, most: int, most_bytes: int) -> None:
        self._places = asyncio.Semaphore(places)
        self._each = each
        self._most = most
        self._most_bytes = most_bytes
        self._length = 0
        self._bytes = 0
        self._lines: dict[str, _Line] = {}

    def enter(self, receiver: str, size: int) -> bool:
        """Whether there was room in its line. Whoever entered must leave."""
        line = self._lines.get(receiver) or _Line(self._each)
        if not (
            _fits(line.length, 1, self._length, self._most) and _fits(line.bytes, size, self._bytes, self._most_bytes)
        ):
            line.turned_away += 1
            return False
        self._lines[receiver] = line
        self._count(line, 1, size)
        return True

    def leave(self, receiver: str, size: int) -> None:
        line = self._lines[receiver]
        self._count(line, -1, -size)
        line.turned_away = max(0, line.turned_away - 1)
        if not line.length:
            del self._lines[receiver]

    def resize(self, receiver: str, more: int) -> None:
        """What one of its line brings has become larger, or smaller."""
        self._count(self._lines[receiver], 0, more)

    def _count(self, line: _Line, one: int, size: int) -> None:
        line.length += one
        line.bytes += size
        self._length += one
        self._bytes += size

    @asynccontextmanager
    async def turn(self, receiver: str) -> AsyncIterator[None]:
        """Waits for it. Only the head of a line waits for one of all places: so the lines take turns."""
        line, loop = self._lines[receiver], asyncio.get_running_loop()
        async with line.places:
            async with line.head:
                await self._places.acquire()
            began = loop.time()
            line.begun.append(began)
            try:
                yield
            finally:
                self._places.release()
                line.begun.remove(began)
                line.took = loop.time() - began

    def seconds_ahead(self, receiver: str) -> float:
        """Until all those have had their turn who came to this receiver, as it goes now. 0: it is not known."""
        line = self._lines.get(receiver)
        if line is None:
            return 0.0
        return (line.length + line.turned_away) * line.pace(asyncio.get_running_loop().time()) / self._each


def _fits(own: int, more: int, of_all: int, most: int) -> bool:
    """The first of its line always does while there is room at all, however large it is."""
    return own + more <= most - of_all if own else of_all < most
