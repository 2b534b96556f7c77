"""The records of the work: received commands, jobs, and a lane for each queue."""

from collections import deque

import msgspec

from oraculo.clients.subscription import Subscription
from oraculo.ports.broker import Delivery
from oraculo.wire.message import Message
from oraculo.worker.answer_memory import Identity
from oraculo.worker.context import Context
from oraculo.worker.handlers import Handler


class ReceivedCommand(msgspec.Struct, eq=False, frozen=True):
    """A delivered command: it is owed an answer, and acked once the answer is confirmed."""

    subscription: Subscription
    delivery: Delivery
    command: Message


class Job(msgspec.Struct, eq=False):
    """A command to be worked on once, however often it was delivered: each delivery gets the same answer."""

    lane: "Lane"
    command: Message
    received: list[ReceivedCommand]
    identity: Identity | None
    deadline: float | None
    context: Context | None = None
    in_thread: bool = False  # where nothing can cancel it
    ended: bool = False  # answered, or nobody's any more; its handler may still run when it outlived the deadline

    def is_delivered_again(self, received: ReceivedCommand) -> None:
        """What a lost subscription had brought is answered by way of this one, and once."""
        self.received = [*(each for each in self.received if not each.subscription.closed), received]

    @property
    def was_given_back(self) -> bool:
        """Nobody here holds it any more: it is delivered again, to us or to another worker."""
        return self.received[0].subscription.closed and all(each.subscription.closed for each in self.received)

    @property
    def is_settled(self) -> bool:
        """The broker has heard that it is done, or will deliver it again."""
        return all(not each.subscription.holds(each.delivery) for each in self.received)


class Lane(msgspec.Struct, eq=False):
    """One queue's handler, the jobs that wait for it and how many run. The backlog is bounded by the prefetch."""

    handler: Handler
    limit: int
    backlog: deque[Job] = msgspec.field(default_factory=deque)
    running: int = 0
    subscription: Subscription | None = None  # that brought something last

    @property
    def queue(self) -> str:
        return self.handler.queue
