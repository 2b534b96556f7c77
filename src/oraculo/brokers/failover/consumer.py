"""One consumer over several brokers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from oraculo.brokers.failover.member import WORKS_AGAIN, Member
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Consumer, Delivery, NotMoved

FAILED_PAUSE = 1.0  # seconds until a broker is asked again that did not let us subscribe, or read
RESUBSCRIBE_PAUSE = 0.2  # after a consumer was lost; doubled, up to FAILED_PAUSE, for one that was lost soon again
STEADY = 5.0  # seconds after which a consumer is not lost for the reason that ended the one before it


class FailoverConsumer:
    """One subscription to a queue on every broker; what one of them had not settled when it was lost is that broker's,
    and settling it does nothing."""

    def __init__(self, members: Sequence[Member], queue: str, prefetch: int) -> None:
        self._members = members
        self.queue = queue
        self._prefetch = prefetch
        self._feeds: list[asyncio.Task[None]] = []
        self._inner: dict[Member, Consumer] = {}
        self._waiting: list[Delivery] = []  # taken from a broker and not yet asked for
        self._out: dict[int | str, tuple[Consumer, Delivery]] = {}  # by our token: whose it is
        self._tokens = 0
        self._changed = asyncio.Condition()
        self.is_closed = False

    async def open(self) -> None:
        """Subscribes where it can at once, so that a caller knows it is heard; the rest follows."""
        try:
            subscribed = [await self._subscribe(member) for member in self._members if member.is_up]
        except BaseException:  # whoever waits gave up: nobody else would close what is open by now
            await self.close()
            raise
        if not any(subscribed):
            raise self._unread()  # nothing was opened
        self._feeds = [asyncio.create_task(self._feed(member)) for member in self._members]

    def _unread(self) -> BrokerError:
        """Refused only if each of them says no: one that is away may not."""
        refusals = {member.name: member.why_unread(self.queue) for member in self._members}
        whys = {member.name: member.trouble or refusals[member.name] or WORKS_AGAIN for member in self._members}
        reasons = "; ".join(f"{name}: {why}" for name, why in whys.items())
        kind = BrokerError if all(refusals.values()) else BrokerUnavailable
        return kind(f"no broker lets us read {self.queue}: {reasons}")

    async def _subscribe(self, member: Member) -> bool:
        """One that says no is told as deaf on this queue, and asked again and again."""
        try:
            consuming = member.broker.consume(self.queue, prefetch=self._prefetch)
            self._inner[member] = await member.attempt(consuming)
        except Exception as error:  # noqa: BLE001 - as with what it brings: a fault of the adapter must not end the feed
            member.note_unread(self.queue, error)
            return False
        member.note_consumer(self.queue)
        return True

    async def _feed(self, member: Member) -> None:
        """Brings what arrives on one broker, and subscribes again whenever it was lost and is back."""
        pause = RESUBSCRIBE_PAUSE
        while not self.is_closed:
            consumer = self._inner.get(member)
            if consumer is None:
                await member.usable.wait()
                if not await self._subscribe(member):
                    await asyncio.sleep(FAILED_PAUSE)
                continue
            began = _now()
            try:
                await self._bring(member, consumer)
            except Exception as error:  # noqa: BLE001 - whatever an adapter raises, a feed that ends would end in silence
                member.note_unread(self.queue, error)
            # No reason to give up the whole broker: it may be this consumer alone. A publish or a probe will tell. The
            # pause is also for what could not be settled, so that it was closed here: that comes again at once, a dead
            # letter that can be put nowhere for ever.
            await self._drop(member, consumer)
            pause = RESUBSCRIBE_PAUSE if _now() - began > STEADY else pause
            await asyncio.sleep(FAILED_PAUSE if member.why_unread(self.queue) else pause)
            pause = min(2 * pause, FAILED_PAUSE)

    async def _bring(self, member: Member, consumer: Consumer) -> None:
        while not self.is_closed:
            async with self._changed:
                await self._changed.wait_for(lambda: self.is_closed or self._room > 0)
            if self.is_closed or not (deliveries := await consumer.take(max(1, self._room))):
                return
            member.note_read(self.queue)
            async with self._changed:
                self._waiting += [self._adopt(member.name, consumer, delivery) for delivery in deliveries]
                self._changed.notify_all()

    @property
    def _room(self) -> int:
        return self._prefetch - len(self._out)

    def _adopt(self, via: str, consumer: Consumer, delivery: Delivery) -> Delivery:
        """Under a token of ours: two brokers, or two lives of one consumer, may give the same."""
        self._tokens += 1
        self._out[self._tokens] = (consumer, delivery)
        return Delivery(delivery.queue, delivery.body, self._tokens, delivery.redeliveries, via)

    async def _drop(self, member: Member, consumer: Consumer) -> None:
        """A consumer that is lost takes with it what was not settled: the broker will deliver it again."""
        self._inner.pop(member, None)
        with suppress(Exception):  # it is lost either way, and its feed must go on
            await consumer.close()
        async with self._changed:
            lost = {token for token, (owner, _) in self._out.items() if owner is consumer}
            for token in lost:
                del self._out[token]
            self._waiting = [delivery for delivery in self._waiting if delivery.token not in lost]
            self._changed.notify_all()

    async def take(self, limit: int) -> Sequence[Delivery]:
        if limit < 1:
            raise BrokerError(f"limit: must be at least 1, got {limit}")
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_closed or (self._waiting and self._handed < self._prefetch))
            if self.is_closed:
                return []
            count = min(limit, self._prefetch - self._handed)
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
            return taken

    @property
    def _handed(self) -> int:
        return len(self._out) - len(self._waiting)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        owned = [self._settle(delivery) for delivery in deliveries]
        await self._settle_all(owned, lambda consumer, own: consumer.ack(own))

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        await self._settle_all([self._settle(delivery)], lambda consumer, own: consumer.retry(own[0], delay, reason))

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        await self._settle_all(
            [self._settle(delivery)], lambda consumer, own: consumer.dead_letter(own[0], reason), must_tell=True
        )

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        owned = [(self._settle(delivery), reason) for delivery, reason in letters]
        reasons = {id(one[1]): reason for one, reason in owned if one is not None}
        await self._settle_all(
            [one for one, _ in owned],
            lambda consumer, own: consumer.dead_letter_all([(each, reasons[id(each)]) for each in own]),
            must_tell=True,
        )

    async def _settle_all(
        self,
        owned: Iterable[tuple[Consumer, Delivery] | None],
        settle: Callable[[Consumer, list[Delivery]], Awaitable[None]],
        *,
        must_tell: bool = False,
    ) -> None:
        """What one broker refuses holds up no other's, and is no longer ours either: there is room for the next.
        `must_tell`: also what cannot be settled now, with NotMoved."""
        refusal: BrokerError | None = None
        try:
            for consumer, own in _by_owner(owned):
                try:
                    await self._settle_with(consumer, settle(consumer, own), must_tell=must_tell)
                except BrokerError as error:
                    refusal = refusal or error
        finally:
            await self._made_room()
        if refusal is not None:
            raise refusal

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """And what waits here, which nobody else knows of. Raises BrokerUnavailable when the broker of one of
        `deliveries` could not be told, once all were."""
        asked = [owned[0] for each in deliveries if (owned := self._out.get(each.token)) is not None]
        held = dict.fromkeys(delivery.token for delivery in (*deliveries, *self._waiting))
        untold: BrokerUnavailable | None = None
        for consumer, own in _by_owner(self._out.get(token) for token in held):
            try:
                await consumer.extend(own)
            except BrokerUnavailable as error:
                if consumer in asked:
                    untold = untold or error
        if untold is not None:
            raise untold

    async def _settle_with(self, consumer: Consumer, settling: Awaitable[None], *, must_tell: bool) -> None:
        """A broker that cannot be told will deliver it again. Its consumer is closed, and made again by its feed, so
        that what could not be settled does not fill its prefetch."""
        try:
            await settling
        except BrokerUnavailable as error:
            with suppress(BrokerError):
                await consumer.close()
            if must_tell:
                raise NotMoved(str(error)) from error

    def _settle(self, delivery: Delivery) -> tuple[Consumer, Delivery] | None:
        return self._out.pop(delivery.token, None)

    async def _made_room(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def close(self) -> None:
        if self.is_closed:
            return
        async with self._changed:
            self.is_closed = True
            self._changed.notify_all()
        for feed in self._feeds:
            feed.cancel()
        await asyncio.gather(*self._feeds, return_exceptions=True)
        consumers = list(self._inner.values())
        await asyncio.gather(*(consumer.close() for consumer in consumers), return_exceptions=True)
        self._inner.clear()
        self._out.clear()
        self._waiting.clear()
        for member in self._members:
            member.note_closed(self.queue)


def _by_owner(
    owned: Iterable[tuple[Consumer, Delivery] | None],
) -> Iterable[tuple[Consumer, list[Delivery]]]:
    groups: dict[int, tuple[Consumer, list[Delivery]]] = {}
    for one in owned:
        if one is not None:
            groups.setdefault(id(one[0]), (one[0], []))[1].append(one[1])
    return groups.values()


def _now() -> float:
    return asyncio.get_running_loop().time()
