"""A queue that stays subscribed, whatever the broker does. Workers, their clients and bridges use it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from oraculo.pipeline.retry import RetryPolicy
from oraculo.ports.broker import Broker, Consumer, ConsumerDoubted, Delivery, NotMoved
from oraculo.ports.clock import Entropy

LONGEST_PAUSE = 5.0  # seconds; with jitter, a thousand workers make 400 attempts a second
LONGEST_HELD = 2.0  # seconds, while messages are held whose leases need renewal

# Gets the queue, a description and the exception of a trouble that is being handled. Must not raise.
Report = Callable[[str, str, Exception], None]


class Backoff:
    """Longer and longer pauses while something fails, and short ones again after a success."""

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
    """One life of a consumer, and the deliveries it holds.

    Once closed it is never used again. Its deliveries went back to the broker, so settling them does nothing.
    """

    def __init__(self, consumer: Consumer, queue: str, report: Report) -> None:
        self._consumer = consumer
        self._queue = queue
        self._report = report
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
        """Move the message to the dead letters. Returns True when it is there."""
        return not self.closed and await self._settle(self._consumer.dead_letter(delivery, reason), [delivery])

    async def give_back(self, delivery: Delivery, reason: str) -> None:
        if not self.closed:
            await self._settle(self._consumer.retry(delivery, 0.0, reason), [delivery])

    async def _settle(self, settling: Awaitable[None], deliveries: Sequence[Delivery]) -> bool:
        """Settle deliveries. When that fails, close the consumer, so that the prefetch does not fill with them.

        The intake then subscribes again. The fail-over broker has given back its own deliveries already.
        """
        try:
            await settling
        except NotMoved as error:
            self._report(self._queue, "a dead letter could not be put away; it comes again", error)
            self._let_go(deliveries)
            return False
        except Exception as error:  # noqa: BLE001 - whatever the adapter raises, the remedy is the same
            self._report(self._queue, "settling failed; the queue is subscribed again", error)
            await self.close()
            return False
        self._let_go(deliveries)
        return True

    def _let_go(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._held.pop(delivery.token, None)

    async def extend(self, deliveries: Sequence[Delivery] | None = None) -> bool:
        """Extend the leases of some deliveries, or of all. Returns False when others may have got them."""
        wanted = list(self._held.values()) if deliveries is None else deliveries
        if self.closed or not wanted:
            return not self.closed
        try:
            await self._consumer.extend(wanted)
        except Exception as error:  # noqa: BLE001 - a lost lease costs a repeat, which is recognised by its identity
            self._report(self._queue, "leases could not be renewed", error)
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
            self._report(self._queue, "a consumer did not close", error)


Receive = Callable[[Subscription, Sequence[Delivery]], Awaitable[None]]


class QueueIntake:
    """Passes on what arrives on one queue, and subscribes again after a pause whenever the consumer fails.

    `receive` settles what it gets, now or later. When it raises, all that is unsettled is given back.
    """

    def __init__(
        self, broker: Broker, queue: str, prefetch: int, receive: Receive, entropy: Entropy, report: Report
    ) -> None:
        self._broker = broker
        self._queue = queue
        self._prefetch = prefetch
        self._receive = receive
        self._backoff = Backoff(entropy)
        self._report = report
        self.subscription: Subscription | None = None

    async def run(self) -> None:
        """Run until cancelled. Then the subscription stays open, so that work in progress can be settled."""
        while True:
            try:
                await self.subscribe()
                await self._take_until_closed()
            except ConsumerDoubted:
                self._backoff.reset()  # no failure
            except Exception as error:  # noqa: BLE001 - whoever reads outlives whatever its broker does
                self._report(self._queue, "the queue cannot be read; trying again", error)
            await self.close()
            await self._backoff.pause()

    async def subscribe(self) -> None:
        if self.subscription is None:
            await self._broker.start()
            consumer = await self._broker.consume(self._queue, prefetch=self._prefetch)
            self.subscription = Subscription(consumer, self._queue, self._report)

    async def _take_until_closed(self) -> None:
        subscription = self.subscription
        assert subscription is not None
        made_at = _now()
        while deliveries := await subscription.take(self._prefetch):
            await self._receive(subscription, deliveries)
            # After a pause, because the same message may make it fail again and again.
            if _now() - made_at > LONGEST_PAUSE:
                self._backoff.reset()

    async def extend(self) -> None:
        if self.subscription is not None:
            await self.subscription.extend()

    async def close(self) -> None:
        """Close the subscription and give back what was not settled."""
        if self.subscription is not None:
            subscription, self.subscription = self.subscription, None
            await subscription.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
