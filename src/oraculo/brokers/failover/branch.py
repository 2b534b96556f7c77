"""One of several brokers."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Broker, Link, NotTaken

T = TypeVar("T")


class Branch:
    """One of the brokers, and whether it is to be used now."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.name = broker.name
        self.trouble: str | None = "not connected yet"
        self.unheard: dict[str, None] = {}  # queues that it does not let us read
        self.usable = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self.trouble is None

    def fail(self, error: object) -> None:
        self.trouble = str(error) or type(error).__name__
        self.usable.clear()

    def recover(self) -> None:
        self.trouble = None
        self.usable.set()

    def link(self) -> Link:
        [seen] = self.broker.links()
        deaf = tuple(dict.fromkeys((*seen.deaf, *self.unheard)))
        return Link(self.name, self.trouble, seen.losses, deaf if self.is_up else (), seen.stuck)

    async def attempt(self, call: Awaitable[T]) -> T:
        """A call that fails because the broker cannot be reached takes it out of use."""
        try:
            return await call
        except NotTaken:  # by a broker that works
            raise
        except BrokerUnavailable as error:
            self.fail(error)
            raise
