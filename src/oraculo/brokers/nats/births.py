"""When each stream was made, as the server says. One that is gone, or was made anew, had messages that were confirmed:
that is a loss.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from oraculo.brokers.nats.connection import MOST_KNOWN, Connection
from oraculo.brokers.nats.layout import stream_of
from oraculo.brokers.nats.replies import ApiError

PAGE = 128  # streams that are looked at together
LOOKING_FOR_LOSSES = 1.0  # seconds after which no more streams are looked at before a new connection is used


class Births:
    """`consumed`: the streams that are consumed now."""

    def __init__(self, consumed: Callable[[], set[str]]) -> None:
        self._consumed = consumed
        self._born: dict[str, str] = {}  # what was used last comes last
        self.losses = 0

    async def compare(self, connection: Connection, patience: float) -> None:
        """At those used last first, and for a limited time: with thousands of streams no connection would ever be made.
        One that was not looked at is compared when it is next used; but one loss is not to be counted again with each.
        """
        unseen = list(reversed(self._born.items()))
        lost: list[str] = []
        clock = asyncio.get_running_loop().time
        ends = clock() + LOOKING_FOR_LOSSES
        while unseen and clock() < ends:
            async with asyncio.timeout(patience):
                lost += await self._lost_among(connection, unseen[:PAGE])
            del unseen[:PAGE]
        if lost:
            for stream in [*lost, *(stream for stream, _ in unseen)]:
                self._born.pop(stream, None)  # made again when it is next used
            self.losses += 1

    async def _lost_among(self, connection: Connection, known: Sequence[tuple[str, str]]) -> list[str]:
        """Of one that has no leader nobody can tell: it was not lost, as far as is known."""
        calls = ((f"STREAM.INFO.{stream}", None) for stream, _ in known)
        answers = await connection.ask_many(calls, LOOKING_FOR_LOSSES)
        return [
            stream
            for (stream, born), answer in zip(known, answers, strict=True)
            if (answer.is_missing if isinstance(answer, ApiError) else answer["created"] != born)
        ]

    def note(self, stream: str, born: str) -> None:
        """Forgets what was not used for longest, but no queue that is consumed: reply queues come and go, it stays."""
        self._born.pop(stream, None)
        self._born[stream] = born
        if len(self._born) > MOST_KNOWN:
            consumed = self._consumed()
            oldest = next((each for each in self._born if each not in consumed), stream)
            del self._born[oldest]

    def forget(self, queues: Iterable[str]) -> None:
        """They were removed on purpose: that is no loss."""
        for queue in queues:
            self._born.pop(stream_of(queue), None)

    def is_reborn(self, queue: str, born: str) -> bool:
        """Whether its stream was there before and is another now. Notes that."""
        stream = stream_of(queue)
        before = self._born.get(stream)
        self.note(stream, born)
        return before is not None and before != born

    def note_used(self, streams: Iterable[str]) -> None:
        for stream in streams:
            if stream in self._born:
                self.note(stream, self._born[stream])
