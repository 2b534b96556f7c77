"""Publishing with confirms, pipelined: a batch is written at once, and done when the server has confirmed all of it."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any
from weakref import WeakSet

from oraculo.brokers.rabbitmq.connection import ACCESS_REFUSED, NOT_FOUND, Channel, Connection, Refused
from oraculo.brokers.rabbitmq.frames import Confirms, Fit, Packer, Parcel
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge

_MOST_QUEUES = 10_000  # of which it is remembered that they were there
_MOST_TOLD = 5  # queues that are named, and reasons
_MOST_REMADE = 2  # times that a queue is made again for one call: a node may hear of it a moment after it was made
_UNROUTED = "RabbitMQ has no queue %s: what is published to it comes back"
_PRECONDITION_FAILED = 406  # on a channel that only publishes: a message is too large
_SIZES = re.compile(r"message size (\d+) .*max size (\d+)")

# A queue that was deleted is not made again at once, but after so many seconds: RabbitMQ (seen on 3.10) would forget to
# cancel those who consumed the old one, and give the messages of the new one to them, where they are lost to everybody
# until that channel closes. The cancellation took 0.03 s.
VANISHED_PAUSE = 0.3
PING_PATIENCE = 1.0  # seconds, before its time is over, in which a server that does not confirm may answer otherwise
LONGEST = 12  # times its patience: so long a publish may take at most, though confirms drip in


class NotConfirmed(BrokerUnavailable):
    """The server said no to some; all others are confirmed. `down`: of their queues, those that do not work, and why,
    as far as it told. `late`: those that there was no time to make."""

    silent: Collection[str] = ()

    def __init__(
        self, parcels: Sequence[Parcel], of: int, down: Mapping[str, str] | None = None, late: Collection[str] = ()
    ) -> None:
        self.parcels = parcels
        self.down = down or {}
        queues = sorted({parcel.queue for parcel in parcels})
        whys = dict.fromkeys(late, "there was no time to make its queue") | {**self.down}
        told = dict.fromkeys(whys.get(queue) or "is it full, or without its majority?" for queue in queues)
        names, reasons = ", ".join(queues[:_MOST_TOLD]), "; ".join(list(told)[:_MOST_TOLD])
        super().__init__(f"RabbitMQ did not take {len(parcels)} of {of} messages, for {names}: {reasons}")


class Overdue(NotConfirmed):
    """Of those for the queues in `silent` it said nothing; it may have taken them. `is_blocked`: nor did it say
    anything else on their channel, so that only one of these queues may be the cause. `is_gone`: nor on another.
    `unheard`: what was sent alone and may still be heard of."""

    is_blocked = False
    is_gone = False
    unheard: "Unheard | None" = None


class Forbidden(BrokerUnavailable):
    """Our user may not publish."""


class _TooLate(Exception):
    pass


class _Batch:
    """What one call published: how many confirms are missing, and what the server could not route or did not take."""

    __slots__ = ("_first", "_unreturned", "done", "heard_at", "missing", "parcels", "refused", "returned")

    def __init__(self, parcels: Sequence[Parcel], first: int) -> None:
        self.parcels = parcels
        self.missing = len(parcels)
        self.heard_at = 0.0  # the loop's time when it was last told what became of one
        self.refused: list[Parcel] = []
        self._first = first  # its delivery tag
        self.returned: list[Parcel] = []
        self._unreturned: dict[tuple[str, bytes], list[Parcel]] | None = None  # made when the first is returned
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def refuse(self, tag: int) -> None:
        self.refused.append(self.parcel(tag))

    def confirm(self, count: int, now: float) -> None:
        """Or were refused: it is known what became of them."""
        self.missing -= count
        self.heard_at = now
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

    def __init__(self, channel: Channel, fit: Fit) -> None:
        self.channel = channel
        self._packer = Packer(channel.raw.channel_number, channel.raw.connection.params.frame_max, fit)
        self._last_tag = 0
        self._unconfirmed: dict[int, _Batch] = {}  # by delivery tag, the oldest first
        self._batches: dict[_Batch, None] = {}  # those of which a confirm is missing, the oldest first
        self._is_retired = False
        self._now = asyncio.get_running_loop().time
        channel.listen(Confirms(self._on_confirm))
        channel.raw.add_on_return_callback(self._on_return)
        channel.on_close = self._on_close

    @property
    def confirmed_at(self) -> float:
        """The loop's time when the server last confirmed something, be it on another channel."""
        return float(self.channel.raw.connection.confirmed_at)

    def send(self, parcels: Sequence[Parcel]) -> _Batch:
        packed = self._packer.pack(parcels)  # may raise: then nothing was sent, and nothing may be counted
        first = self._last_tag + 1
        batch = _Batch(parcels, first)
        self._last_tag += len(parcels)
        self._unconfirmed.update(dict.fromkeys(range(first, self._last_tag + 1), batch))
        self._batches[batch] = None
        self.channel.raw.connection.emit(packed)
        return batch

    def unconfirmed(self, batch: _Batch) -> list[Parcel]:
        """What is not known to be taken or refused."""
        return [batch.parcel(tag) for tag, waiting in self._unconfirmed.items() if waiting is batch]

    def give_up(self, batch: _Batch) -> None:
        """Nobody waits for it any more."""
        self._unconfirmed = {tag: waiting for tag, waiting in self._unconfirmed.items() if waiting is not batch}
        self._batches.pop(batch, None)

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
        now = self.channel.raw.connection.confirmed_at = self._now()
        told: dict[_Batch, int] = {}
        for each in list(takewhile(tag.__ge__, waiting)) if is_multiple else (tag,):
            if (batch := waiting.pop(each, None)) is not None:
                told[batch] = told.get(batch, 0) + 1
                if not is_taken:
                    batch.refuse(each)
        for batch, count in told.items():
            batch.confirm(count, now)
            if batch.missing == 0:
                self._batches.pop(batch, None)
        if self._is_retired and not self._batches:
            self.channel.abandon()

    def _on_return(self, _: object, method: Any, __: object, body: bytes) -> None:
        for batch in self._batches:
            if batch.claims(method.routing_key, body):
                return

    def _on_close(self, fault: BrokerError) -> None:
        """What is wrong with one message is told to who sent it; the others only lost their channel. A user who may not
        publish at all is about no message: that may be mended while they wait."""
        batches, self._batches, self._unconfirmed = list(self._batches), {}, {}
        if isinstance(fault, Refused) and fault.code == ACCESS_REFUSED:
            fault = Forbidden(str(fault))
        is_too_large = isinstance(fault, Refused) and fault.code == _PRECONDITION_FAILED
        if is_too_large and (sizes := _SIZES.search(str(fault))):
            # Of several that are too large the first is named, and the largest is told.
            largest = max((batch.largest for batch in batches), default=0)
            fault = MessageTooLarge(str(fault), max(largest, int(sizes[1])), int(sizes[2]))
        culprit = max(batches, key=lambda batch: batch.largest, default=None)
        for batch in batches:
            is_told = batch is culprit or not is_too_large
            batch.fail(fault if is_told else BrokerUnavailable("RabbitMQ closed the channel; publish again"))


class _Doubt:
    """Ends a batch when its time is over, and finds out shortly before whether its channel, and the server, answer.

    Its time begins anew with each confirm: over a slow line a batch takes as long as it takes. Those of others count
    while the server answers nothing else, for what it is asked waits behind all that was sent before.
    """

    def __init__(self, connection: Connection, session: _Session, batch: _Batch, until: float) -> None:
        self._connection = connection
        self._session = session
        self._batch = batch
        self.until = until
        self._watching: asyncio.Task[None] | None = None
        self._channel_answers = self._server_answers = False
        loop = asyncio.get_running_loop()
        self._patience = until - loop.time()
        self._last = until + (LONGEST - 1) * self._patience
        self._ping_patience = min(PING_PATIENCE, self._patience / 2)
        self._timer = loop.call_at(until - self._ping_patience, self._begin)

    def _begin(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="is RabbitMQ there")

    async def _watch(self) -> None:
        while self._has_more_time(self._batch.heard_at) or not await self._is_late():
            await _sleep_until(self.until - self._ping_patience)
        self._batch.fail(_TooLate())

    def _has_more_time(self, heard_at: float) -> bool:
        before, self.until = self.until, min(max(self.until, heard_at + self._patience), self._last)
        return self.until > before

    async def _is_late(self) -> bool:
        self._channel_answers = self._server_answers = False
        asking = asyncio.create_task(self._ask_both(), name="ask RabbitMQ")
        try:
            await _sleep_until(self.until)
        finally:
            asking.cancel()
        answers = self._channel_answers or self._server_answers
        return not self._has_more_time(self._batch.heard_at if answers else self._session.confirmed_at)

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
        if self._watching is not None:
            self._watching.cancel()

    def told(self, refused: Sequence[Parcel], unknown: Sequence[Parcel], count: int) -> Overdue:
        overdue = Overdue([*refused, *unknown], count)
        overdue.silent = {parcel.queue for parcel in unknown}
        overdue.is_blocked = not self._channel_answers
        overdue.is_gone = not (self._channel_answers or self._server_answers)
        return overdue


class Unheard:
    """A batch of which it is not known what became, on a channel of its own."""

    def __init__(self, session: _Session, batch: _Batch) -> None:
        self._session = session
        self._batch = batch

    @property
    def is_open(self) -> bool:
        return self._batch.missing > 0 and self._session.channel.is_open

    def give_up(self) -> None:
        self._session.channel.abandon()


class Publisher:
    """Publishes on one channel. `declare` makes queues that vanished, and returns those that it could; what was meant
    for them is published again."""

    def __init__(
        self, connection: Connection, declare: Callable[[Iterable[str]], Awaitable[set[str]]], fit: Fit
    ) -> None:
        self._connection = connection
        self._fit = fit
        self._connection.on_blocked = self._on_blocked
        self._declare = declare
        self._session: _Session | None = None
        self._sessions: WeakSet[_Session] = WeakSet()
        self._opening = asyncio.Lock()
        self.forbidden: str | None = None  # why our user may not publish
        self._routed: dict[str, None] = {}  # queues that were there once
        self._has_forgotten = False  # some of these: then any that is missing may have been there

    async def publish(self, parcels: Sequence[Parcel], until: float | None = None, *, alone: bool = False) -> None:
        """Returns once every one is confirmed. Raises NotConfirmed, BrokerUnavailable or BrokerError; `until`, the
        loop's time: Overdue when that has passed and confirms no longer come in, or TimeoutError when they could not be
        sent so soon; Refused when the server sends back all of them, though it lets their queues be made. `alone`: on a
        channel of its own."""
        refused: list[Parcel] = []
        remade: dict[str, int] = {}  # how often each queue was made again
        count = len(parcels)
        while parcels:
            session = None if alone else self._at_hand
            if session is None:
                async with asyncio.timeout_at(until):
                    session = await self._ready(alone=alone)
            batch = session.send(parcels)
            try:
                until = await self._confirmed(session, batch, refused, count, until, alone=alone)
            except Forbidden as error:
                self.forbidden = str(error)
                raise
            self.forbidden = None
            if batch.refused:
                self._retire(session)
            refused += batch.refused
            parcels = batch.returned
            if missing := {parcel.queue for parcel in parcels}:
                async with asyncio.timeout_at(until):
                    made = await self._make_again({queue for queue in missing if remade.get(queue, 0) < _MOST_REMADE})
                remade |= {queue: remade.get(queue, 0) + 1 for queue in made}
                refused += [parcel for parcel in parcels if parcel.queue not in made]
                parcels = [parcel for parcel in parcels if parcel.queue in made]
            self._remember({parcel.queue for parcel in batch.parcels})
        if refused and len(refused) == count and all(remade.get(parcel.queue) == _MOST_REMADE for parcel in refused):
            raise Refused(NOT_FOUND, _UNROUTED % refused[0].queue)
        if refused:
            raise NotConfirmed(refused, count)

    async def _confirmed(
        self, session: _Session, batch: _Batch, refused: list[Parcel], count: int, until: float | None, *, alone: bool
    ) -> float | None:
        """Or refused, or returned. Returns until when there is time for the rest. Raises Overdue, with what was
        `refused` before."""
        doubt = None if until is None else _Doubt(self._connection, session, batch, until)
        try:
            await batch.done
            return None if doubt is None else doubt.until
        except _TooLate:
            assert doubt is not None
            unknown = session.unconfirmed(batch)
            overdue = doubt.told([*refused, *batch.refused, *batch.returned], unknown, count)
            if alone:
                overdue.unheard = Unheard(session, batch)
            else:
                session.give_up(batch)
                self._retire(session)
            raise overdue from None
        except BaseException:
            if alone:
                session.give_up(batch)
            raise
        finally:
            if doubt is not None:
                doubt.end()
            if alone:
                self._retire(session)

    async def _make_again(self, missing: set[str]) -> set[str]:
        """Returns those that the server let us make."""
        if self._has_forgotten or not missing.isdisjoint(self._routed):
            await asyncio.sleep(VANISHED_PAUSE)
        return await self._declare(missing)

    def give_up(self, reason: str) -> None:
        """The server does not confirm: whoever waits is told, and the next to publish connects anew."""
        if not self._connection.blocked:  # then it is known why, and it will confirm what it has
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

    @property
    def _at_hand(self) -> _Session | None:
        """The session that is there, as it nearly always is: then no time has to be set in which to have one."""
        session = self._session
        return session if session is not None and session.channel.is_open and not self._connection.blocked else None

    async def _ready(self, *, alone: bool = False) -> _Session:
        if self._connection.blocked:
            await asyncio.sleep(0)  # who tries again at once must let the loop hear that it is over
            raise BrokerUnavailable(self._connection.blocked)
        if alone:
            return await self._new_session()
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
        session = _Session(channel, self._fit)
        self._sessions.add(session)
        return session

    def _retire(self, session: _Session) -> None:
        """The next to publish has a new channel. One that published to a quorum queue for the first time while its
        leader was lost is refused there until that node is back (seen on 3.10), though the queue has a new leader."""
        if self._session is session:
            self._session = None
        session.retire()

    def _on_blocked(self, reason: str) -> None:
        """Nobody waits for it to end: that may take hours. What was sent may still be taken then."""
        for session in list(self._sessions):
            session.fail(reason)


async def _sleep_until(when: float) -> None:
    await asyncio.sleep(when - asyncio.get_running_loop().time())


def _unused(_: object) -> None:
    """Confirms are read by the receiver; pika only wants to have somebody."""
