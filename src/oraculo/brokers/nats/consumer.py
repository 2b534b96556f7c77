"""One subscription to a queue on JetStream.

It pulls: JetStream sends as many messages as were asked for and no more, so the prefetch holds. While the caller works,
what was asked for already arrives and waits here, its lease renewed; more is asked for when the caller takes again.

JetStream tells a client nothing when its consumer dies of something else than a deletion. So each pull asks for a
heartbeat, and a consumer that hears none is lost: it says so to whoever takes, and is never used again.
"""

import asyncio
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import structlog

from oraculo.brokers.nats.connection import Connection
from oraculo.brokers.nats.layout import NANOSECONDS, Origin, origin_of, parse_headers, parse_status, stream_of
from oraculo.brokers.prefetch import Prefetch
from oraculo.errors import BrokerError, BrokerUnavailable, QueueUnavailable
from oraculo.ports.broker import Delivery

PULL_EXPIRES = 10.0  # seconds that a pull waits at the server; then it is made again
MISSED_HEARTBEATS = 3
REFUSED_PAUSE = 5.0  # seconds until a message is moved again that the quarantine did not take
FAREWELL = 1.0  # seconds in which the server should have read what is given back
_ACK_SUBJECTS = b"$JS.ACK."
_WORDS_OF_ACK = 9
_ACK, _NAK, _IN_PROGRESS = b"+ACK", b"-NAK", b"+WPI"
_HEARTBEAT, _NO_MESSAGES, _PULL_ENDED, _CONFLICT = "100", "404", "408", "409"
_ENDS_OF_PULLS = ("Leadership Change", "Message Size Exceeds MaxBytes", "Batch Completed")  # and of nothing else
_PENDING_HEADER, _PENDING_BYTES_HEADER = "Nats-Pending-Messages", "Nats-Pending-Bytes"
_OVER_BATCH = re.compile(r"Exceeded MaxRequestBatch of (\d+)")
_TOP_UP_SHARE = 4  # more is asked for once a quarter of the prefetch is free

_log = structlog.get_logger("oraculo.brokers.nats")


class Letter(NamedTuple):
    """A delivery that becomes a dead letter."""

    queue: str
    body: bytes
    reason: str
    redeliveries: int
    id: str


class Terms(NamedTuple):
    """How a consumer is to behave."""

    prefetch: int
    lease: float  # seconds until JetStream delivers again what was neither settled nor extended
    heartbeat: float
    delivery_limit: int | None  # None: a dead letter has nowhere else to go
    pull_batch: int = 0  # the most that its owner lets one pull ask for; 0: whatever it likes
    pull_expires: float = 0.0  # and for how many seconds


class Home(Protocol):
    """What a consumer needs of its broker."""

    @property
    def pull_bytes(self) -> int:
        """The most that may come for one pull."""
        ...

    async def bury(self, letters: Sequence[Letter]) -> None:
        """Returns once they are confirmed in the quarantine."""
        ...

    def note_given_back(self, queue: str, sequence: int, delay: float) -> None: ...

    def note_seen(self, queue: str, sequences: Iterable[int]) -> None: ...

    def note_trouble(self, trouble: str | None) -> None: ...

    def lost(self, consumer: "NatsConsumer") -> None:
        """It cannot be used any more. What it held should be given back."""
        ...

    def closed(self, consumer: "NatsConsumer") -> None: ...


class _Arrived(NamedTuple):
    token: str  # the subject on which it is settled
    body: bytes
    origin: Origin


class NatsConsumer:
    """Made by NatsBroker.consume. A delivery's token is the subject on which JetStream wants to hear of it."""

    def __init__(self, home: Home, connection: Connection, queue: str, terms: Terms) -> None:
        self.connection = connection
        self._home = home
        self.queue = queue
        self._terms = terms
        self._pull_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream_of(queue)}.{stream_of(queue)}"
        self._inbox = ""
        self._subscription = 0
        self._buffer: deque[_Arrived] = deque()
        self._condemned: list[_Arrived] = []  # delivered too often
        self._leases: dict[str, float] = {}  # when each that is here or out ends, in the loop's time
        self._out: dict[str, Origin] = {}
        self._moving: set[str] = set()  # those out that are on their way to the quarantine
        self._prefetch = Prefetch(terms.prefetch)
        self._requested = 0  # asked for and not yet come
        self._most_pulled = terms.pull_batch or terms.prefetch
        self._last_pull = 0  # how many it asked for
        self._last_bytes = 0  # and how much
        self._pulled_at = 0.0
        self._is_next_large = False  # the next message is over what a pull allows, so it is asked for alone
        self._heard = True
        self._stirred = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._trouble: str | None = None
        self._closed = False
        self._farewell: asyncio.Task[None] | None = None

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
            if self._condemned:
                await self._bury_condemned()
            elif self._buffer:
                if deliveries := self._hand_out(limit):
                    self._home.note_trouble(None)
                    return deliveries
                # All had lapsed, so that there is room: more is asked for at once.
            else:
                self._stirred.clear()
                await self._stirred.wait()
        return []

    def _top_up(self) -> None:
        held = len(self._leases)  # those, too, that are being moved to the quarantine now
        most = self._prefetch.fitting
        free = most - held - self._requested
        if free <= 0 or (self._requested and free * _TOP_UP_SHARE < most):
            return
        if self._is_next_large:
            self._is_next_large = False
            self._pull(1, "")
        else:
            self._last_bytes = self._home.pull_bytes
            self._pull(min(free, self._most_pulled), f',"max_bytes":{self._last_bytes}')

    def _pull(self, count: int, limit: str) -> None:
        expires, heartbeat = int(self._pull_expires * NANOSECONDS), int(self._heartbeat * NANOSECONDS)
        request = f'{{"batch":{count},"expires":{expires},"idle_heartbeat":{heartbeat}{limit}}}'
        self.connection.send([(self._pull_subject, request.encode())], self._inbox)
        self._requested += count
        self._last_pull = count
        self._pulled_at = asyncio.get_running_loop().time()

    @property
    def _pull_expires(self) -> float:
        return min(PULL_EXPIRES, self._terms.pull_expires or PULL_EXPIRES)

    @property
    def _heartbeat(self) -> float:
        return min(self._terms.heartbeat, self._pull_expires / 2)  # JetStream refuses a longer one

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

    async def _bury_condemned(self) -> None:
        """It arrived once more although it was delivered as often as it may be: nobody had settled it."""
        condemned, self._condemned = self._condemned, []
        try:
            refused = await self._refused_burial(condemned)
        except BaseException:
            # Without those that are buried by now. One whose lease ended meanwhile comes again by itself.
            self._condemned[:0] = [each for each in condemned if each.token in self._leases]
            raise
        if refused:
            why = str(next(iter(refused.values())))
            _log.warning("dead letters are refused; they wait in their queue", queue=self.queue, reason=why)
            self._settle_all(list(refused), _nak(REFUSED_PAUSE))

    async def _refused_burial(self, condemned: Sequence[_Arrived]) -> dict[str, BrokerError]:
        """Buries them. Returns the tokens of those that are refused, and why: they hold up no other."""
        try:
            await self._home.bury([self._last_letter(each) for each in condemned])
        except BrokerError as error:
            if _is_away(error):
                raise
            if len(condemned) == 1:
                return {condemned[0].token: error}
            singly = [await self._refused_burial([each]) for each in condemned]
            return {token: error for refused in singly for token, error in refused.items()}
        self._settle_all([each.token for each in condemned], _ACK)
        return {}

    def _last_letter(self, arrived: _Arrived) -> Letter:
        """Without the first delivery it counts, and without this last one, which nobody was shown."""
        reason = f"delivered {self._terms.delivery_limit} times and never settled"
        return Letter(self.queue, arrived.body, reason, arrived.origin.delivered - 2, arrived.origin.id)

    # -- settling -------------------------------------------------------------------------------------------------

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        self._settle_all(self._held(deliveries), _ACK)

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        for token in self._held([delivery]):
            origin = self._out[token]
            if self._terms.delivery_limit is not None and origin.delivered >= self._terms.delivery_limit:
                await self.dead_letter(delivery, reason)
                return
            self._settle_all([token], _nak(delay))
            self._home.note_given_back(self.queue, origin.sequence, max(delay, 0.0))

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        await self.dead_letter_all([(delivery, reason)])

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        """A delivery that cannot be moved now stays this consumer's."""
        try:
            await self._move(letters)
        except BrokerError as error:
            if len(letters) == 1 or _is_away(error):
                raise
            await self._move_singly(letters)

    async def _move_singly(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        """Some of them are refused: they hold up no other, and it is told why the first of them is."""
        refusal: BrokerError | None = None
        for letter in letters:
            try:
                await self._move([letter])
            except BrokerError as error:
                if _is_away(error):
                    raise
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    async def _move(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        given = {str(delivery.token): (delivery.body, reason) for delivery, reason in letters}
        tokens = self._held([delivery for delivery, _ in letters])
        if not tokens:
            return
        self._moving.update(tokens)  # whoever settles one meanwhile does nothing
        try:
            await self._home.bury([self._letter(token, *given[token]) for token in tokens])
        finally:
            self._moving.difference_update(tokens)
        self._settle_all(tokens, _ACK)

    def _letter(self, token: str, body: bytes, reason: str) -> Letter:
        origin = self._out[token]
        return Letter(self.queue, body, reason, origin.delivered - 1, origin.id)

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        self._renew(self._held(deliveries))

    def _held(self, deliveries: Sequence[Delivery]) -> list[str]:
        """The tokens of those that are this consumer's to settle. One whose lease ended may be with another by now."""
        if self._closed:
            return []
        self._require_alive()
        now, out, moving, leases = self._now(), self._out, self._moving, self._leases
        tokens = dict.fromkeys(str(delivery.token) for delivery in deliveries)
        return [token for token in tokens if token in out and token not in moving and leases.get(token, 0.0) > now]

    def _settle_all(self, tokens: Sequence[str], how: bytes) -> None:
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
        self._leases[token] = asyncio.get_running_loop().time() + self._terms.lease
        if self._requested:
            self._requested -= 1
        delivered, limit = origin.delivered, self._terms.delivery_limit
        is_too_often = limit is not None and delivered > limit
        self._prefetch.note(len(data))
        (self._condemned if is_too_often else self._buffer).append(_Arrived(token, data, origin))
        if delivered > 1:
            self._home.note_seen(self.queue, [origin.sequence])
        self._stirred.set()

    def _hear(self, headers: bytes) -> None:
        """What JetStream says about the pulls."""
        status, said = parse_status(headers)
        if status == _HEARTBEAT:
            return
        told = parse_headers(headers)
        ended = told.get(_PENDING_HEADER, "")
        if status in (_NO_MESSAGES, _PULL_ENDED) or (status == _CONFLICT and ended and said in _ENDS_OF_PULLS):
            self._requested = max(0, self._requested - int(ended or 0))
            self._is_next_large |= status == _CONFLICT and told.get(_PENDING_BYTES_HEADER) == str(self._last_bytes)
            self._stirred.set()
        elif over := _OVER_BATCH.fullmatch(said):
            self._most_pulled = min(self._most_pulled, int(over[1]))
            self._requested = max(0, self._requested - self._last_pull)
            self._stirred.set()
        else:
            what = said if status == _CONFLICT else "its consumer is gone"
            self.lose(f"the subscription to {self.queue} at {self.connection.place} was lost: {what} ({status})")

    def sends_to(self, subject: str) -> bool:
        stream = stream_of(self.queue).lower()
        return subject == self._pull_subject.lower() or _settled_at(subject) == (stream, stream)

    def forbidden(self, said: str) -> None:
        """Who may not pull hears nothing, and who may not ack gets everything again when its lease ends."""
        what = "read" if "$js.api." in said else "settle what comes on"
        self.lose(f"{self.connection.place} does not allow us to {what} {self.queue}: {said}")

    # -- staying alive --------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Counts missed heartbeats, not seconds: when this process stood still, the server is not to blame."""
        missed = 0
        while True:
            await asyncio.sleep(self._heartbeat)
            missed = 0 if self._heard or not self._requested else missed + 1
            self._heard = False
            if missed >= MISSED_HEARTBEATS:
                self.lose(f"{self.connection.place} has stopped sending heartbeats for {self.queue}")
                return
            self._forget_lapsed()
            self._forget_stale_pulls()
            with suppress(BrokerUnavailable):
                self._renew_buffered()

    def _forget_lapsed(self) -> None:
        """What was held past its lease is JetStream's again, and no longer in the way of more."""
        now = self._now()
        lapsed = [token for token, ends in self._leases.items() if ends <= now]
        for token in lapsed:
            self._leases.pop(token)
            self._out.pop(token, None)
        if lapsed:
            self._buffer = deque(each for each in self._buffer if each.token in self._leases)
            self._condemned = [each for each in self._condemned if each.token in self._leases]
            self._stirred.set()

    def _forget_stale_pulls(self) -> None:
        """Should the count of what was asked for ever be wrong, the consumer would ask for less and less."""
        if self._requested and self._now() > self._pulled_at + self._pull_expires + 2 * self._heartbeat:
            self._requested = 0
            self._stirred.set()

    def _renew_buffered(self) -> None:
        """What waits here is nobody else's, however long the caller is busy."""
        now, half = self._now(), self._terms.lease / 2
        due = [each.token for each in self._buffer if 0 < self._leases[each.token] - now < half]
        self._renew(due)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _require_alive(self) -> None:
        if self._trouble is not None:
            self._home.note_trouble(self._trouble)
            raise BrokerUnavailable(self._trouble)

    # -- ending ---------------------------------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """From now on it is dead."""
        if self._closed or self._trouble is not None:
            return
        self._trouble = why
        self._stirred.set()
        self._home.lost(self)

    def abandon(self) -> dict[str, float]:
        """Lets go of everything without a word to the server; returns what it held, and when each lease ends."""
        if self._watching is not None:
            self._watching.cancel()
        leases, self._leases = self._leases, {}
        self._out.clear()
        self._buffer.clear()
        self._condemned.clear()
        return leases

    async def close(self) -> None:
        self._closed = True
        self._stirred.set()
        await self.give_back()
        self._home.closed(self)

    async def give_back(self) -> None:
        """Once, however often it is asked for; bounded in time."""
        if self._farewell is None:
            self._farewell = asyncio.create_task(self._say_farewell(), name=f"giving back to {self.queue}")
        await asyncio.shield(self._farewell)

    async def _say_farewell(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        try:
            async with asyncio.timeout(FAREWELL):
                await self._return_everything()
        except (TimeoutError, BrokerUnavailable):
            pass  # it comes again when the lease ends
        finally:
            self.abandon()
            self.connection.forget(self._subscription)

    async def _return_everything(self) -> None:
        """What the server sent before it heard that nobody listens has arrived once the barrier is passed."""
        self._out.clear()
        self.connection.stop_deliveries(self._subscription)
        await self.connection.barrier()
        held = give_back(self.connection, self._leases)
        for token in held:
            self._home.note_given_back(self.queue, origin_of(token).sequence, 0.0)
        if held:
            await self.connection.barrier()


def _settled_at(subject: str) -> tuple[str, ...]:
    """The stream and the consumer that the subject of an ack names; before them a newer server puts two names more."""
    words = subject.split(".")
    if words[:2] != ["$js", "ack"]:
        return ()
    place = 2 if len(words) == _WORDS_OF_ACK else 4
    return tuple(words[place : place + 2])


def _is_away(error: BrokerError) -> bool:
    """The server, so that nothing is known of a message."""
    return isinstance(error, BrokerUnavailable) and not isinstance(error, QueueUnavailable)


def _nak(delay: float) -> bytes:
    return _NAK + (f' {{"delay":{int(delay * NANOSECONDS)}}}'.encode() if delay > 0 else b"")


def give_back(connection: Connection, leases: Mapping[str, float]) -> list[str]:
    """Lets JetStream deliver them again now, not when each lease ends. One whose lease has ended may be another's."""
    now = asyncio.get_running_loop().time()
    held = [token for token, ends in leases.items() if ends > now]
    connection.send([(token, _NAK) for token in held])
    return held
