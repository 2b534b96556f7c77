"""Publishing with confirms.

Queues that work share one channel. A queue that is new, or did not work lately, has a channel of its own: RabbitMQ may
say nothing at all about a queue without its majority, and everything behind it on its channel waits. So does what was
not confirmed on the shared channel. A queue that blocks or refuses delays others by one timeout at most.

RabbitMQ gives no reason when it refuses a message: the queue may be full, or without its majority.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from oraculo.brokers.rabbitmq.connection import (
    ACCESS_REFUSED,
    NOT_FOUND,
    PRECONDITION_FAILED,
    Channel,
    Connection,
    Refused,
    SharedAttempts,
    all_of,
    unused,
)
from oraculo.brokers.rabbitmq.frames import Confirms, Fit, Packer, Parcel
from oraculo.brokers.rabbitmq.queue_health import StuckQueues
from oraculo.brokers.rabbitmq.queues import Queues
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge, QueueDown, QueueFull
from oraculo.ports.broker import Receipt

MAX_CHANNELS = 100  # of queues that are new or do not work; a connection has 2,047 unless the server says otherwise
SILENT_FOR = 30.0  # seconds in which nothing more is sent to a queue that confirmed nothing: it would get every copy
LONGEST = 12  # times the timeout: so long a publish may take at most, though confirms drip in
_PING_PATIENCE = 1.0  # seconds before the end of the timeout, in which a server that does not confirm may answer
_TRIES = 3  # of one call for one queue: it may have vanished, or have been emptied meanwhile
# Seconds until a deleted queue is made again. If it comes back at once, RabbitMQ (seen on 3.10) forgets to cancel the
# consumers of the old one, and gives them messages of the new one, which are lost to everybody until their channel
# closes. The cancellation took 0.03 s.
VANISHED_PAUSE = 0.3
_SHARED = ""  # stands for all queues that work
_SIZES = re.compile(r"message size (\d+) .*max size (\d+)")


class _Batch:
    """Messages that were sent together, and what became of them so far."""

    __slots__ = ("_first_tag", "_returned", "_sent", "done", "is_silent", "missing", "parcels", "refused")

    def __init__(self, parcels: Sequence[Parcel], first_tag: int) -> None:
        self.parcels = parcels
        self.missing = len(parcels)  # confirms
        self.refused: list[int] = []  # places
        self.is_silent = False  # nothing was heard of the rest for too long
        self._first_tag = first_tag
        self._sent: Counter[tuple[str, bytes]] | None = None  # queues and bodies, counted when the first comes back
        self._returned = Counter[tuple[str, bytes]]()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def place(self, tag: int) -> int:
        return tag - self._first_tag

    def confirm(self, count: int) -> None:
        self.missing -= count
        if self.missing == 0 and not self.done.done():
            self.done.set_result(None)

    def give_up(self) -> None:
        self.is_silent = True
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: BrokerError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # its caller may have been cancelled; then asyncio would log it

    def claim(self, queue: str, body: bytes) -> bool:
        """Note that a message came back, if it is one of these. Of two equal ones it does not matter which."""
        if self.done.done():  # nobody waits for it: it would take the message of a batch that somebody waits for
            return False
        if self._sent is None:
            self._sent = Counter((parcel.queue, parcel.body) for parcel in self.parcels)
        is_ours = self._returned[queue, body] < self._sent[queue, body]
        self._returned[queue, body] += is_ours
        return is_ours

    def returned(self) -> list[int]:
        """Return the places of the messages that came back."""
        places = []
        for place, parcel in enumerate(self.parcels) if self._sent else ():
            if self._returned[parcel.queue, parcel.body] > 0:
                self._returned[parcel.queue, parcel.body] -= 1
                places.append(place)
        return places


class _Lane:
    """A channel that publishes, and the messages on it that are not confirmed yet."""

    def __init__(self, channel: Channel, fit: Fit) -> None:
        self.channel = channel
        self.heard_at = 0.0  # the loop's time of the last confirm
        self.silent_until = 0.0  # nothing is sent before, unless everything is confirmed
        self._packer = Packer(channel.raw.channel_number, channel.raw.connection.params.frame_max, fit)
        self._last_tag = 0
        self._unconfirmed: dict[int, _Batch] = {}  # by delivery tag, the oldest first
        self._batches: dict[_Batch, None] = {}  # those with unconfirmed messages, the oldest first
        self._is_retired = False
        self._now = asyncio.get_running_loop().time
        channel.listen(Confirms(self._on_confirm))
        channel.raw.add_on_return_callback(self._on_return)
        channel.on_close = self._on_close

    @property
    def is_open(self) -> bool:
        return self.channel.is_open

    @property
    def is_idle(self) -> bool:
        return not self._batches

    @property
    def is_silent(self) -> bool:
        return bool(self._batches) and self._now() < self.silent_until

    def send(self, parcels: Sequence[Parcel]) -> _Batch:
        packed = self._packer.pack(parcels)  # may raise: then nothing was sent, and nothing may be counted
        first = self._last_tag + 1
        batch = _Batch(parcels, first)
        self._last_tag += len(parcels)
        self._unconfirmed.update(dict.fromkeys(range(first, self._last_tag + 1), batch))
        self._batches[batch] = None
        self.channel.raw.connection.emit(packed)
        return batch

    def unconfirmed(self, batch: _Batch) -> list[int]:
        """Return the places of the messages whose fate is not known."""
        return [batch.place(tag) for tag, waiting in self._unconfirmed.items() if waiting is batch]

    def forget(self, batch: _Batch) -> None:
        self._unconfirmed = {tag: waiting for tag, waiting in self._unconfirmed.items() if waiting is not batch}
        self._batches.pop(batch, None)

    def fail(self, error: BrokerError) -> None:
        """Fail those who wait. What was sent may still be taken."""
        for batch in self._batches:
            batch.fail(error)

    def retire(self) -> None:
        """Close the channel once the rest is confirmed. Nothing more is sent on it."""
        self._is_retired = True
        if not self._batches:
            self.channel.abandon()

    def _on_confirm(self, tag: int, is_multiple: bool, is_taken: bool) -> None:
        waiting = self._unconfirmed
        self.heard_at = self.channel.raw.connection.confirmed_at = self._now()
        counts: dict[_Batch, int] = {}
        for each in list(takewhile(tag.__ge__, waiting)) if is_multiple else (tag,):
            if (batch := waiting.pop(each, None)) is not None:
                counts[batch] = counts.get(batch, 0) + 1
                if not is_taken:
                    batch.refused.append(batch.place(each))
        for batch, count in counts.items():
            batch.confirm(count)
            if batch.missing == 0:
                self._batches.pop(batch, None)
        if self._is_retired and not self._batches:
            self.channel.abandon()

    def _on_return(self, _: object, method: Any, __: object, body: bytes) -> None:
        any(batch.claim(method.routing_key, body) for batch in self._batches)

    def _on_close(self, fault: BrokerError) -> None:
        batches, self._batches, self._unconfirmed = list(self._batches), {}, {}
        if isinstance(fault, Refused) and fault.code == PRECONDITION_FAILED and (sizes := _SIZES.search(str(fault))):
            limit = self.channel.raw.connection.largest_message = int(sizes[2])
            fault = MessageTooLarge(str(fault), int(sizes[1]), limit)
        for batch in batches:
            batch.fail(fault)


class Publisher:
    """Publishes messages, and makes missing queues."""

    def __init__(
        self,
        connection: Connection,
        queues: Queues,
        stuck: StuckQueues,
        fit: Fit,
        *,
        taken: Receipt,
        timeout: float,
    ) -> None:
        self._connection = connection
        self._connection.on_blocked = self._on_blocked
        self._queues = queues
        self._stuck = stuck
        self._fit = fit
        self._taken = taken
        self._timeout = timeout
        self._grace = min(_PING_PATIENCE, timeout / 2)
        self._lanes: dict[str, _Lane] = {}  # by queue, the one used last at the end, and the shared one
        self._opening = SharedAttempts[None]()
        self._slots = asyncio.Semaphore(MAX_CHANNELS)
        self.forbidden: str | None = None  # why our user may not publish

    async def publish(self, parcels: Sequence[Parcel]) -> Sequence[Receipt]:
        """Return one receipt for each message.

        Raises BrokerUnavailable when the server cannot be reached, or takes nothing. Some may have been taken then.
        """
        receipts = [self._taken] * len(parcels)
        well = {queue: self._is_well(queue) for queue in {parcel.queue for parcel in parcels}}
        if all(well.values()):
            await self._publish_together(parcels, range(len(parcels)), receipts)
            return receipts
        together = [place for place, parcel in enumerate(parcels) if well[parcel.queue]]
        apart = [place for place, parcel in enumerate(parcels) if not well[parcel.queue]]
        await all_of(self._publish_together(parcels, together, receipts), self._publish_apart(parcels, apart, receipts))
        return receipts

    def _is_well(self, queue: str) -> bool:
        return self._queues.is_made(queue) and not self._stuck.has(queue)

    async def ping(self) -> None:
        if self._connection.blocked:
            raise BrokerUnavailable(self._connection.blocked)
        await self._connection.ping()

    # -- on the shared channel ------------------------------------------------------------------------------------

    async def _publish_together(
        self, parcels: Sequence[Parcel], places: Sequence[int], receipts: list[Receipt]
    ) -> None:
        places = self._small_enough(places, parcels, receipts)
        if not places:
            return
        sent = parcels if len(places) == len(parcels) else [parcels[place] for place in places]
        lane = await self._lane(_SHARED)
        batch = lane.send(sent)
        try:
            await self._answered(lane, batch)
        except MessageTooLarge:
            left: Sequence[int] = range(len(sent))  # the server does not say which others it took
        else:
            left = [*batch.refused, *batch.returned(), *(lane.unconfirmed(batch) if batch.is_silent else ())]
            if batch.refused or batch.is_silent:
                lane.forget(batch)
                self._retire(_SHARED, lane)
        untaken = {sent[place].queue for place in left}
        self._stuck.works({parcel.queue for parcel in sent} - untaken)
        if left:
            await self._publish_apart(parcels, [places[place] for place in sorted(set(left))], receipts)

    async def _publish_apart(self, parcels: Sequence[Parcel], places: Sequence[int], receipts: list[Receipt]) -> None:
        by_queue: dict[str, list[int]] = {}
        for place in places:
            by_queue.setdefault(parcels[place].queue, []).append(place)
        await all_of(*(self._publish_to(queue, parcels, mine, receipts) for queue, mine in by_queue.items()))

    # -- on the channel of one queue ------------------------------------------------------------------------------

    async def _publish_to(
        self, queue: str, parcels: Sequence[Parcel], places: Sequence[int], receipts: list[Receipt]
    ) -> None:
        count, error = len(places), None
        async with self._slots:
            try:
                for _ in range(_TRIES):
                    places = self._small_enough(places, parcels, receipts)
                    if not places:
                        break
                    left, error, may_go_again = await self._try(queue, [parcels[place] for place in places])
                    places = [places[each] for each in left]
                    if not may_go_again:
                        break
            except BrokerError as refusal:
                if isinstance(refusal, BrokerUnavailable) and not isinstance(refusal, QueueDown):
                    raise
                error = refusal
        if error is None or len(places) < count:
            self._stuck.works([queue])
        if places and error is not None:
            if not isinstance(error, QueueFull):
                self._stuck.note(queue, str(error))
            for place in places:
                receipts[place] = Receipt(error=error)

    def _small_enough(self, places: Sequence[int], parcels: Sequence[Parcel], receipts: list[Receipt]) -> Sequence[int]:
        """Return the places of the messages within the server's limit, as far as it is known."""
        limit = None if self._connection.raw is None else self._connection.raw.largest_message
        if limit is None:
            return places
        for place in places:
            if (size := len(parcels[place].body)) > limit:
                why = f"RabbitMQ refused: message size {size} is larger than configured max size {limit}"
                receipts[place] = Receipt(error=MessageTooLarge(why, size, limit))
        return [place for place in places if receipts[place] is self._taken]

    async def _try(self, queue: str, parcels: Sequence[Parcel]) -> tuple[Sequence[int], BrokerError | None, bool]:
        """Return the places of the messages that were not taken, why, and whether to try them again."""
        if not self._queues.is_made(queue):
            await self._make(queue)
        lane = await self._lane(queue)
        if lane.is_silent:
            raise _silent(queue)
        batch = lane.send(parcels)
        try:
            await self._answered(lane, batch)
        except MessageTooLarge as error:
            return range(len(parcels)), error, True  # the server does not say which others it took
        if batch.is_silent:
            lane.silent_until = asyncio.get_running_loop().time() + SILENT_FOR
            return [*batch.refused, *batch.returned(), *lane.unconfirmed(batch)], _silent(queue), False
        if returned := batch.returned():
            # A node may also hear of a queue a moment after it was made.
            await asyncio.sleep(VANISHED_PAUSE)
            self._queues.forget_made(queue)
            why = Refused(NOT_FOUND, f"RabbitMQ has no queue {queue}: what is published to it comes back")
            return [*batch.refused, *returned], why, True
        self._retire(queue, lane)  # it works, or refuses on this channel alone
        if not batch.refused:
            return (), None, False
        count = f"{len(batch.refused)} of {len(parcels)} messages for {queue}"
        if len(batch.refused) < len(parcels) or not await self._queues.looks_empty(queue):
            return batch.refused, QueueFull(f"RabbitMQ did not take {count}: it is full"), False
        down = QueueDown(f"RabbitMQ did not take {count}, which is empty: is it without its majority?")
        return batch.refused, down, True

    # -- confirms -------------------------------------------------------------------------------------------------

    async def _answered(self, lane: _Lane, batch: _Batch) -> None:
        """Wait until the server has confirmed or refused all, or said nothing for too long."""
        loop = asyncio.get_running_loop()
        watching: list[asyncio.Task[None]] = []
        patience = self._timeout - self._grace
        timer = loop.call_later(patience, lambda: watching.append(loop.create_task(self._watch(lane, batch))))
        try:
            await batch.done
            self.forbidden = None
        except Refused as refusal:
            if refusal.code != ACCESS_REFUSED:
                raise
            self.forbidden = str(refusal)
            raise BrokerUnavailable(str(refusal)) from refusal
        finally:
            timer.cancel()
            for task in watching:
                task.cancel()

    async def _watch(self, lane: _Lane, batch: _Batch) -> None:
        """Give a batch up at the end of its time, and the connection, too, when the server answers nothing else.

        The time begins anew with each confirm: over a slow line a batch takes as long as it takes. Confirms on other
        channels count while a ping gets no answer, because the ping waits behind all that was sent before it.
        """
        now = asyncio.get_running_loop().time
        until = now() + self._grace
        last = until + (LONGEST - 1) * self._timeout
        while not batch.done.done():
            pinging = asyncio.create_task(self._answers())
            await asyncio.wait((batch.done,), timeout=until - now())
            answers = pinging.done() and pinging.result()
            pinging.cancel()
            heard_at = lane.heard_at if answers else lane.channel.raw.connection.confirmed_at
            if until >= last or heard_at + self._timeout <= until:
                if answers:
                    batch.give_up()
                else:
                    self._give_up()
                    count = len(batch.parcels)
                    batch.fail(BrokerUnavailable(f"RabbitMQ did not confirm {count} messages in {self._timeout} s"))
                return
            until = min(heard_at + self._timeout, last)
            await asyncio.wait((batch.done,), timeout=until - self._grace - now())

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(_PING_PATIENCE):
                await self._connection.ping()
        except (BrokerError, TimeoutError):
            return False
        return True

    def _give_up(self) -> None:
        """Close the connection, so that nothing piles up for a server that does not answer."""
        if not self._connection.blocked:  # a server that blocks publishers confirms later what it has
            self._connection.abort("it did not confirm in time")

    # -- channels -------------------------------------------------------------------------------------------------

    async def _lane(self, queue: str) -> _Lane:
        """Return a channel that is ready to be sent on before anything else happens."""
        while True:
            if self._connection.blocked:
                await asyncio.sleep(0)  # who tries again at once must let the loop hear that it is over
                raise BrokerUnavailable(self._connection.blocked)
            lane = self._lanes.pop(queue, None)
            if lane is not None and lane.is_open:
                self._lanes[queue] = lane
                if lane.is_idle or lane.is_silent or not lane.silent_until:
                    return lane
                del self._lanes[queue]  # it was silent for long: it has another try on a new channel
                lane.channel.abandon()
            await self._opening.result(queue, lambda: self._open(queue))

    async def _make(self, queue: str) -> None:
        before = self._queues.connection.raw
        try:
            await self._queues.ensure(queue)
        except BrokerUnavailable as error:
            was_lost = before is None or self._queues.connection.raw is not before  # which is no fault of the queue
            if was_lost or not await self._answers():
                raise
            raise QueueDown(f"RabbitMQ did not make {queue}: {error}") from error

    async def _open(self, queue: str) -> None:
        if len(self._lanes) >= MAX_CHANNELS:
            oldest = next((name for name, lane in self._lanes.items() if lane.is_idle or lane.is_silent), None)
            if oldest is not None:
                self._lanes.pop(oldest).channel.abandon()
        channel = await self._connection.channel()
        try:
            await channel.call("confirm_delivery", ack_nack_callback=unused)
        except BaseException:
            channel.abandon()  # nobody else knows of it
            raise
        self._lanes[queue] = _Lane(channel, self._fit)

    def _retire(self, queue: str, lane: _Lane) -> None:
        """Publish on a new channel from now on.

        RabbitMQ 3.10 goes on refusing on a channel that first published while the queue's leader was lost, though the
        queue has a new leader.
        """
        if self._lanes.get(queue) is lane:
            del self._lanes[queue]
        lane.retire()

    def _on_blocked(self, reason: str) -> None:
        """Fail those who wait: it may take hours until the server goes on."""
        for lane in self._lanes.values():
            lane.fail(BrokerUnavailable(reason))


def _silent(queue: str) -> QueueDown:
    return QueueDown(f"RabbitMQ did not confirm what was sent to {queue}: is it without its majority?")
