"""Administration of queues: counts, dead letters, redrive and removal.

Every call may raise BrokerUnavailable (cannot be reached now, try again) or another BrokerError (refused).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from oraculo.errors import BrokerError
from oraculo.ports.broker import Broker
from oraculo.wire.naming import shown

DEAD_LETTER_PAGE_BYTES = 8 * 1024 * 1024  # of bodies that one call of `dead_letters` returns, and at most one more
DEAD_LETTER_BODY_BYTES = 1024 * 1024  # of one body there; what is beyond is cut off
DEAD_LETTER_ID_SEPARATOR = ":"  # of several brokers, between the name of a dead letter's and its id there


class NotAnId(BrokerError):
    """A dead letter was asked for by a text that cannot be the id of one."""

    def __init__(self, given: str) -> None:
        super().__init__(f"after: not the id of a dead letter: {shown(given)}")


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that could not be handled, with the reason."""

    id: str
    queue: str  # the queue that it came from, not the dead-letter queue
    body: bytes
    reason: str
    at: float  # seconds since the epoch; 0: not known, because a plain client put it there
    redeliveries: int = 0
    cut_from: int | None = None  # size of the whole body in bytes, where `body` is only its beginning


class QueueState(msgspec.Struct, frozen=True):
    """The counts of one queue, as its broker reported them."""

    queue: str
    ready: int  # messages waiting to be delivered, delayed ones included
    unacked: int | None  # delivered and not yet settled; None: the broker does not say
    dead_letters: int
    consumers: int | None = None  # None: the broker does not say
    delayed: int = 0  # the part of `ready` that waits for a delay, where the broker says so
    at: Mapping[str, "QueueState"] = {}  # the counts by broker, where there are several
    taken: tuple[bytes, ...] | None = None  # bodies of the unacked messages, where the broker is in this process
    paused: str | None = None  # the reason why the broker delivers nothing from this queue


class BrokerAdmin(Protocol):
    """The queues of a broker, for people and for upkeep."""

    def behind(self) -> "Sequence[FullBroker]":
        """Return the brokers behind this one, each usable on its own. A single broker returns itself."""
        ...

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        """Return the state of the named queues that exist, or of all queues.

        A dead-letter queue is counted with its queue. A deleted queue is still listed while its dead-letter queue
        exists, so that nobody overlooks what is in there.
        """
        ...

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        """Return dead letters of `queue`, oldest first, starting after id `after`. The queue keeps them.

        Memory stays small however large they are: bodies over DEAD_LETTER_BODY_BYTES are cut, and the page ends with
        the one that passes DEAD_LETTER_PAGE_BYTES. Raises NotAnId when `after` cannot be an id.
        """
        ...

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        """Call `see` with each dead letter of `queue`, or with each that `ids` names. The queue keeps them.

        A few are in memory at a time, and the queue is read once. Unknown ids are ignored.
        """
        ...

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        """Move dead letters (all, or the named ones) to the end of `queue`, with no deliveries counted.

        Returns how many were moved; unknown ids are ignored. Raises QueueUnavailable when `queue` took only some of
        them: the others stay where they are.
        """
        ...

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        """Delete the named dead letters and return how many there were."""
        ...

    async def remove(self, queues: Sequence[str]) -> None:
        """Delete each queue with its messages, delayed messages and dead letters. Missing queues are ignored.

        A consumer of such a queue loses its subscription, so ask for queues that nobody uses any more.
        """
        ...


class FullBroker(Broker, BrokerAdmin, Protocol):
    """A whole broker adapter. Callers that use a part of it ask for that part's Protocol."""
