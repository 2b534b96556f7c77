"""One subscription to a queue on JetStream.

It pulls: JetStream sends as many messages as were asked for and no more, so the prefetch holds. While the caller works,
what was asked for already arrives and waits here, its lease renewed; more is asked for when the caller takes again.

JetStream reports nothing when a consumer dies of something else than a deletion. So each pull asks for heartbeats, and
a consumer that hears none is lost: it raises in `take`, and is never used again.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import structlog

from oraculo.brokers.nats.connection import Connection
from oraculo.brokers.nats.layout import (
    NANOSECONDS,
    Origin,
    letter_headers,
    origin_of,
    parse_headers,
    parse_status,
    stream_of,
)
from oraculo.brokers.nats.replies import Request
from oraculo.brokers.prefetch import Prefetch
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Delivery
from oraculo.wire.naming import dlq_name

PULL_EXPIRES = 10.0  # seconds that a pull waits at the server; then it is made again
# Most that comes for one pull of several messages. A server cuts off a client that leaves 64 MB unread, and all queues
# of a process share one connection. A larger message is asked for alone.
PULL_BYTES = 2 * 1024 * 1024
MISSED_HEARTBEATS = 3
REFUSED_PAUSE = 5.0  # seconds until a message is moved again that the dead letters did not take
FAREWELL = 1.0  # seconds in which the server should have read what is given back
_TOP_UP_SHARE = 4  # more is asked for once a quarter of the prefetch is free
_ACK_SUBJECTS = b"$JS.ACK."
_ACK, _NAK, _IN_PROGRESS = b"+ACK", b"-NAK", b"+WPI"
_HEARTBEAT, _NO_MESSAGES, _PULL_ENDED, _CONFLICT = "100", "404", "408", "409"
_ENDS_OF_PULLS = ("Leadership Change", "Message Size Exceeds MaxBytes", "Batch Completed")  # and of nothing else
_PENDING_HEADER, _PENDING_BYTES_HEADER = "Nats-Pending-Messages", "Nats-Pending-Bytes"

_log = structlog.get_logger("oraculo.brokers.nats")


class Terms(NamedTuple):
    """The numbers of one subscription."""

    prefetch: int
    lease: float  # seconds until JetStream delivers again what was neither settled nor extended
    heartbeat: float
    delivery_limit: int | None  # None: a dead letter has nowhere else to go


class Home(Protocol):
    """The part of a broker that its consumers use."""

    async def store_dead_letters(self, letters: Sequence[Request]) -> Sequence[BrokerError | None]:
        """Store dead letters. Return None for each that is stored, and the error for each that is not."""
        ...

    def note_delayed(self, queue: str, delay: float) -> None: ...

    def note_trouble(self, trouble: str | None) -> None: ...

    def lost(self, consumer: "NatsConsumer") -> None:
        """Give back what the consumer held, which cannot be used any more."""
        ...

    def closed(self, consumer: "NatsConsumer") -> None: ...


class _Arrived(NamedTuple):
    token: str  # the subject on which it is settled
    body: bytes
    origin: Origin


class NatsConsumer:
    """The consumer that `NatsBroker.consume` returns. A delivery's token is the subject on which it is acked."""

    def __init__(self, home: Home, connection: Connection, queue: str, terms: Terms) -> None:
        self.connection = connection
        self.queue = queue
        self._home = home
        self._terms = terms
        self._pull_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream_of(queue)}.{stream_of(queue)}"
        self._inbox = ""
        self._subscription = 0
        self._buffer: deque[_Arrived] = deque()
        self._worn: list[_Arrived] = []  # delivered too often
        self._leases: dict[str, float] = {}  # by token, the loop's time when the lease ends
        self._out: dict[str, Origin] = {}
        self._moving: set[str] = set()  # tokens of deliveries on their way to the dead letters
        self._prefetch = Prefetch(terms.prefetch)
        self._requested = 0  # messages asked for that have not come yet
        self._is_next_large = False  # the next message is over PULL_BYTES, so it is asked for alone
        self._heard = True
        self._stirred = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._trouble: str | None = None
        self._closed = False
        self._farewell: asyncio.Task[None] | None = None
        self._now = asyncio.get_running_loop().time

    def open(self) -> None:
        self._inbox, self._subscription = self.connection.subscribe(self._receive, self)
        self._watching = asyncio.create_task(self._watch(), name=f"heartbeats of {self.queue}")

    # -- taking ---------------------------------------------------------------------------------------------------

    async def take(self, limit: int) -> Sequence[Delivery]:
        if limit < 1:
            raise BrokerError(f"limit: must be at least 1, got {limit}")
        while not self._closed:
            self._require_alive()
            self._top_up()
            if self._worn:
                await self._bury_worn()
            elif self._buffer:
                if deliveries := self._hand_out(limit):
                    self._home.note_trouble(None)
                    return deliveries
                # All had lapsed, so there is room: more is asked for at once.
            else:
                self._stirred.clear()
                await self._stirred.wait()
        return []

    def _top_up(self) -> None:
        most = self._prefetch.fitting
        free = most - len(self._leases) - self._requested
        if free <= 0 or (self._requested and free * _TOP_UP_SHARE < most):
            return
        count = 1 if self._is_next_large else free
        self._is_next_large = False
        limit = f',"max_bytes":{PULL_BYTES}' if count > 1 else ""
        expires, heartbeat = int(PULL_EXPIRES * NANOSECONDS), int(self._heartbeat * NANOSECONDS)
        request = f'{{"batch":{count},"expires":{expires},"idle_heartbeat":{heartbeat}{limit}}}'
        self.connection.send([(self._pull_subject, request.encode())], self._inbox)
        self._requested += count

    @property
    def _heartbeat(self) -> float:
        return min(self._terms.heartbeat, PULL_EXPIRES / 2)  # JetStream refuses a longer one

    def _hand_out(self, limit: int) -> list[Delivery]:
        now, buffer, leases, out, queue = self._now(), self._buffer, self._leases, self._out, self.queue
        deliveries: list[Delivery] = []
        while buffer and len(deliveries) < limit:
            token, body, origin = buffer.popleft()
            if leases[token] <= now:  # this process stood still for long: by now it is another's
                del leases[token]
                continue
            out[token] = origin
            deliveries.append(Delivery(queue, body, token, origin.delivered - 1))
        return deliveries

    async def _bury_worn(self) -> None:
        """Make dead letters of messages that came once more after their last delivery: nobody had settled them."""
        worn, self._worn = self._worn, []
        reason = f"delivered {self._terms.delivery_limit} times and never settled"
        # Redeliveries do not count the first delivery, nor this last one, which nobody was shown.
        letters = {token: self._letter(body, reason, origin, origin.delivered - 2) for token, body, origin in worn}
        try:
            refused = await self._move_to_dead_letters(letters)
        except BaseException:
            # One whose lease ended meanwhile comes again by itself.
            self._worn[:0] = [each for each in worn if each.token in self._leases]
            raise
        if refused:
            why = str(next(iter(refused.values())))
            _log.warning("dead letters are refused; they wait in their queue", queue=self.queue, reason=why)
            self._settle(list(refused), _nak(REFUSED_PAUSE))

    # -- settling -------------------------------------------------------------------------------------------------

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._settle(self._held(deliveries), _ACK)

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        for token in self._held([delivery]):
            limit = self._terms.delivery_limit
            if limit is not None and self._out[token].delivered >= limit:
                await self.dead_letter(delivery, reason)
                return
            self._settle([token], _nak(delay))
            self._home.note_delayed(self.queue, delay)

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        await self.dead_letter_all([(delivery, reason)])

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        """Move deliveries to the dead letters. One that is refused stays this consumer's, and holds up no other."""
        given = {str(delivery.token): (delivery.body, reason) for delivery, reason in letters}
        found: dict[str, Request] = {}
        for token in self._held([delivery for delivery, _ in letters]):
            origin = self._out[token]
            found[token] = self._letter(*given[token], origin, origin.delivered - 1)
        for refusal in (await self._move_to_dead_letters(found)).values():
            raise refusal

    def _letter(self, body: bytes, reason: str, origin: Origin, redeliveries: int) -> Request:
        room = self.connection.max_payload - len(body)
        return Request(dlq_name(self.queue), body, letter_headers(reason, redeliveries, room, origin.id))

    async def _move_to_dead_letters(self, letters: Mapping[str, Request]) -> dict[str, BrokerError]:
        """Move the messages behind these tokens. Return those that are refused."""
        if not letters:
            return {}
        self._moving.update(letters)  # settling one meanwhile does nothing
        try:
            errors = await self._home.store_dead_letters(list(letters.values()))
        finally:
            self._moving.difference_update(letters)
        outcome = dict(zip(letters, errors, strict=True))
        self._settle([token for token, error in outcome.items() if error is None], _ACK)
        return {token: error for token, error in outcome.items() if error is not None}

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        self._renew(self._held(deliveries))

    def _held(self, deliveries: Sequence[Delivery]) -> list[str]:
        """Return the tokens that are this consumer's to settle. One whose lease ended may be another's by now."""
        if self._closed:
            return []
        self._require_alive()
        now, out, moving, leases = self._now(), self._out, self._moving, self._leases
        tokens = dict.fromkeys(str(delivery.token) for delivery in deliveries)
        return [token for token in tokens if token in out and token not in moving and leases.get(token, 0.0) > now]

    def _settle(self, tokens: Sequence[str], how: bytes) -> None:
        out, leases = self._out, self._leases
        self.connection.send([(token, how) for token in tokens])
        for token in tokens:
            out.pop(token, None)
            leases.pop(token, None)
        self._stirred.set()  # there is room now

    def _renew(self, tokens: Sequence[str]) -> None:
        self.connection.send([(token, _IN_PROGRESS) for token in tokens])
        self._leases.update(dict.fromkeys(tokens, self._now() + self._terms.lease))

    # -- arriving -------------------------------------------------------------------------------------------------

    def _receive(self, _subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self._heard = True
        if not reply.startswith(_ACK_SUBJECTS):
            if headers is not None:
                self._hear(headers)
            return
        token = reply.decode()
        origin = origin_of(token)
        self._leases[token] = self._now() + self._terms.lease
        if self._requested:
            self._requested -= 1
        self._prefetch.note(len(data))
        limit = self._terms.delivery_limit
        is_worn = limit is not None and origin.delivered > limit
        (self._worn if is_worn else self._buffer).append(_Arrived(token, data, origin))
        self._stirred.set()

    def _hear(self, headers: bytes) -> None:
        """Read a message of JetStream about the pulls."""
        status, said = parse_status(headers)
        if status == _HEARTBEAT:
            return
        fields = parse_headers(headers)
        pending = fields.get(_PENDING_HEADER, "")
        if status in (_NO_MESSAGES, _PULL_ENDED) or (status == _CONFLICT and pending and said in _ENDS_OF_PULLS):
            self._requested = max(0, self._requested - int(pending or 0))
            self._is_next_large |= status == _CONFLICT and fields.get(_PENDING_BYTES_HEADER) == str(PULL_BYTES)
            self._stirred.set()
        else:
            what = said if status == _CONFLICT else "its consumer is gone"
            self.lose(f"the subscription to {self.queue} at {self.connection.place} was lost: {what} ({status})")

    def sends_to(self, subject: str) -> bool:
        is_ack = subject.startswith(_ACK_SUBJECTS.decode().lower())
        return subject == self._pull_subject.lower() or (
            is_ack and origin_of(subject).stream == stream_of(self.queue).lower()
        )

    def forbidden(self, said: str) -> None:
        """End this consumer. Without the right to pull it hears nothing; without acks everything comes again."""
        what = "read" if "$js.api." in said else "settle what comes on"
        self.lose(f"{self.connection.place} does not allow us to {what} {self.queue}: {said}")

    # -- staying alive --------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Count missed heartbeats, not seconds: when this process stood still, the server is not to blame."""
        missed = 0
        while True:
            await asyncio.sleep(self._heartbeat)
            missed = 0 if self._heard or not self._requested else missed + 1
            self._heard = False
            if missed >= MISSED_HEARTBEATS:
                self.lose(f"{self.connection.place} has stopped sending heartbeats for {self.queue}")
                return
            self._forget_lapsed()
            with suppress(BrokerUnavailable):
                self._renew_buffered()

    def _forget_lapsed(self) -> None:
        """Make room for what was held past its lease, which is JetStream's again."""
        now = self._now()
        lapsed = [token for token, ends in self._leases.items() if ends <= now]
        for token in lapsed:
            self._leases.pop(token)
            self._out.pop(token, None)
        if lapsed:
            self._buffer = deque(each for each in self._buffer if each.token in self._leases)
            self._worn = [each for each in self._worn if each.token in self._leases]
            self._stirred.set()

    def _renew_buffered(self) -> None:
        """Keep what waits here, however long the caller is busy."""
        now, half = self._now(), self._terms.lease / 2
        self._renew([each.token for each in self._buffer if 0 < self._leases[each.token] - now < half])

    def _require_alive(self) -> None:
        if self._trouble is not None:
            self._home.note_trouble(self._trouble)
            raise BrokerUnavailable(self._trouble)

    # -- ending ---------------------------------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """End this consumer for good: each further call raises BrokerUnavailable with the reason."""
        if not self._closed and self._trouble is None:
            self._trouble = why
            self._stirred.set()
            self._home.lost(self)

    def abandon(self) -> dict[str, float]:
        """Let go of everything. Return the tokens, and when each lease ends."""
        if self._watching is not None:
            self._watching.cancel()
        with suppress(BrokerUnavailable):
            self.connection.stop_deliveries(self._subscription)
        self.connection.forget(self._subscription)
        leases, self._leases = self._leases, {}
        self._out.clear()
        self._buffer.clear()
        self._worn.clear()
        return leases

    async def close(self) -> None:
        self._closed = True
        self._stirred.set()
        if self._farewell is None:
            self._farewell = asyncio.create_task(self._say_farewell(), name=f"giving back to {self.queue}")
        await asyncio.shield(self._farewell)
        self._home.closed(self)

    async def _say_farewell(self) -> None:
        with suppress(TimeoutError, BrokerUnavailable):  # then all comes again when the lease ends
            async with asyncio.timeout(FAREWELL):
                await self._return_everything()
        self.abandon()
        if self._watching is not None:
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _return_everything(self) -> None:
        """Give back what has arrived once the server heard that nobody listens any more."""
        self._out.clear()
        self.connection.stop_deliveries(self._subscription)
        await self.connection.barrier()
        if self._leases:
            give_back(self.connection, self._leases)
            await self.connection.barrier()


def give_back(connection: Connection, leases: Mapping[str, float]) -> None:
    """Let JetStream deliver them again now, not when each lease ends. One whose lease has ended may be another's."""
    now = asyncio.get_running_loop().time()
    connection.send([(token, _NAK) for token, ends in leases.items() if ends > now])


def _nak(delay: float) -> bytes:
    return _NAK + (f' {{"delay":{int(delay * NANOSECONDS)}}}'.encode() if delay > 0 else b"")
