"""Whose turn it is: attempts wait for their receiver in a line of its own, so that one that is slow, or says nothing,
holds up no other."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

_FIRST_PAUSE = 0.1  # seconds before a receiver that was not reached is tried again; doubled each time
_LONGEST_PAUSE = 5.0  # about as long after it is back those who wait for it go on


@dataclass(slots=True)
class Absence:
    """Of a receiver that was not reached, and what was said of it last. By the loop's time."""

    since: float
    reason: str
    pause: float
    until: float  # then the next may try


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
        self.absence: Absence | None = None

    def pace(self, now: float) -> float:
        """Seconds that one takes. A receiver that says nothing shows that before its first attempt is over."""
        return max(self.took, now - min(self.begun, default=now), self.absence.pause if self.absence else 0.0)

    async def rest(self, now: float) -> None:
        if self.absence is not None and now < self.absence.until:
            await asyncio.sleep(self.absence.until - now)


class Receivers:
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
        self._forget_if_left(receiver)

    def _forget_if_left(self, receiver: str) -> None:
        """Not before the pause is over of one that is away: those who come one by one would each find it out anew."""
        line, loop = self._lines.get(receiver), asyncio.get_running_loop()
        if line is None or line.length:
            return
        if line.absence is not None and loop.time() < line.absence.until:
            loop.call_at(line.absence.until, self._forget_if_left, receiver)
        else:
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
        """Waits for it. Only the head of a line waits for one of all places: so the lines take turns. While a receiver
        is away it stays the head, and so is alone with it: who is refused takes no time, and all of a line that try
        again and again would leave none to others."""
        line = self._lines[receiver]
        async with line.places:
            async with line.head:
                await line.rest(asyncio.get_running_loop().time())
                await self._places.acquire()
                if line.absence is not None:
                    with self._visit(line):
                        yield
                    return
            with self._visit(line):
                yield

    @contextmanager
    def _visit(self, line: _Line) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        line.begun.append(began)
        try:
            yield
        finally:
            self._places.release()
            line.begun.remove(began)
            line.took = loop.time() - began

    def missed(self, receiver: str, reason: str) -> None:
        """It was not reached. Those who came to it with the first to find that say nothing new."""
        line, now = self._lines[receiver], asyncio.get_running_loop().time()
        if line.absence is None:
            line.absence = Absence(now, reason, _FIRST_PAUSE, now + _FIRST_PAUSE)
        elif now >= line.absence.until:
            pause = min(2 * line.absence.pause, _LONGEST_PAUSE)
            line.absence = Absence(line.absence.since, reason, pause, now + pause)

    def met(self, receiver: str) -> None:
        """It was reached."""
        self._lines[receiver].absence = None

    def absence(self, receiver: str) -> Absence | None:
        """None: it is there, or nobody has tried it of late."""
        line = self._lines.get(receiver)
        return line.absence if line else None

    def seconds_ahead(self, receiver: str) -> float:
        """Until all those have had their turn who came to this receiver, as it goes now. 0: it is not known."""
        line = self._lines.get(receiver)
        if line is None:
            return 0.0
        at_once = self._each if line.absence is None else 1
        return (line.length + line.turned_away) * line.pace(asyncio.get_running_loop().time()) / at_once


def _fits(own: int, more: int, of_all: int, most: int) -> bool:
    """The first of its line always does while there is room at all, however large it is."""
    return own + more <= most - of_all if own else of_all < most
