"""The means of the broker suite: starting brokers, taking messages, and waiting for counts."""

import asyncio
import unittest
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from oraculo.ports.broker import Consumer, Delivery, Outgoing, publish_all
from oraculo.ports.broker_admin import DeadLetter, FullBroker, QueueState

Seen = TypeVar("Seen")


class BrokerStage:
    """The base of the broker suite. An adapter's test class implements `make_broker`."""

    delivery_limit = 3  # how often a broker of `make_broker` delivers a message
    patience = 15.0  # seconds within which an expected event must happen
    quiet = 0.15  # seconds within which a forbidden event would have happened

    async def make_broker(self) -> FullBroker:
        """Return a broker with `delivery_limit`, not started yet."""
        raise NotImplementedError("the adapter's test class says how to make its broker")

    async def forget(self, queues: Sequence[str]) -> None:
        """Delete the queues of a test where they would outlive the broker."""

    async def delete_alone(self, queue: str) -> None:
        """Delete a queue without its dead-letter queue, as other programs can."""
        raise unittest.SkipTest("nobody can delete a queue there without its dead letters, or it is not said how")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[FullBroker, str]]:
        """Yield a started broker and the name of a queue that is declared and empty."""
        self._made: list[str] = []
        broker, queue = await self.make_broker(), self.fresh_name()
        try:
            await broker.start()
            await broker.declare([queue])
            yield broker, queue
        finally:
            await broker.close()
            await self.forget(self._made)

    def fresh_name(self) -> str:
        self._made.append(f"suite-{uuid.uuid4().hex}")
        return self._made[-1]

    async def take(self, consumer: Consumer, count: int) -> list[Delivery]:
        """Return exactly `count` deliveries, however many takes that needs."""
        taken: list[Delivery] = []
        async with asyncio.timeout(self.patience):
            while len(taken) < count:
                batch = await consumer.take(count - len(taken))
                assert batch, "take returned nothing on an open consumer"
                taken += batch
        assert len(taken) == count, f"take({count}) gave more than it was asked for"
        return taken

    async def take_one(self, consumer: Consumer) -> Delivery:
        return (await self.take(consumer, 1))[0]

    async def eventually(self, look: Callable[[], Awaitable[Seen]], accept: Callable[[Seen], bool]) -> Seen:
        """Look until `accept` returns True, and return what was seen."""
        deadline = asyncio.get_running_loop().time() + self.patience
        while not accept(seen := await look()):
            assert asyncio.get_running_loop().time() < deadline, f"still {seen} after {self.patience} s"
            await asyncio.sleep(0.01)
        return seen

    async def state(self, broker: FullBroker, queue: str) -> QueueState:
        (state,) = await broker.queues([queue])
        return state

    async def state_where(self, broker: FullBroker, queue: str, accept: Callable[[QueueState], bool]) -> QueueState:
        return await self.eventually(lambda: self.state(broker, queue), accept)

    async def dead_letters(self, broker: FullBroker, queue: str, count: int) -> Sequence[DeadLetter]:
        """Return the dead letters, once there are `count`."""
        return await self.eventually(
            lambda: broker.dead_letters(queue, limit=count + 1), lambda letters: len(letters) == count
        )

    async def add_dead_letters(self, broker: FullBroker, queue: str, count: int) -> Sequence[DeadLetter]:
        """Publish `count` dead letters, oldest first from `letter 0`."""
        await publish_all(broker, [Outgoing(queue, f"letter {n}".encode(), reason=f"reason {n}") for n in range(count)])
        return await self.dead_letters(broker, queue, count)

    async def assert_empty(self, broker: FullBroker, queue: str) -> None:
        await self.state_where(broker, queue, lambda state: state.ready == 0 and state.unacked == 0)
