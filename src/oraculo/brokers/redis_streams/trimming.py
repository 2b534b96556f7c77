"""Trimming of streams: most plain workers ack messages and do not delete them."""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from oraculo.brokers.redis_streams.scripts import TRIM
from oraculo.clients.redis import Command, ReplyError
from oraculo.wire.naming import is_dlq

TRIMMED_EVERY = 2.0  # seconds
TRIMMED_TOGETHER = 100  # queues
MOST_REMEMBERED = 10_000  # queues; the oldest are trimmed after the next message for them


class Trimmer:
    """The queues that are due for trimming.

    The commands go along with a publish now and then, so they need neither a task nor a round trip of their own.
    """

    def __init__(self) -> None:
        self._sent_to: dict[str, None] = {}  # not seen empty since, longest untrimmed first
        self._next = 0.0

    def note_sent(self, queues: Iterable[str]) -> None:
        """Record queues that messages were sent to. Dead letters are never trimmed."""
        self._sent_to.update(dict.fromkeys(queue for queue in queues if not is_dlq(queue)))
        while len(self._sent_to) > MOST_REMEMBERED:
            del self._sent_to[next(iter(self._sent_to))]

    def due(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        if now < self._next:
            return []
        self._next = now + TRIMMED_EVERY
        return list(islice(self._sent_to, TRIMMED_TOGETHER))

    def absorb(self, queues: Sequence[str], replies: Sequence[Any]) -> None:
        """Store how many messages each queue still has."""
        for queue, left in zip(queues, replies, strict=True):
            self._sent_to.pop(queue, None)
            if left and not isinstance(left, ReplyError):  # a user without the right to trim does without
                self._sent_to[queue] = None


def trim_command(queue: str) -> Command:
    return ("EVAL", TRIM.text, 1, queue)
