"""Publishing and consuming: the contract of every broker adapter.

Queue names are physical: they already include any prefix. `<queue>.dlq` holds the dead letters of `<queue>`.

Every call may raise:
- BrokerUnavailable: the broker cannot be reached now, and a later try may work;
- any other BrokerError: the broker refused, and the same call would be refused again.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from oraculo.errors import BrokerError, BrokerUnavailable

NO_REASON = "published to the dead-letter queue without a reason"
# Log event, with `queue` and `reason`, for a queue that others declared with unsafe settings.
MAY_LOSE = "a queue may lose messages"


class Capabilities(msgspec.Struct, frozen=True):
    """The abilities of an adapter. Code that depends on one of them asks here, never for the adapter's name."""

    durable: bool  # messages survive a restart of the broker
    shared: bool  # other processes can reach the same queues
    priorities: bool  # a message of higher priority is delivered first
    counts_consumers: bool  # QueueState.consumers is known
    peeks: bool = False  # reading dead letters hides them from nobody else
    drops_repeats: bool = False  # for a while, it drops a second message with the same key
    lists_queues: bool = True  # `queues()` returns all of them, not only those that this process used
    max_message: int | None = None  # bytes, by the server's settings; None: unknown or irrelevant


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A message to be published."""

    queue: str
    body: bytes
    priority: int = 0
    reason: str | None = None  # set for a dead letter: why the message could not be handled
    # Seconds since the epoch. After it nobody needs the message, and the broker may drop it: its run has recorded the
    # timeout by itself, so nothing is lost in silence. None for a dead letter.
    expires_at: float | None = None
    prefer: str | None = None  # where there are several brokers, the name of the one to try first
    # Unique in its queue, and the same when this message is sent again because nobody knows whether the first sending
    # arrived. A broker with `drops_repeats` drops the second, even if the first was acked. None for a dead letter.
    key: str | None = None
    is_reply: bool = False  # for a client's queue, which the client may delete: then the message is not missed
    # Handling this message frees no room, while handling an answer does: the answered command leaves. A broker that is
    # almost full refuses such a message and keeps its last room for the others, or it would stay full.
    leaves_room: bool = False


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """The outcome of publishing one message: the broker that took it, or the error.

    The error is QueueFull or QueueDown where a retry may help. It is MessageTooLarge or another BrokerError where no
    retry will.
    """

    broker: str | None = None
    error: BrokerError | None = None


class NotMoved(BrokerUnavailable):
    """One of several brokers could not move a message to the dead letters, and will deliver it again.

    The consumer still holds its other messages, so there is no reason to close it.
    """


class ConsumerDoubted(BrokerUnavailable):
    """Nothing proves that a consumer still receives, and nothing proves the opposite.

    The owner of the consumer subscribes again at once and raises no alarm.
    """


class Delivery(msgspec.Struct, gc=False):
    """A message handed to a consumer. The broker keeps it until it is acked, retried or dead-lettered."""

    queue: str
    body: bytes
    token: int | str  # the adapter's own handle
    redeliveries: int = 0  # how often it was delivered before
    via: str | None = None  # where there are several brokers, the name of the one that delivered it


class BrokerStatus(msgspec.Struct, frozen=True):
    """The last known state of the connection to one broker."""

    name: str
    trouble: str | None  # the reason why it cannot be used now; None: no problem is known
    deaf: tuple[str, ...] = ()  # queues whose consumer is connected, receives nothing, and is being made again
    stuck: tuple[tuple[str, str], ...] = ()  # queues that fail on a broker that works, each with the evidence
    unread: tuple[tuple[str, str], ...] = ()  # the deaf queues whose consumer fails, each with the reason
    paused: tuple[tuple[str, str], ...] = ()  # the deaf queues that were paused at the broker, each with the end


class Consumer(Protocol):
    """One subscription to a queue.

    A message is settled by `ack`, `retry` or `dead_letter`. Settling it again, or after it was redelivered, does
    nothing. When a settlement raises BrokerUnavailable, the broker may deliver the message again.
    """

    async def take(self, limit: int) -> Sequence[Delivery]:
        """Wait for at least one message, then return all that are there, in order, up to `limit`.

        At most `prefetch` messages are unsettled at a time. Returns an empty list only when the consumer is closed.
        Raises BrokerUnavailable, or its subclass ConsumerDoubted, when the owner has to subscribe again.
        """
        ...

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Remove handled messages from the queue."""
        ...

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        """Deliver the message again after at least `delay` seconds.

        At its delivery limit the broker moves it to the dead letters instead, with this reason.
        """
        ...

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Move the message to `<queue>.dlq`. It leaves the queue only after it has arrived there.

        Raises BrokerUnavailable, or NotMoved where there are several brokers, when it could not be moved.
        """
        ...

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        """Move several messages, each with its reason, as `dead_letter` moves one. Raises when any stayed."""
        ...

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Keep messages that are still in work from being delivered to another consumer."""
        ...

    async def close(self) -> None:
        """End the subscription. Unsettled messages are delivered again."""
        ...


class Publisher(Protocol):
    """A broker, or a part of one, that publishes."""

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        """Publish messages, as `Broker.publish` does."""
        ...


class Broker(Protocol):
    """A broker as the engine and the workers use it. `broker_admin` has the rest."""

    @property
    def name(self) -> str:
        """The broker's name in logs and lists: `memory`, `rabbitmq`, … Unique among the brokers of a process."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self) -> None:
        """Connect. Idempotent."""
        ...

    async def declare(self, queues: Sequence[str]) -> None:
        """Create the queues, each with its dead-letter queue, where they are missing."""
        ...

    def statuses(self) -> Sequence[BrokerStatus]:
        """Return the status of this broker, or of each broker behind it in order of preference. Does no I/O."""
        ...

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        """Return one receipt for each message, in order, once the broker has confirmed or refused it.

        Missing queues are created. A message with a `reason` goes to the dead letters of its queue. Raises
        BrokerError, mostly BrokerUnavailable, when the outcome of all messages is unknown. Some may have been taken,
        so publishing again can make duplicates but never loses any.
        """
        ...

    async def consume(self, queue: str, *, prefetch: int) -> Consumer:
        """Subscribe to a queue, and create it where it is missing. Messages published before are delivered too."""
        ...

    async def check(self) -> str:
        """Return the broker's version, once it has proved that it works. Raises BrokerUnavailable with the reason.

        A text after a semicolon is a warning: its settings allow messages to be lost.
        """
        ...

    async def close(self) -> None:
        """Close every consumer and the connection. Idempotent."""
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
