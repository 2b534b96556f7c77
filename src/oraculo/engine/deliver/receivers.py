"""The turns of attempts: each receiver has a line of its own, so that a slow or silent one delays no other."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

_FIRST_PAUSE = 0.1  # seconds before a receiver that was not reached is tried again; doubled each time
_LONGEST_PAUSE = 5.0  # the longest delay after the receiver is back


@dataclass(slots=True)
class Absence:
    """The absence of a receiver that was not reached, by the loop's time, with the last reason."""

    since: float
    reason: str
    pause: float
    until: float  # the time of the next try


class _Line:
    """The attempts that wait for one receiver, or are under way there."""

    def __init__(self, places: int) -> None:
        self.places = asyncio.Semaphore(places)
        self.head = asyncio.Lock()
        self.length = 0
        self.bytes = 0
        self.turned_away = 0  # deliveries that found no room, and come after these
        self.begun: list[float] = []  # the starts of attempts under way
        self.took = 0.0  # seconds that the last attempt took
        self.absence: Absence | None = None

    def pace(self, now: float) -> float:
        """Return the seconds that one attempt takes. A silent receiver shows that before its first attempt ends."""
        return max(self.took, now - min(self.begun, default=now), self.absence.pause if self.absence else 0.0)

    async def rest(self, now: float) -> None:
        if self.absence is not None and now < self.absence.until:
            await asyncio.sleep(self.absence.until - now)


class Receivers:
    """The lines of all receivers.

    There are `places` for attempts, of which one receiver has at most `each`. `most` and `most_bytes` bound the
    attempts and bytes that are kept. One receiver may have as much of that as it leaves free, so that there is always
    room for another.
    """

    def __init__(self, places: int, each: int, most: int, most_bytes: int) -> None:
        self._places = asyncio.Semaphore(places)
        self._each = each
        self._most = most
        self._most_bytes = most_bytes
        self._length = 0
        self._bytes = 0
        self._lines: dict[str, _Line] = {}

    def enter(self, receiver: str, size: int) -> bool:
        """Return whether there was room in the line of a receiver. Whoever entered must leave."""
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
        """Forget an empty line, but not while its receiver counts as away.

        Otherwise each delivery that comes alone would find out anew that it is away.
        """
        line, loop = self._lines.get(receiver), asyncio.get_running_loop()
        if line is None or line.length:
            return
        if line.absence is not None and loop.time() < line.absence.until:
            loop.call_at(line.absence.until, self._forget_if_left, receiver)
        else:
            del self._lines[receiver]

    def resize(self, receiver: str, more: int) -> None:
        """Count that an aggregate in the line became larger or smaller."""
        self._count(self._lines[receiver], 0, more)

    def _count(self, line: _Line, one: int, size: int) -> None:
        line.length += one
        line.bytes += size
        self._length += one
        self._bytes += size

    @asynccontextmanager
    async def turn(self, receiver: str) -> AsyncIterator[None]:
        """Wait for a turn at a receiver.

        Only the head of a line waits for one of all places, so the lines take turns. While a receiver is away, one
        attempt at a time stays the head. Refused attempts take no time, and a whole line of them would leave nothing to
        others.
        """
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
        """Note that a receiver was not reached. Attempts that began before the last such note change nothing."""
        line, now = self._lines[receiver], asyncio.get_running_loop().time()
        if line.absence is None:
            line.absence = Absence(now, reason, _FIRST_PAUSE, now + _FIRST_PAUSE)
        elif now >= line.absence.until:
            pause = min(2 * line.absence.pause, _LONGEST_PAUSE)
            line.absence = Absence(line.absence.since, reason, pause, now + pause)

    def met(self, receiver: str) -> None:
        """Note that a receiver was reached."""
        self._lines[receiver].absence = None

    def absence(self, receiver: str) -> Absence | None:
        """Return the absence of a receiver; None when it is there, or was not tried lately."""
        line = self._lines.get(receiver)
        return line.absence if line else None

    def seconds_ahead(self, receiver: str) -> float:
        """Return the seconds until all have had their turn who came to this receiver.

        Return 0 when that is not known.
        """
        line = self._lines.get(receiver)
        if line is None:
            return 0.0
        at_once = self._each if line.absence is None else 1
        return (line.length + line.turned_away) * line.pace(asyncio.get_running_loop().time()) / at_once


def _fits(own: int, more: int, of_all: int, most: int) -> bool:
    """Return whether so much more fits.

    The first of a line fits while there is any room, however large it is.
    """
    return own + more <= most - of_all if own else of_all < most
