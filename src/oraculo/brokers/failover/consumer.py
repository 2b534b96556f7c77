"""The consumer of several brokers as one."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from oraculo.brokers.failover.member import WORKS_AGAIN, Member
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Consumer, Delivery, NotMoved

FAILED_PAUSE = 0.5  # seconds until a broker is asked again after a consumer was refused or lost


class FailoverConsumer:
    """One subscription to a queue on every broker.

    When a broker is lost, it keeps what was not settled there, and settling that does nothing.
    """

    def __init__(self, members: Sequence[Member], queue: str, prefetch: int) -> None:
        self._members = members
        self.queue = queue
        self._prefetch = prefetch
        self._feeds: list[asyncio.Task[None]] = []
        self._inner: dict[Member, Consumer] = {}
        self._waiting: list[Delivery] = []  # received from a broker and not yet taken
        self._out: dict[int | str, tuple[Consumer, Delivery]] = {}  # by our token
        self._tokens = 0
        self._changed = asyncio.Condition()
        self.is_closed = False

    async def open(self) -> None:
        """Subscribe where it works at once, so that the caller knows it is heard. The others follow."""
        try:
            subscribed = [await self._subscribe(member) for member in self._members if member.is_up]
        except BaseException:  # the caller gave up, and nobody else would close these
            await self.close()
            raise
        if not any(subscribed):
            raise self._unread()  # nothing was opened
        self._feeds = [asyncio.create_task(self._feed(member)) for member in self._members]

    def _unread(self) -> BrokerError:
        """Return the error for a queue that no broker lets us read. It is BrokerError only when all of them refuse."""
        refusals = {member.name: member.why_unread(self.queue) for member in self._members}
        whys = {member.name: member.trouble or refusals[member.name] or WORKS_AGAIN for member in self._members}
        reasons = "; ".join(f"{name}: {why}" for name, why in whys.items())
        kind = BrokerError if all(refusals.values()) else BrokerUnavailable
        return kind(f"no broker lets us read {self.queue}: {reasons}")

    async def _subscribe(self, member: Member) -> bool:
        """Subscribe on one broker. A broker that refuses counts as deaf on this queue, and is asked again."""
        try:
            consuming = member.broker.consume(self.queue, prefetch=self._prefetch)
            self._inner[member] = await member.attempt(consuming)
        except Exception as error:  # noqa: BLE001 - an adapter's fault must not end the feed
            member.note_unread(self.queue, error, was_read=False)
            return False
        return True

    async def _feed(self, member: Member) -> None:
        """Bring what arrives on one broker, and subscribe again whenever the subscription is lost."""
        while not self.is_closed:
            consumer = self._inner.get(member)
            if consumer is None:
                await member.usable.wait()
                if not await self._subscribe(member):
                    await asyncio.sleep(FAILED_PAUSE)
                continue
            try:
                await self._bring(member, consumer)
            except Exception as error:  # noqa: BLE001 - an adapter's fault must not end the feed
                member.note_unread(self.queue, error, was_read=True)
            # The broker stays in use, because this consumer alone may have failed; probes find out. The pause also
            # slows down a message that cannot be settled, which would otherwise come again at once, forever.
            await self._drop(member, consumer)
            await asyncio.sleep(FAILED_PAUSE)

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
        """Give the delivery a token of ours, because two consumers may give the same one."""
        self._tokens += 1
        self._out[self._tokens] = (consumer, delivery)
        return Delivery(delivery.queue, delivery.body, self._tokens, delivery.redeliveries, via)

    async def _drop(self, member: Member, consumer: Consumer) -> None:
        """Forget what a lost consumer had not settled: its broker delivers it again."""
        self._inner.pop(member, None)
        with suppress(Exception):  # the consumer is lost either way, and the feed must go on
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
            [self._settle(delivery)], lambda consumer, own: consumer.dead_letter(own[0], reason), must_settle=True
        )

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        owned = [(self._settle(delivery), reason) for delivery, reason in letters]
        reasons = {id(one[1]): reason for one, reason in owned if one is not None}
        await self._settle_all(
            [one for one, _ in owned],
            lambda consumer, own: consumer.dead_letter_all([(each, reasons[id(each)]) for each in own]),
            must_settle=True,
        )

    async def _settle_all(
        self,
        owned: Iterable[tuple[Consumer, Delivery] | None],
        settle: Callable[[Consumer, list[Delivery]], Awaitable[None]],
        *,
        must_settle: bool = False,
    ) -> None:
        """Settle each message with the broker that delivered it. A refusal by one does not stop the others.

        The messages are no longer held here either way. With `must_settle`, NotMoved is raised for those that could not
        be settled now.
        """
        refusal: BrokerError | None = None
        try:
            for consumer, own in _by_owner(owned):
                try:
                    await self._settle_with(consumer, settle(consumer, own), must_settle=must_settle)
                except BrokerError as error:
                    refusal = refusal or error
        finally:
            await self._made_room()
        if refusal is not None:
            raise refusal

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """Extend the given messages and those that wait here.

        Raises BrokerUnavailable when one of the given ones failed.
        """
        asked = [owned[0] for each in deliveries if (owned := self._out.get(each.token)) is not None]
        held = dict.fromkeys(delivery.token for delivery in (*deliveries, *self._waiting))
        failure: BrokerUnavailable | None = None
        for consumer, own in _by_owner(self._out.get(token) for token in held):
            try:
                await consumer.extend(own)
            except BrokerUnavailable as error:
                if consumer in asked:
                    failure = failure or error
        if failure is not None:
            raise failure

    async def _settle_with(self, consumer: Consumer, settling: Awaitable[None], *, must_settle: bool) -> None:
        """Settle with one broker. If it cannot be reached, close the consumer, so that its prefetch is free again.

        The broker delivers the messages again, and the feed subscribes again.
        """
        try:
            await settling
        except BrokerUnavailable as error:
            with suppress(BrokerError):
                await consumer.close()
            if must_settle:
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
            member.note_read(self.queue)


def _by_owner(
    owned: Iterable[tuple[Consumer, Delivery] | None],
) -> Iterable[tuple[Consumer, list[Delivery]]]:
    groups: dict[int, tuple[Consumer, list[Delivery]]] = {}
    for one in owned:
        if one is not None:
            groups.setdefault(id(one[0]), (one[0], []))[1].append(one[1])
    return groups.values()
