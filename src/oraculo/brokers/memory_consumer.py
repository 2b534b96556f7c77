"""The consumer of the memory broker: it hands out messages, and takes them back when they are not settled."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import takewhile

from oraculo.brokers.memory_queues import Queue, StoredMessage
from oraculo.brokers.memory_server import MemoryServer
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Delivery

PAUSE_AFTER = 256  # messages that one consumer gets before the event loop runs others
FULL_PAUSE = 5.0  # seconds until a message comes again that the full dead-letter queue did not take


class MemoryConsumer:
    """One subscription to a queue of a MemoryBroker."""

    def __init__(self, server: MemoryServer, queue: Queue, prefetch: int, lease: float | None) -> None:
        self._server = server
        self._queue = queue
        self._prefetch = prefetch
        self._lease = lease
        self._out: dict[int | str, StoredMessage] = {}  # by token, in the order in which the leases end
        self._handed = 0  # messages since other tasks last ran
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        queue.consumers[self] = None

    @property
    def unsettled(self) -> int:
        return len(self._out)

    @property
    def bodies(self) -> Iterator[bytes]:
        return (message.body for message in self._out.values())

    @property
    def room(self) -> int:
        return self._prefetch - len(self._out)

    async def take(self, limit: int) -> Sequence[Delivery]:
        if limit < 1:
            raise BrokerError(f"limit: must be at least 1, got {limit}")
        await self._pause_now_and_then()
        has_turn = not self._queue.woken
        while not self._closed:
            deliveries = self._pull(limit) if has_turn else None
            if deliveries:
                return deliveries
            await self._queue.turn(self)
            self._handed, has_turn = 0, True
        self._queue.wake()  # another consumer may have the message that this one was woken for
        return []

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        settle = self._out.pop
        settled = [settle(delivery.token, None) for delivery in deliveries]
        self._server.forget(self._queue, filter(None, settled))
        self._queue.wake()

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        message = self._settle(delivery)
        if message is not None:
            self._server.give_back(self._queue, [message], reason, delay)
        self._queue.wake()

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        """Move the message to the dead letters.

        Raises BrokerUnavailable when they are full: it comes again after a pause.
        """
        message = self._settle(delivery)
        if message is None:
            return
        try:
            self._server.dead_letter(self._queue, message, reason)
        except BrokerUnavailable:
            self._server.give_back(self._queue, [message], reason, FULL_PAUSE)
            raise
        finally:
            self._queue.wake()

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        for delivery, reason in letters:
            await self.dead_letter(delivery, reason)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        if self._lease is None:
            return
        for delivery in deliveries:
            message = self._settle(delivery)
            if message is not None:
                self._out[delivery.token] = message  # last in the order: its lease now ends last
                message.lease_ends = asyncio.get_running_loop().time() + self._lease

    async def close(self) -> None:
        if self._closed:
            return
        self._server.give_back(self._queue, sorted(self._out.values()), self._too_often("the consumer closed"))
        self.abandon()
        self._queue.wake()
        self._server.tidy(self._queue.name)

    def abandon(self) -> None:
        """Close and give nothing back: the messages are gone with the broker, or are back already."""
        self._closed = True
        self._out.clear()
        self._queue.consumers.pop(self, None)
        self._queue.release(self)
        if self._timer is not None:
            self._timer.cancel()

    async def _pause_now_and_then(self) -> None:
        """Let other tasks run: a take that finds messages never waits, so a loop of takes would block the loop."""
        if self._handed >= PAUSE_AFTER:
            self._handed = 0
            await asyncio.sleep(0)

    def _pull(self, limit: int) -> list[Delivery]:
        """Take what is there, up to a fair share among the consumers that are awake."""
        queue = self._queue
        share = -(-len(queue.stock) // (queue.woken + 1))
        count = min(limit, self.room, share)
        if count <= 0:
            return []
        return self._hand_out(self._server.pull(queue, count))

    def _hand_out(self, messages: Sequence[StoredMessage]) -> list[Delivery]:
        name, first = self._queue.name, self._server.tokens + 1
        self._server.tokens += len(messages)
        self._handed += len(messages)
        self._out.update(enumerate(messages, first))
        if self._lease is not None:
            self._start_leases(messages, self._lease)
        return [
            Delivery(name, message.body, token, message.redeliveries) for token, message in enumerate(messages, first)
        ]

    def _settle(self, delivery: Delivery) -> StoredMessage | None:
        """Return the message and forget it, or None when it was settled or redelivered before."""
        return self._out.pop(delivery.token, None)

    def _start_leases(self, messages: Sequence[StoredMessage], lease: float) -> None:
        ends = asyncio.get_running_loop().time() + lease
        for message in messages:
            message.lease_ends = ends
        if self._timer is None:
            self._arm(ends)

    def _arm(self, when: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(when, self._end_leases, when)

    def _end_leases(self, now: float) -> None:
        self._timer = None
        ended = list(takewhile(lambda token: self._out[token].lease_ends <= now, self._out))
        reason = self._too_often(f"its lease of {self._lease} s ran out")
        self._server.give_back(self._queue, [self._out.pop(token) for token in ended], reason)
        if self._out:
            self._arm(next(iter(self._out.values())).lease_ends)
        self._queue.wake()

    def _too_often(self, last: str) -> str:
        return f"delivered {self._server.delivery_limit} times and never settled; the last time {last}"
