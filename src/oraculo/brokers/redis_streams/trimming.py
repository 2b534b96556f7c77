"""What plain workers leave in the streams that we send to: most of them ack, and delete nothing."""

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
MOST_REMEMBERED = 10_000  # queues; of more, the first are trimmed when something is sent to them again

_log = structlog.get_logger("oraculo.brokers.redis")


class Trimmer:
    """Which queues are to be trimmed. That is told to the server together with what is published, now and then: so it
    needs neither a task nor a round trip of its own."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._sent_to: dict[str, None] = {}  # and not seen empty since, those first that were not trimmed for longest
        self._next = 0.0
        self._is_permitted = True

    def note_sent(self, queues: Iterable[str]) -> None:
        """Dead letters stay, whoever reads them."""
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
        """Of each, how many messages it still has."""
        for queue, left in zip(queues, replies, strict=True):
            self._sent_to.pop(queue, None)
            if isinstance(left, ReplyError):
                self._note_refusal(left)
            elif left:
                self._sent_to[queue] = None

    def _note_refusal(self, error: ReplyError) -> None:
        """A user without the right is served all the same, and asks no more. Each version has other words for it."""
        is_passing = isinstance(translated(error, self._place, ERRORS), BrokerUnavailable)
        if self._is_permitted and not is_passing:
            self._is_permitted = False
            why = "what workers ack and do not delete stays in its stream: grant +xtrim"
            _log.warning(why, broker=self._place, reason=str(error))


def trim_command(queue: str) -> Command:
    return ("EVAL", TRIM.text, 1, queue)
