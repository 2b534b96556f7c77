"""Simulated brokers, and the faulty connection of each process to them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, cast

from oraculo.brokers.memory import MemoryBroker
from oraculo.errors import BrokerUnavailable, MessageTooLarge, QueueDown, QueueFull
from oraculo.ports.broker import BrokerStatus, Capabilities, Consumer, Delivery, Outgoing, Receipt, publish_all
from oraculo.ports.broker_admin import FullBroker
from oraculo.ports.clock import Clock
from oraculo.testing.simulation.hosts import SimulatedHost
from oraculo.testing.simulation.trouble import Trouble

LEASE = 30.0
ANSWER_TIMEOUT = 5.0  # seconds, like `ORACULO_BROKER_PUBLISH_TIMEOUT`


class ServerState(Enum):
    """The state of a broker."""

    UP = auto()
    GONE = auto()  # nobody can be connected
    FROZEN = auto()  # it answers nobody, and does later what it was asked


class SimulatedServer:
    """One broker. It keeps its messages while it is away."""

    def __init__(self, name: str, clock: Clock, *, drops_repeats: bool) -> None:
        self.name = name
        self.drops_repeats = drops_repeats
        self.real = MemoryBroker(clock=clock, lease=LEASE)
        self.state = ServerState.UP
        self._is_up = asyncio.Event()
        self._is_up.set()
        self._connections: dict[HostBroker, None] = {}
        self._taken: dict[str, Outgoing] = {}  # messages by key

    async def leave(self, state: ServerState) -> None:
        self.state = state
        self._is_up.clear()
        if state is ServerState.GONE:
            for connection in list(self._connections):
                await connection.cut()

    def come_back(self) -> None:
        self.state = ServerState.UP
        self._is_up.set()

    async def lose_memory(self) -> None:
        self._taken.clear()
        await self.real.close()
        await self.real.start()

    def repeated(self, message: Outgoing) -> Outgoing | None:
        """Return the message that it took before under this key. Then it confirms the new one and drops it."""
        if message.key is None or not self.drops_repeats:
            return None
        first = self._taken.get(message.key)
        self._taken.setdefault(message.key, message)
        return first

    def connected(self, connection: "HostBroker") -> None:
        self._connections[connection] = None

    def disconnected(self, connection: "HostBroker") -> None:
        self._connections.pop(connection, None)

    async def reached(self) -> None:
        """Raise BrokerUnavailable when the broker is away."""
        if self.state is ServerState.FROZEN:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT):
                    await self._is_up.wait()
            except TimeoutError:
                raise BrokerUnavailable(f"{self.name} does not answer in the simulation") from None
        if self.state is ServerState.GONE:
            raise BrokerUnavailable(f"{self.name} is away in the simulation")

    async def thawed(self) -> None:
        if self.state is ServerState.FROZEN:
            await self._is_up.wait()


class HostBroker:
    """The connection of one host to a broker."""

    def __init__(self, server: SimulatedServer, host: SimulatedHost, trouble: Trouble, *, durable: bool) -> None:
        self.name = server.name
        self._server = server
        self._real = server.real
        self._host = host
        self._trouble = trouble
        self._consumers: list[HostConsumer] = []
        self.capabilities = Capabilities(
            durable=durable,
            shared=True,
            priorities=True,
            counts_consumers=True,
            peeks=True,
            drops_repeats=server.drops_repeats,
        )
        server.connected(self)
        self._goes_wrong()

    def _goes_wrong(self, for_seconds: float = 0.0) -> None:
        self._trouble.world.route_went_wrong(self._host, self.name, for_seconds)

    async def start(self) -> None:
        await self._reach()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """Return any other call of the broker, which cannot always be reached here."""
        return partial(self._ask, getattr(self._real, name))

    async def _ask(self, call: Callable[..., Awaitable[Any]], *args: object, **options: object) -> Any:
        await self._reach()
        return await call(*args, **options)

    async def _reach(self) -> None:
        self._trouble.step(self._host)
        try:
            await self._server.reached()
        except BrokerUnavailable:
            self._goes_wrong()
            raise

    def statuses(self) -> Sequence[BrokerStatus]:
        return [BrokerStatus(self.name, None)]

    def behind(self) -> Sequence[FullBroker]:
        return [self.whole()]

    def whole(self) -> FullBroker:
        return cast("FullBroker", self)  # with what `__getattr__` finds

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        trouble = self._trouble
        trouble.world.offered(self._host, self.name, messages)
        await self._reach_to_publish(messages)
        if trouble.happens("refuse"):
            self._goes_wrong()
            raise BrokerUnavailable("refused by the simulation")
        receipts = dict[int, Receipt](self._too_large(messages))
        messages_left = [message for place, message in enumerate(messages) if place not in receipts]
        if trouble.happens("hang"):
            self._goes_wrong(20.0)
            await trouble.hold_up(self._host, 20.0)
            await self._deliver(messages_left[: trouble.choose(len(messages_left) + 1)])
            raise BrokerUnavailable("hung in the simulation")
        full = self._full(messages) if trouble.happens("not_taken") else ()
        taken = [message for message in messages_left if message.queue not in full]
        await self._deliver(taken)
        trouble.step(self._host)
        trouble.world.confirmed(self._host, self.name, taken)
        if full:
            self._goes_wrong()
            refused = (QueueDown if trouble.choose(2) else QueueFull)("not taken in the simulation")
            receipts |= {
                place: Receipt(error=refused)
                for place, message in enumerate(messages)
                if message.queue in full and place not in receipts
            }
        return [receipts.get(place) or Receipt(self.name) for place in range(len(messages))]

    def _too_large(self, messages: Sequence[Outgoing]) -> Iterator[tuple[int, Receipt]]:
        for place, message in enumerate(messages):
            if message.key is not None and self._trouble.happens("too_large"):  # only commands have a key
                self._goes_wrong()
                self._trouble.world.too_large(self.name, message)
                yield place, Receipt(error=MessageTooLarge("too large in the simulation", len(message.body), 0))

    async def _reach_to_publish(self, messages: Sequence[Outgoing]) -> None:
        """Reach the broker. One that is frozen may still take what was sent to it."""
        try:
            await self._reach()
        except BrokerUnavailable:
            if self._server.state is ServerState.FROZEN:
                await self._deliver(messages[: self._trouble.choose(len(messages) + 1)])
            raise

    def _full(self, messages: Sequence[Outgoing]) -> list[str]:
        queues = dict.fromkeys(message.queue for message in messages)
        return [queue for queue in queues if self._trouble.choose(2)]

    async def _deliver(self, messages: Sequence[Outgoing]) -> None:
        trouble = self._trouble
        now: list[Outgoing] = []
        for message in messages:
            if (first := self._server.repeated(message)) is not None:
                trouble.world.repeat_dropped(first, message)
                continue
            trouble.world.published(self._host, self.name, message)
            if message.reason is None and trouble.happens("drop"):
                trouble.world.dropped(message)
                continue
            for _ in range(2 if message.reason is None and trouble.happens("duplicate") else 1):
                if trouble.happens("delay"):
                    trouble.world.deliver_later(self._real, message, trouble.up_to(5.0))
                else:
                    now.append(message)
        if now:
            await publish_all(self._real, now)

    async def consume(self, queue: str, *, prefetch: int) -> "HostConsumer":
        await self._reach()
        real = await self._real.consume(queue, prefetch=prefetch)
        consumer = HostConsumer(real, self._server, self._host, self._trouble)
        self._consumers.append(consumer)
        return consumer

    async def check(self) -> str:
        await self._reach()
        return "simulated"

    async def cut(self) -> None:
        """Cut the connection. Unsettled messages go back."""
        consumers, self._consumers = self._consumers, []
        for consumer in consumers:
            await consumer.cut()

    async def close(self) -> None:
        """Close the connection, because the host stopped or died."""
        self._server.disconnected(self)
        await self.cut()


class HostConsumer:
    """A consumer of one host, on which acks may be lost."""

    def __init__(self, real: Consumer, server: SimulatedServer, host: SimulatedHost, trouble: Trouble) -> None:
        self._real = real
        self._server = server
        self._host = host
        self._trouble = trouble
        self._is_cut = False

    async def take(self, limit: int) -> Sequence[Delivery]:
        deliveries = await self._real.take(limit)
        await self._server.thawed()
        self._trouble.step(self._host)
        self._expect_connection()
        self._trouble.world.took(self._host, self._server.name, self, deliveries)
        return deliveries

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._trouble.step(self._host)
        for delivery in deliveries:
            self._trouble.world.acked(self._host, self._server.name, delivery)
        if self._trouble.happens("lost_ack"):
            self._trouble.world.route_went_wrong(self._host, self._server.name, 0.0)
            raise BrokerUnavailable("the ack was lost in the simulation")
        await self._reach()
        await self._real.ack(deliveries)
        self._trouble.step(self._host)

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        self._trouble.step(self._host)
        self._trouble.world.oracle.put_aside(self, delivery.body)
        await self._reach()
        await self._real.retry(delivery, delay, reason)

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        self._trouble.step(self._host)
        self._trouble.world.oracle.put_aside(self, delivery.body)
        await self._reach()
        await self._real.dead_letter(delivery, reason)
        self._trouble.step(self._host)

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        for delivery, reason in letters:
            await self.dead_letter(delivery, reason)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        self._trouble.step(self._host)
        await self._reach()
        await self._real.extend(deliveries)

    async def _reach(self) -> None:
        self._expect_connection()
        try:
            await self._server.reached()
        except BrokerUnavailable:
            self._trouble.world.route_went_wrong(self._host, self._server.name, 0.0)
            raise
        self._expect_connection()

    def _expect_connection(self) -> None:
        if self._is_cut:
            self._trouble.world.route_went_wrong(self._host, self._server.name, 0.0)
            raise BrokerUnavailable(f"the connection to {self._server.name} is cut in the simulation")

    async def cut(self) -> None:
        self._is_cut = True
        await self.close()

    async def close(self) -> None:
        self._trouble.world.oracle.released(self)
        await self._real.close()
