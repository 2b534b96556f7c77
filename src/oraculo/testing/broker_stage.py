"""What the tests of the broker suite are written with."""

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
    delivery_limit = 3  # make_broker builds a broker that delivers a message this often at most
    patience = 15.0  # seconds until something that must happen counts as missing
    quiet = 0.15  # seconds in which something that must not happen would have happened

    async def make_broker(self) -> FullBroker:
        """A broker with `delivery_limit`, not started yet."""
        raise NotImplementedError("the adapter's test class says how to make its broker")

    async def forget(self, queues: Sequence[str]) -> None:
        """Called after each test with the queues it made: deletes them where they would outlive the broker."""

    async def delete_alone(self, queue: str) -> None:
        """Deletes the queue, and not its dead-letter queue, as anybody might by other means."""
        raise unittest.SkipTest("nobody can delete a queue there without its dead letters, or it is not said how")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[tuple[FullBroker, str]]:
        """A started broker and the name of a queue that is declared and empty."""
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
        """Exactly `count` deliveries, however many takes it needs."""
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
        """Looks until it accepts what it sees."""
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

    async def letters(self, broker: FullBroker, queue: str, count: int) -> Sequence[DeadLetter]:
        """The dead letters, once there are `count`."""
        return await self.eventually(
            lambda: broker.dead_letters(queue, limit=count + 1), lambda letters: len(letters) == count
        )

    async def bury(self, broker: FullBroker, queue: str, count: int) -> Sequence[DeadLetter]:
        """Publishes `count` dead letters, `letter 0` the oldest."""
        await publish_all(broker, [Outgoing(queue, f"letter {n}".encode(), reason=f"reason {n}") for n in range(count)])
        return await self.letters(broker, queue, count)

    async def assert_empty(self, broker: FullBroker, queue: str) -> None:
        await self.state_where(broker, queue, lambda state: state.ready == 0 and state.unacked == 0)
