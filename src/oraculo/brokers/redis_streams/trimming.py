"""Trimming of streams: most plain workers ack messages and do not delete them."""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import structlog

from oraculo.brokers.redis_streams.scripts import TRIM
from oraculo.brokers.redis_streams.server import ERRORS
from oraculo.clients.redis import Command, ReplyError, translated
from oraculo.errors import BrokerUnavailable
from oraculo.wire.naming import is_dlq

TRIMMED_EVERY = 2.0  # seconds
TRIMMED_TOGETHER = 100  # queues
MOST_REMEMBERED = 10_000  # queues; the oldest are trimmed after the next message for them

_log = structlog.get_logger("oraculo.brokers.redis")


class Trimmer:
    """The queues that are due for trimming.

    The commands go along with a publish now and then, so they need neither a task nor a round trip of their own.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._sent_to: dict[str, None] = {}  # not seen empty since, longest untrimmed first
        self._next = 0.0
        self._is_permitted = True

    def note_sent(self, queues: Iterable[str]) -> None:
        """Record queues that messages were sent to. Dead letters are never trimmed."""
        self._sent_to.update(dict.fromkeys(queue for queue in queues if not is_dlq(queue)))
        while len(self._sent_to) > MOST_REMEMBERED:
            del self._sent_to[next(iter(self._sent_to))]

    def due(self) -> list[str]:
        now = asyncio.get_running_loop().time()
        if now < self._next or not self._is_permitted:
            return []
        self._next = now + TRIMMED_EVERY
        return list(islice(self._sent_to, TRIMMED_TOGETHER))

    def absorb(self, queues: Sequence[str], replies: Sequence[Any]) -> None:
        """Store how many messages each queue still has."""
        for queue, left in zip(queues, replies, strict=True):
            self._sent_to.pop(queue, None)
            if isinstance(left, ReplyError):
                self._note_refusal(left)
            elif left:
                self._sent_to[queue] = None

    def _note_refusal(self, error: ReplyError) -> None:
        """Stop trimming for a user without the right to. Each version words that refusal differently."""
        is_passing = isinstance(translated(error, self._place, ERRORS), BrokerUnavailable)
        if self._is_permitted and not is_passing:
            self._is_permitted = False
            why = "what workers ack and do not delete stays in its stream: grant +xtrim"
            _log.warning(why, broker=self._place, reason=str(error))


def trim_command(queue: str) -> Command:
    return ("EVAL", TRIM.text, 1, queue)
