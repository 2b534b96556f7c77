"""Queues of messages, as the engine and the workers use them.

Queue names are physical: any prefix is in them already. `<queue>.dlq` is the quarantine of `<queue>`.

Every call may raise BrokerUnavailable (cannot be reached now: try again) or BrokerError (refused).
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from oraculo.errors import BrokerError, BrokerUnavailable

NO_REASON = "published to the dead-letter queue without a reason"
MAY_LOSE = "a queue may lose messages"  # logged, with `queue` and `reason`, of one that others made so


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


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What became of one published message: the broker that took it, or why none did.

    `error` is QueueFull or QueueDown where a retry may help, MessageTooLarge or another BrokerError where none will.
    """

    broker: str | None = None
    error: BrokerError | None = None


class NotMoved(BrokerUnavailable):
    """One of several brokers could not put a dead letter away: it comes again. What else the consumer holds is held
    still: there is no reason to close it."""


class ConsumerDoubted(BrokerUnavailable):
    """Nothing is wrong as far as anybody knows, and nothing proves that the consumer hears: whoever owns it subscribes
    again at once, without alarm."""


class Delivery(msgspec.Struct, gc=False):
    """A message handed to a consumer: it stays the broker's until it is acked, retried or dead-lettered."""

    queue: str
    body: bytes
    token: int | str  # the adapter's own handle
    redeliveries: int = 0  # how often it was delivered before
    via: str | None = None  # of several brokers, the one that brought it


class BrokerStatus(msgspec.Struct, frozen=True):
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


class Publisher(Protocol):
    """A broker, or a part that publishes to one."""

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]: ...


class Broker(Protocol):
    """Publishes and consumes messages. `broker_admin` has what people and upkeep do with queues."""

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

    def statuses(self) -> Sequence[BrokerStatus]:
        """The broker, or each of the brokers that stand behind this one, in order of preference."""
        ...

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        """Return one receipt a message, in their order, once the broker has confirmed or refused each.

        A queue that is missing is made. A message whose `reason` is set is a dead letter of `queue` and goes to its
        dlq. Raises BrokerError, mostly BrokerUnavailable, when nothing is known of any message: some may have been
        taken, so publishing again makes duplicates, never losses.
        """
        ...

    async def consume(self, queue: str, *, prefetch: int) -> Consumer:
        """Subscribes, making the queue where it is missing. Messages published before are delivered too."""
        ...

    async def check(self) -> str:
        """Proves that it works and returns its version for people; raises BrokerUnavailable with the reason. What
        stands behind a semicolon is a warning: messages can be lost as it is set up."""
        ...

    async def close(self) -> None:
        """Closes every consumer and the connection. Idempotent."""
        ...


def ensure_taken(receipts: Sequence[Receipt]) -> Sequence[str]:
    """Return the broker that took each message. Raises the first error among the receipts."""
    for receipt in receipts:
        if receipt.error is not None:
            raise receipt.error
    return [receipt.broker or "" for receipt in receipts]


async def publish_all(broker: Publisher, messages: Sequence[Outgoing]) -> None:
    """Publish messages, all of which must be taken. Raises BrokerError for the first that was not."""
    ensure_taken(await broker.publish(messages))
