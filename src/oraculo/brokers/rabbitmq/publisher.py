"""Publishing with confirms, pipelined: a batch is written at once, and done when the server has confirmed all of it."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any
from weakref import WeakSet

from oraculo.brokers.rabbitmq.connection import Channel, Connection, Refused
from oraculo.brokers.rabbitmq.wire import Confirms, Packer, Parcel
from oraculo.errors import BrokerError, BrokerUnavailable

_MOST_QUEUES = 10_000  # of which it is remembered that they were there
_PRECONDITION_FAILED = 406  # on a channel that only publishes: a message is too large

# A queue that was deleted is not made again at once, but after so many seconds: RabbitMQ (seen on 3.10) would forget to
# cancel those who consumed the old one, and give the messages of the new one to them, where they are lost to everybody
# until that channel closes. The cancellation took 0.03 s.
VANISHED_PAUSE = 0.3
PING_PATIENCE = 1.0  # seconds, before its time is over, in which a server that does not confirm may answer otherwise


class NotConfirmed(BrokerUnavailable):
    """The server said no to some; all others are confirmed. `down`: of their queues, those that do not work."""

    silent: Collection[str] = ()

    def __init__(self, parcels: Sequence[Parcel], of: int, down: Collection[str] = ()) -> None:
        queues = ", ".join(sorted({parcel.queue for parcel in parcels})[:5])
        super().__init__(
            f"RabbitMQ did not take {len(parcels)} of {of} messages, for {queues}: is it full, or without its majority?"
        )
        self.parcels = parcels
        self.down = down


class Overdue(NotConfirmed):
    """Of those for the queues in `silent` it said nothing; it may have taken them. `is_blocked`: nor did it say
    anything else on their channel, so that only one of these queues may be the cause. `is_gone`: nor on another."""

    def __init__(
        self, parcels: Sequence[Parcel], of: int, silent: Collection[str], *, is_blocked: bool, is_gone: bool
    ) -> None:
        super().__init__(parcels, of)
        self.silent = silent
        self.is_blocked = is_blocked
        self.is_gone = is_gone


class _TooLate(Exception):
    pass


class _Batch:
    """What one call published: how many confirms are missing, and what the server could not route or did not take."""

    __slots__ = ("_first", "_unreturned", "done", "missing", "parcels", "refused", "returned")

    def __init__(self, parcels: Sequence[Parcel], first: int) -> None:
        self.parcels = parcels
        self.missing = len(parcels)
        self.refused: list[Parcel] = []
        self._first = first  # its delivery tag
        self.returned: list[Parcel] = []
        self._unreturned: dict[tuple[str, bytes], list[Parcel]] | None = None  # made when the first is returned
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def refuse(self, tag: int) -> None:
        self.refused.append(self.parcel(tag))

    def confirm(self, count: int) -> None:
        """Or were refused: it is known what became of them."""
        self.missing -= count
        if self.missing == 0 and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: BrokerError | _TooLate) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def parcel(self, tag: int) -> Parcel:
        return self.parcels[tag - self._first]

    def claims(self, queue: str, body: bytes) -> bool:
        """Whether a returned message is one of these; of two that are equal it does not matter which it is. A batch
        that nobody waits for claims nothing: it would take the message of one that is still waited for."""
        if self.done.done():
            return False
        if self._unreturned is None:
            self._unreturned = {}
            for parcel in reversed(self.parcels):
                self._unreturned.setdefault((parcel.queue, parcel.body), []).append(parcel)
        equal = self._unreturned.get((queue, body))
        if not equal:
            return False
        self.returned.append(equal.pop())
        return True

    @property
    def largest(self) -> int:
        return max(len(parcel.body) for parcel in self.parcels)


class _Session:
    """A channel that publishes, and what was published on it and is not confirmed yet."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._packer = Packer(channel.raw.channel_number, channel.raw.connection.params.frame_max)
        self._last_tag = 0
        self._unconfirmed: dict[int, _Batch] = {}  # by delivery tag, the oldest first
        self._batches: dict[_Batch, None] = {}  # those of which a confirm is missing, the oldest first
        self._is_retired = False
        channel.listen(Confirms(self._on_confirm))
        channel.raw.add_on_return_callback(self._on_return)
        channel.on_close = self._on_close

    def send(self, parcels: Sequence[Parcel]) -> _Batch:
        packed = self._packer.pack(parcels)  # may raise: then nothing was sent, and nothing may be counted
        first = self._last_tag + 1
        batch = _Batch(parcels, first)
        self._last_tag += len(parcels)
        self._unconfirmed.update(dict.fromkeys(range(first, self._last_tag + 1), batch))
        self._batches[batch] = None
        self.channel.raw.connection.emit(packed)
        return batch

    def give_up(self, batch: _Batch) -> list[Parcel]:
        """Nobody waits for it any more. Returns what is not known to be taken or refused."""
        tags = [tag for tag, waiting in self._unconfirmed.items() if waiting is batch]
        self._batches.pop(batch, None)
        return [self._unconfirmed.pop(tag).parcel(tag) for tag in tags]

    def fail(self, reason: str) -> None:
        """Whoever waits is told; what was sent may still be taken."""
        for batch in self._batches:
            batch.fail(BrokerUnavailable(reason))

    async def ping(self) -> None:
        await self.channel.call("basic_qos", prefetch_count=0)

    def retire(self) -> None:
        """Nothing more is sent on it: it closes once it is known what became of the rest."""
        self._is_retired = True
        if not self._batches:
            self.channel.abandon()

    def _on_confirm(self, tag: int, is_multiple: bool, is_taken: bool) -> None:
        waiting = self._unconfirmed
        tags = list(takewhile(tag.__ge__, waiting)) if is_multiple else [tag]
        for each in () if is_taken else tags:
            if each in waiting:
                waiting[each].refuse(each)
        for batch, count in Counter([waiting.pop(each, None) for each in tags]).items():
            if batch is not None:
                batch.confirm(count)
                if batch.missing == 0:
                    self._batches.pop(batch, None)
        if self._is_retired and not self._batches:
            self.channel.abandon()

    def _on_return(self, _: object, method: Any, __: object, body: bytes) -> None:
        for batch in self._batches:
            if batch.claims(method.routing_key, body):
                return

    def _on_close(self, fault: BrokerError) -> None:
        """What is wrong with one message is told to who sent it; the others only lost their channel."""
        batches, self._batches, self._unconfirmed = list(self._batches), {}, {}
        culprit = max(batches, key=lambda batch: batch.largest, default=None)
        for batch in batches:
            is_told = batch is culprit or not isinstance(fault, Refused) or fault.code != _PRECONDITION_FAILED
            batch.fail(fault if is_told else BrokerUnavailable("RabbitMQ closed the channel; publish again"))


class _Doubt:
    """Ends a batch when its time is over, and finds out shortly before whether its channel, and the server, answer."""

    def __init__(self, connection: Connection, session: _Session, batch: _Batch, until: float) -> None:
        self._connection = connection
        self._session = session
        self._batch = batch
        self._until = until
        self._asking: asyncio.Task[None] | None = None
        self._channel_answers = self._server_answers = False
        self._timer = asyncio.get_running_loop().call_at(until - PING_PATIENCE, self._ask)

    def _ask(self) -> None:
        self._timer = asyncio.get_running_loop().call_at(self._until, self._batch.fail, _TooLate())
        self._asking = asyncio.create_task(self._ask_both(), name="is RabbitMQ there")

    async def _ask_both(self) -> None:
        await asyncio.gather(self._ask_channel(), self._ask_server())

    async def _ask_channel(self) -> None:
        with suppress(BrokerError):
            await self._session.ping()
            self._channel_answers = True

    async def _ask_server(self) -> None:
        with suppress(BrokerError):
            (await self._connection.channel()).abandon()
            self._server_answers = True

    def end(self) -> None:
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def told(self, refused: Sequence[Parcel], unknown: Sequence[Parcel], count: int) -> Overdue:
        return Overdue(
            [*refused, *unknown],
            count,
            {parcel.queue for parcel in unknown},
            is_blocked=not self._channel_answers,
            is_gone=not (self._channel_answers or self._server_answers),
        )


class Publisher:
    """Publishes on one channel. `declare` makes a queue that vanished; what was meant for it is published again."""

    def __init__(self, connection: Connection, declare: Callable[[Iterable[str]], Awaitable[None]]) -> None:
        self._connection = connection
        self._connection.on_blocked = self._on_blocked
        self._declare = declare
        self._session: _Session | None = None
        self._retired: WeakSet[_Session] = WeakSet()
        self._opening = asyncio.Lock()
        self._routed: dict[str, None] = {}  # queues that were there once
        self._has_forgotten = False  # some of these: then any that is missing may have been there

    async def publish(self, parcels: Sequence[Parcel], until: float | None = None, *, alone: bool = False) -> None:
        """Returns once every one is confirmed. Raises NotConfirmed, BrokerUnavailable or BrokerError; `until`, the
        loop's time: Overdue when that has passed, or TimeoutError when they could not be sent so soon. `alone`: on a
        channel of its own."""
        count, refused = len(parcels), list[Parcel]()
        while parcels:
            async with asyncio.timeout_at(until):
                session = await (self._new_session() if alone else self._ready())
            batch = session.send(parcels)
            doubt = None if until is None else _Doubt(self._connection, session, batch, until)
            try:
                await batch.done
            except _TooLate:
                unknown = [*session.give_up(batch), *batch.returned]
                self._retire(session)
                assert doubt is not None
                raise doubt.told([*refused, *batch.refused], unknown, count) from None
            finally:
                if doubt is not None:
                    doubt.end()
            if alone or batch.refused:
                self._retire(session)
            refused += batch.refused
            parcels = batch.returned
            if missing := {parcel.queue for parcel in parcels}:
                async with asyncio.timeout_at(until):
                    await self._make_again(missing)
            self._remember({parcel.queue for parcel in batch.parcels})
        if refused:
            raise NotConfirmed(refused, count)

    async def _make_again(self, missing: set[str]) -> None:
        if self._has_forgotten or not missing.isdisjoint(self._routed):
            await asyncio.sleep(VANISHED_PAUSE)
        await self._declare(missing)

    def give_up(self, reason: str) -> None:
        """The server does not confirm: whoever waits is told, and the next to publish connects anew."""
        self._session = None
        self._connection.abort(reason)

    async def ping(self) -> None:
        """A round trip on the channel that publishes."""
        await (await self._ready()).ping()

    def _remember(self, queues: set[str]) -> None:
        self._routed.update(dict.fromkeys(queues))
        while len(self._routed) > _MOST_QUEUES:
            del self._routed[next(iter(self._routed))]
            self._has_forgotten = True

    async def _ready(self) -> _Session:
        if self._connection.blocked:
            await asyncio.sleep(0)  # who tries again at once must let the loop hear that it is over
            raise BrokerUnavailable(self._connection.blocked)
        if self._session is None or not self._session.channel.is_open:
            async with self._opening:
                if self._session is None or not self._session.channel.is_open:
                    self._session = await self._new_session()
        return self._session

    async def _new_session(self) -> _Session:
        channel = await self._connection.channel()
        try:
            await channel.call("confirm_delivery", ack_nack_callback=_unused)
        except BaseException:
            channel.abandon()  # nobody else knows of it
            raise
        return _Session(channel)

    def _retire(self, session: _Session) -> None:
        """The next to publish has a new channel. One that published to a quorum queue for the first time while its
        leader was lost is refused there until that node is back (seen on 3.10), though the queue has a new leader."""
        if self._session is session:
            self._session = None
        if session not in self._retired:
            self._retired.add(session)
            session.retire()

    def _on_blocked(self, reason: str) -> None:
        """Nobody waits for it to end: that may take hours. What was sent may still be taken then."""
        for session in (self._session, *self._retired):
            if session is not None:
                session.fail(reason)


def _unused(_: object) -> None:
    """Confirms are read by the receiver; pika only wants to have somebody."""
