"""One of several brokers, and its state."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import structlog

from oraculo.core.queue_health import QueueHealth
from oraculo.errors import BrokerError, BrokerUnavailable, QueueUnavailable
from oraculo.ports.broker import BrokerStatus
from oraculo.ports.broker_admin import FullBroker

T = TypeVar("T")

WORKS_AGAIN = "works again"  # reported for a broker that was away when a call failed and is back

_log = structlog.get_logger("oraculo.brokers.failover")


class Member:
    """One of the brokers, and what is known of it: its trouble, and queues that it does not let us read."""

    def __init__(self, broker: FullBroker) -> None:
        self.broker = broker
        self.name = broker.name
        self.trouble: str | None = "not connected yet"
        self._unread = QueueHealth()
        self.usable = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self.trouble is None

    def fail(self, error: object) -> None:
        self.trouble = str(error) or type(error).__name__
        self.usable.clear()
        self._unread.clear()  # consumers that are lost with their broker are not to blame

    def recover(self) -> None:
        self.trouble = None
        self.usable.set()

    def status(self) -> BrokerStatus:
        [seen] = self.broker.statuses()
        unread = self._unread.reasons(_now())
        deaf = tuple(dict.fromkeys((*seen.deaf, *unread))) if self.is_up else ()
        return BrokerStatus(self.name, self.trouble, deaf, seen.stuck, tuple(unread.items()), seen.paused)

    @property
    def is_deaf(self) -> bool:
        return bool(self.status().deaf)

    def why_unread(self, queue: str) -> str | None:
        return self._unread.reasons(_now()).get(queue)

    def note_read(self, queue: str) -> None:
        """Note that a message of the queue came, or that nobody wants to read it any more."""
        self._unread.works([queue])

    def note_unread(self, queue: str, error: Exception, *, was_read: bool) -> None:
        """Record that a queue could not be read while the broker works otherwise."""
        if self.is_up and self._unread.note_unread(queue, why := reason_of(error), _now(), was_read=was_read):
            _log.warning("a queue cannot be read", broker=self.name, queue=queue, reason=why)

    async def attempt(self, call: Awaitable[T]) -> T:
        """Await a call. BrokerUnavailable takes the broker out of use."""
        try:
            return await call
        except QueueUnavailable:  # the broker itself works
            raise
        except BrokerUnavailable as error:
            self.fail(error)
            raise


def reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, BrokerError) else f"{type(error).__name__}: {error}"


def _now() -> float:
    return asyncio.get_running_loop().time()
