"""What people and upkeep do with queues: count them, look at dead letters, send them again, remove queues.

Every call may raise BrokerUnavailable (cannot be reached now: try again) or BrokerError (refused).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from oraculo.errors import BrokerError
from oraculo.ports.broker import Broker
from oraculo.wire.naming import shown

LETTER_PAGE_BYTES = 8 * 1024 * 1024  # of bodies that one call of `dead_letters` returns, and at most one more
LETTER_BODY_BYTES = 1024 * 1024  # of one body there; what is beyond is cut off
LETTER_SEPARATOR = ":"  # of several brokers, between the name of a dead letter's and its id there


class NotAnId(BrokerError):
    """What was given for the id of a dead letter cannot be one there."""

    def __init__(self, given: str) -> None:
        super().__init__(f"after: not the id of a dead letter: {shown(given)}")


class DeadLetter(msgspec.Struct, frozen=True):
    """A message in quarantine."""

    id: str
    queue: str  # the queue it came from, not the dead-letter queue
    body: bytes
    reason: str
    at: float  # seconds since the epoch; 0: nobody told, as a plain client that put it there itself
    redeliveries: int = 0
    cut_from: int | None = None  # bytes of the whole body, where `body` is its beginning only


class QueueState(msgspec.Struct, frozen=True):
    queue: str
    ready: int  # waiting to be delivered, those that wait for a delay included
    unacked: int | None  # delivered and not yet settled; None: the broker does not tell
    dead_letters: int
    consumers: int | None = None  # None: the broker does not tell
    delayed: int = 0  # those of `ready` that wait for a delay, as far as the broker tells
    at: Mapping[str, "QueueState"] = {}  # of several brokers, as each that has the queue tells by itself
    taken: tuple[bytes, ...] | None = None  # the bodies of those unacked, where the broker is in this process
    paused: str | None = None  # why nobody is given its messages, though the broker works


class BrokerAdmin(Protocol):
    """The queues of a broker, as people and upkeep see them."""

    def behind(self) -> "Sequence[FullBroker]":
        """The same brokers, each to be used by itself."""
        ...

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        """The state of the named queues that exist, or of all; dead-letter queues are counted with their queue. One
        that somebody deleted is told of while its dead-letter queue is there: nobody else would see what rests in it.
        """
        ...

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        """Looks at the quarantine of `queue`, oldest first, starting behind id `after`. Takes nothing out.

        However large the letters are, little is read into memory: bodies over LETTER_BODY_BYTES are cut, and the page
        ends with the letter that passes LETTER_PAGE_BYTES. Raises NotAnId when `after` cannot be one.
        """
        ...

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        """Shows to `see` each dead letter of `queue` (all, or those named), a few in memory at a time. Takes nothing
        out; unknown ids are passed over. Where one can be found only by reading all, they are read once, and not once
        for each page."""
        ...

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        """Moves dead letters (all, or those named) back to the end of `queue`, their deliveries counted from zero.
        Returns how many were moved; unknown ids are passed over. Raises QueueUnavailable when `queue` did not take
        all of them: those that it took were moved, the others were not."""
        ...

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        """Deletes dead letters. Returns how many there were."""
        ...

    async def remove(self, queues: Sequence[str]) -> None:
        """Deletes each queue with all that belongs to it: what waits, also for a delay, and its dead letters. One that
        is not there is fine. For queues that nobody uses any more: whoever still consumes one loses its subscription.
        """
        ...

    async def remove_unused(self, queues: Sequence[str]) -> Sequence[str]:
        """Deletes each queue that nobody consumes, that is empty, and whose dead letters and delayed messages are none
        either. Returns those that are gone, also those that were not there. Where it is not done safely (see
        `Capabilities`), the caller sees to it that none of its own messages is on its way there."""
        ...


class FullBroker(Broker, BrokerAdmin, Protocol):
    """All that a broker adapter does. Whoever uses a part of it asks for that part's Protocol."""
