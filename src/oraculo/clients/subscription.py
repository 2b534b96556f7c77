"""Keeping a queue subscribed, whatever the broker does: for workers, their clients and bridges."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from oraculo.pipeline.retry import RetryPolicy
from oraculo.ports.broker import Broker, Consumer, ConsumerDoubted, Delivery, NotMoved
from oraculo.ports.clock import Entropy

LONGEST_PAUSE = 5.0  # seconds; with its jitter a thousand workers ask 400 times a second for a broker that is away
LONGEST_HELD = 2.0  # while messages are held whose leases are renewed between two attempts

# Hears of a trouble that is seen to: on which queue, what it is, and what raised it. Must not raise.
Tell = Callable[[str, str, Exception], None]


class Backoff:
    """Longer and longer pauses while something fails; short ones again once it works."""

    _policy = RetryPolicy(backoff=0.1, max_backoff=LONGEST_PAUSE)

    def __init__(self, entropy: Entropy, longest: float | None = None) -> None:
        if longest is not None:
            self._policy = RetryPolicy(backoff=0.1, max_backoff=longest)
        self._entropy = entropy
        self._failures = 0

    @property
    def is_failing(self) -> bool:
        return self._failures > 0

    def reset(self) -> None:
        self._failures = 0

    async def pause(self) -> None:
        self._failures += 1
        await asyncio.sleep(self._policy.delay(self._failures, self._entropy.jitter()))


class Subscription:
    """One life of a consumer, and the deliveries it still holds. Once closed it is never used again: what it held
    was given back to the broker, so settling any of it does nothing."""

    def __init__(self, consumer: Consumer, queue: str, tell: Tell) -> None:
        self._consumer = consumer
        self._queue = queue
        self._tell = tell
        self._held: dict[int | str, Delivery] = {}
        self.closed = False

    async def take(self, limit: int) -> Sequence[Delivery]:
        deliveries = await self._consumer.take(limit)
        self._held.update((each.token, each) for each in deliveries)
        return deliveries

    def holds(self, delivery: Delivery) -> bool:
        return delivery.token in self._held

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries and not self.closed:
            await self._settle(self._consumer.ack(deliveries), deliveries)

    async def dead_letter(self, delivery: Delivery, reason: str) -> bool:
        """Whether it is there now."""
        return not self.closed and await self._settle(self._consumer.dead_letter(delivery, reason), [delivery])

    async def give_back(self, delivery: Delivery, reason: str) -> None:
        if not self.closed:
            await self._settle(self._consumer.retry(delivery, 0.0, reason), [delivery])

    async def _settle(self, settling: Awaitable[None], deliveries: Sequence[Delivery]) -> bool:
        """What cannot be settled would fill the prefetch for ever: then everything is given back, and the intake
        subscribes anew. One of several brokers has given back its own already."""
        try:
            await settling
        except NotMoved as error:
            self._tell(self._queue, "a dead letter could not be put away; it comes again", error)
            self._let_go(deliveries)
            return False
        except Exception as error:  # noqa: BLE001 - whatever the adapter raises, the remedy is the same
            self._tell(self._queue, "settling failed; the queue is subscribed again", error)
            await self.close()
            return False
        self._let_go(deliveries)
        return True

    def _let_go(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._held.pop(delivery.token, None)

    async def extend(self, deliveries: Sequence[Delivery] | None = None) -> bool:
        """Renews the lease of some deliveries, or of all that are held. False: they may be another's by now."""
        wanted = list(self._held.values()) if deliveries is None else deliveries
        if self.closed or not wanted:
            return not self.closed
        try:
            await self._consumer.extend(wanted)
        except Exception as error:  # noqa: BLE001 - a lease that runs out costs a repeat, which is told from its identity
            self._tell(self._queue, "leases could not be renewed", error)
            return False
        return True

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._held.clear()
        try:
            await self._consumer.close()
        except Exception as error:  # noqa: BLE001 - it was given up already
            self._tell(self._queue, "a consumer did not close", error)


Receive = Callable[[Subscription, Sequence[Delivery]], Awaitable[None]]


class QueueIntake:
    """Takes what arrives on one queue and hands it on; makes the consumer again, after a pause, whenever it fails.

    `receive` settles what it is given, then or later. When it raises, all that is unsettled is given back."""

    def __init__(
        self, broker: Broker, queue: str, prefetch: int, receive: Receive, entropy: Entropy, tell: Tell
    ) -> None:
        self._broker = broker
        self._queue = queue
        self._prefetch = prefetch
        self._receive = receive
        self._backoff = Backoff(entropy)
        self._tell = tell
        self.subscription: Subscription | None = None

    async def run(self) -> None:
        """For ever. When cancelled it leaves the subscription open, for what is in work to be settled on."""
        while True:
            try:
                await self.subscribe()
                await self._take_until_closed()
            except ConsumerDoubted:
                self._backoff.reset()  # nothing failed
            except Exception as error:  # noqa: BLE001 - whoever reads outlives whatever its broker does
                self._tell(self._queue, "the queue cannot be read; trying again", error)
            await self.close()
            await self._backoff.pause()

    async def subscribe(self) -> None:
        if self.subscription is None:
            await self._broker.start()
            consumer = await self._broker.consume(self._queue, prefetch=self._prefetch)
            self.subscription = Subscription(consumer, self._queue, self._tell)

    async def _take_until_closed(self) -> None:
        subscription = self.subscription
        assert subscription is not None
        made_at = _now()
        while deliveries := await subscription.take(self._prefetch):
            await self._receive(subscription, deliveries)
            # Not at once: what it takes may end it again and again, a command say that can be put nowhere.
            if _now() - made_at > LONGEST_PAUSE:
                self._backoff.reset()

    async def extend(self) -> None:
        if self.subscription is not None:
            await self.subscription.extend()

    async def close(self) -> None:
        """Gives back what was not settled."""
        if self.subscription is not None:
            subscription, self.subscription = self.subscription, None
            await subscription.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
