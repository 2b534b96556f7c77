"""Queues of messages, as the engine and the workers use them.

Queue names are physical: any prefix is in them already. `<queue>.dlq` is the quarantine of `<queue>`.

Every call may raise BrokerUnavailable (cannot be reached now: try again) or BrokerError (refused).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.wire.naming import shown

NO_REASON = "published to the dead-letter queue without a reason"
MAY_LOSE = "a queue may lose messages"  # logged, with `queue` and `reason`, of one that others made so
LETTER_PAGE_BYTES = 8 * 1024 * 1024  # of bodies that one call of `dead_letters` returns, and at most one more
LETTER_BODY_BYTES = 1024 * 1024  # of one body there; what is beyond is cut off
LETTER_SEPARATOR = ":"  # of several brokers, between the name of a dead letter's and its id there


class Capabilities(msgspec.Struct, frozen=True):
    """What an adapter can and cannot do; whoever depends on one of these asks here and nowhere else."""

    durable: bool  # messages survive the broker's restart
    shared: bool  # other processes can reach the same queues
    priorities: bool  # a message of a higher priority overtakes
    counts_consumers: bool  # QueueState.consumers is known
    peeks: bool = False  # whoever looks at dead letters hides them from nobody meanwhile
    drops_repeats: bool = False  # of a message with a key, for a while
    removes_safely: bool = True  # no message that comes while `remove_unused` is at work is lost
    lists_queues: bool = True  # `queues()` tells of all, and not only of those that this process had to do with
    max_message: int | None = None  # bytes, as its server is set up; None: not known, or more than anybody sends


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A message to be published. `reason` is for a dead letter: why it is one.

    `expires_at`, in seconds since the epoch: after it nobody needs the message, and a broker that can may drop it then.
    Its run has marked it timeout by itself, so nothing is lost in silence. A dead letter has none.

    `key`: the same whenever this message is sent without knowing that it was sent before, and no other's in its queue.
    A broker that can drops such a repeat, even of what was acked already. A dead letter has none.

    `is_reply`: for the queue of a client, who may delete it once it has read: that its queue is gone is no loss.

    `leaves_room`: to take it makes no room, as to take an answer does, by which its command leaves. A broker that is
    almost full, and can tell, keeps what is left for the others: or no answer would fit, and it would stay full.
    """

    queue: str
    body: bytes
    priority: int = 0
    reason: str | None = None
    expires_at: float | None = None
    prefer: str | None = None  # of several brokers, the one that should carry it if it can
    key: str | None = None
    is_reply: bool = False
    leaves_room: bool = False


class NotTaken(BrokerUnavailable):
    """The broker works, and did not take some messages: a queue is full, say. It may take them later.

    `vias`: for each message of the call, the link that took it, or None. Empty where there is no such call.
    `down`: the places among them of those whose queue does not work at all; the others' are full, by a limit of their
    owner's.
    """

    def __init__(self, told: str, vias: Sequence[str | None] = (), down: Collection[int] = ()) -> None:
        super().__init__(told)
        self.vias = vias
        self.down = down

    @property
    def count(self) -> int:
        return self.vias.count(None)


class NotMoved(BrokerUnavailable):
    """One of several brokers could not put a dead letter away: it comes again. What else the consumer holds is held
    still: there is no reason to close it."""


class ConsumerDoubted(BrokerUnavailable):
    """Nothing is wrong as far as anybody knows, and nothing proves that the consumer hears: whoever owns it subscribes
    again at once, without alarm."""


class NotAnId(BrokerError):
    """What was given for the id of a dead letter cannot be one there."""

    def __init__(self, given: str) -> None:
        super().__init__(f"after: not the id of a dead letter: {shown(given)}")


class Delivery(msgspec.Struct, gc=False):
    """A message handed to a consumer: it stays the broker's until it is acked, retried or dead-lettered."""

    queue: str
    body: bytes
    token: int | str  # the adapter's own handle
    redeliveries: int = 0  # how often it was delivered before
    via: str | None = None  # of several brokers, the one that brought it


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


class Link(msgspec.Struct, frozen=True):
    """How the connection to one broker is doing, as it was last seen. Asking costs nothing."""

    name: str
    trouble: str | None  # why it cannot be used now; None: nothing is known to be wrong
    losses: int = 0  # how often it may have lost messages that it had confirmed: it restarted without having kept them
    deaf: tuple[str, ...] = ()  # queues whose consumer is connected and gets nothing: it is being made again
    stuck: tuple[tuple[str, str], ...] = ()  # queues that do not work, while the broker does, and how that was seen
    unread: tuple[tuple[str, str], ...] = ()  # those of the deaf whose consumer fails, and why
    paused: tuple[tuple[str, str], ...] = ()  # those of the deaf that were paused at the broker, and until when


class Consumer(Protocol):
    """One subscription. A consumer that is closed gives back what it had not settled, to be delivered again."""

    async def take(self, limit: int) -> Sequence[Delivery]:
        """Waits for at least one message and returns all that are there, up to `limit`, in their order.

        Never more are out unsettled than the prefetch it was opened with. Returns an empty list only when closed.
        """
        ...

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """They were handled and leave the queue. Settling one twice, or after it was redelivered, does nothing."""
        ...

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        """Deliver it again, not before `delay` seconds. Past the delivery limit it goes to the dead letters instead,
        with this reason."""
        ...

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Move it to `<queue>.dlq`. It leaves the queue only once it is there."""
        ...

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        """Each with its reason, as `dead_letter` does one. Raises when some of them could not be moved."""
        ...

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """They are still being worked on: do not deliver them to anyone else yet."""
        ...

    async def close(self) -> None: ...


class Broker(Protocol):
    @property
    def name(self) -> str:
        """For people: `memory`, `rabbitmq`, …; unique among the brokers that a process uses."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self) -> None:
        """Connects. Idempotent."""
        ...

    async def declare(self, queues: Sequence[str]) -> None:
        """Makes the queues, and the dead-letter queue of each, where they are missing."""
        ...

    def links(self) -> Sequence[Link]:
        """The broker, or each of the brokers that stand behind this one, in order of preference."""
        ...

    def behind(self) -> "Sequence[Broker]":
        """The same brokers, each to be used by itself."""
        ...

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        """Returns once the broker has confirmed every message, with the name of the link that took each; a queue that
        is missing is made.

        Raises BrokerUnavailable when it cannot, or not in time. Some may then have been taken: publishing again makes
        duplicates, never losses. Raises NotTaken when it is known which were not taken. A message whose `reason` is set
        is a dead letter of `queue` and goes to its dlq.
        """
        ...

    async def consume(self, queue: str, *, prefetch: int) -> Consumer:
        """Subscribes, making the queue where it is missing. Messages published before are delivered too."""
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
        Returns how many were moved; unknown ids are passed over. Raises NotTaken, which names none, when `queue` is
        full: those that it took were moved, the others were not."""
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

    async def check(self) -> str:
        """Proves that it works and returns its version for people; raises BrokerUnavailable with the reason. What
        stands behind a semicolon is a warning: messages can be lost as it is set up."""
        ...

    async def close(self) -> None:
        """Closes every consumer and the connection. Idempotent."""
        ...
