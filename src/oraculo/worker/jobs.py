"""The records of a worker's work: received commands, jobs, and a lane for each queue."""

from collections import deque

import msgspec

from oraculo.clients.subscription import Subscription
from oraculo.ports.broker import Delivery
from oraculo.wire.message import Message
from oraculo.worker.answer_memory import Identity
from oraculo.worker.context import Context
from oraculo.worker.handlers import Handler


class ReceivedCommand(msgspec.Struct, eq=False, frozen=True):
    """A delivered command. It is owed an answer, and acked once the broker confirmed the answer."""

    subscription: Subscription
    delivery: Delivery
    command: Message


class Job(msgspec.Struct, eq=False):
    """A command that is worked on once. Every delivery of it gets the same answer."""

    lane: "Lane"
    command: Message
    received: list[ReceivedCommand]
    identity: Identity | None
    deadline: float | None
    context: Context | None = None
    in_thread: bool = False  # a thread cannot be cancelled
    ended: bool = False  # answered or given back; its handler may still run after the deadline

    def add_delivery(self, received: ReceivedCommand) -> None:
        """Answer this delivery too, and no longer those of lost subscriptions."""
        self.received = [*(each for each in self.received if not each.subscription.closed), received]

    @property
    def was_given_back(self) -> bool:
        """True when this worker holds no delivery of it: the broker delivers it again."""
        return self.received[0].subscription.closed and all(each.subscription.closed for each in self.received)

    @property
    def is_settled(self) -> bool:
        """True when every delivery was acked or given back."""
        return all(not each.subscription.holds(each.delivery) for each in self.received)


class Lane(msgspec.Struct, eq=False):
    """One queue's handler with its waiting jobs and the number of running ones. The prefetch bounds the backlog."""

    handler: Handler
    limit: int
    backlog: deque[Job] = msgspec.field(default_factory=deque)
    running: int = 0
    subscription: Subscription | None = None  # the latest that delivered

    @property
    def queue(self) -> str:
        return self.handler.queue
