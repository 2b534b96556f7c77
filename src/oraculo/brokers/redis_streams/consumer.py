"""The consumer of a stream: taking, settling, and giving back what it held."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

from oraculo.brokers.prefetch import Prefetch
from oraculo.brokers.redis_streams.layout import content, keys, order, text
from oraculo.brokers.redis_streams.scripts import ACK, EXTEND, PAGE, RELEASE, RETRY, UPKEEP
from oraculo.brokers.redis_streams.server import GroupGone, Server
from oraculo.clients.redis import Command, Connection, ReplyError, Script, error_code
from oraculo.core.chunks import pages
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Delivery
from oraculo.ports.clock import Clock
from oraculo.wire.naming import is_dlq

LONGEST_WAIT = 1.0  # seconds that a consumer waits for messages between two upkeeps
MOST_HELD = 1_000_000  # more than any consumer holds
ALL_SEEN = b"0-0"  # the cursor at the beginning and at the end of all pending messages
SETTLED_TOGETHER = 1_000  # ids in one command: a script cannot unpack many thousands


class Terms(NamedTuple):
    """The rules by which the messages of a queue are delivered."""

    delivery_limit: int
    lease: float
    clock: Clock

    def limit_of(self, queue: str) -> int:
        """Return the delivery limit. A dead-letter queue has none (0): a dead letter has nowhere else to go."""
        return 0 if is_dlq(queue) else self.delivery_limit

    def too_often(self, last: str) -> str:
        return f"delivered {self.delivery_limit} times and never settled; the last time {last}"

    def now(self) -> str:
        return f"{self.clock.now():.6f}"


class _Request(NamedTuple):
    """A read that waits for its reply."""

    answer: "asyncio.Future[list[Any] | None]"
    absorb: Callable[[Any], None]
    until: float  # loop time after which silence means that there will be no reply


_Arrival = tuple[bytes, bytes, int]  # id, body, redeliveries


class RedisConsumer:
    """One subscription to a queue of a RedisStreamsBroker."""

    def __init__(
        self, server: Server, terms: Terms, queue: str, name: str, prefetch: int, connection: Connection
    ) -> None:
        self._server = server
        self._terms = terms
        self._queue = queue
        self._name = name
        self._prefetch = Prefetch(prefetch)
        self._connection = connection
        self._period = min(LONGEST_WAIT, terms.lease / 2)
        self._next_upkeep = 0.0
        self._has_read = True  # since the last upkeep, there was a read
        self._cursor = ALL_SEEN  # position in the search for ended leases
        self._request: _Request | None = None  # a cancelled take leaves it to the next take
        self._arrived: deque[_Arrival] = deque()
        self._out: dict[int | str, bytes] = {}  # token -> id
        self._tokens = 0
        self._changed = asyncio.Event()  # a message was settled, or the consumer ended
        self._dead: str | None = None
        self.is_closed = False
        self.is_forgotten = False  # the server holds no messages for it any more
        self._show_life()

    @property
    def room(self) -> int:
        return self._prefetch.fitting - len(self._out) - len(self._arrived)

    @property
    def is_over(self) -> bool:
        return self.is_closed or self._dead is not None

    async def take(self, limit: int) -> Sequence[Delivery]:
        if limit < 1:
            raise BrokerError(f"limit: must be at least 1, got {limit}")
        while not self.is_closed:
            if self._dead is not None:
                raise BrokerUnavailable(self._dead)
            if self._arrived:
                return self._hand_out(limit)
            if self._request is None and self.room <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            if self._request is None:
                self._request = self._ask(min(limit, self.room))
            await self._settle_request(self._request)
        return []

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        settled = {each.token: self._out.pop(each.token) for each in deliveries if each.token in self._out}
        self._changed.set()
        await self._for_own(ACK, settled)

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        await self._move(delivery, delay, self._terms.limit_of(self._queue), reason)

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        hint = "" if delivery.body else "; the JSON must be in the field `body`"  # a plain client may use another field
        await self._move(delivery, 0.0, 1, reason + hint)

    async def dead_letter_all(self, letters: Sequence[tuple[Delivery, str]]) -> None:
        """Move several messages to the dead letters. Raises once the outcome of each is known."""
        moves = [self.dead_letter(delivery, reason) for delivery, reason in letters]
        for error in filter(None, await asyncio.gather(*moves, return_exceptions=True)):
            raise error

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        held = {each.token: self._out[each.token] for each in deliveries if each.token in self._out}
        await self._for_own(EXTEND, held)

    async def close(self) -> None:
        """End the subscription. If the server does not answer in time, the messages come again after their lease."""
        if self.is_closed:
            return
        self.is_closed = True
        self._out.clear()
        self._arrived.clear()
        self._changed.set()
        await self._connection.close()  # a read that the server still serves would take messages that nobody sees
        with suppress(BrokerError, TimeoutError):  # the next consumer of this broker gives back what it held
            async with asyncio.timeout(self._server.connect_timeout):
                await self.give_back("its consumer closed")

    async def give_back(self, last: str = "its consumer was lost") -> None:
        """Make the messages of this consumer, which is over, deliverable again."""
        await self._server.ask("PING")  # by its reply, the server has ended the read of a connection that was closed
        terms = self._terms
        arguments = (self._name, terms.limit_of(self._queue), terms.too_often(last), terms.now())
        try:
            while await self._server.run(RELEASE, keys(self._queue), *arguments):
                pass
        except BrokerUnavailable as error:
            if not isinstance(error, GroupGone):
                raise
        except BrokerError:
            pass  # the key is no queue any more, so nothing is held
        self.is_forgotten = True

    def lose(self, why: str) -> None:
        """Give up this consumer. The next consumer of this broker gives back what it held."""
        if self.is_closed or self._dead is not None:
            return
        self._dead = why
        self._server.unavailable(why)
        self._connection.abort(why)
        self._changed.set()

    def _show_life(self) -> None:
        """Send a PING now and then while nothing is read, so that neither the server nor a proxy closes the connection.

        Without the connection, messages in work would be delivered again.
        """
        if self.is_over:
            return
        if not self._connection.awaits_answer:
            self._connection.send([("PING",)])
        asyncio.get_running_loop().call_later(LONGEST_WAIT, self._show_life)

    # -- taking ---------------------------------------------------------------------------------------------------

    def _ask(self, count: int) -> _Request:
        """Send the next command. After each upkeep comes a read, however soon the next upkeep is due on a slow line."""
        now = asyncio.get_running_loop().time()
        if self._has_read and now >= self._next_upkeep:
            self._has_read, self._next_upkeep = False, inf
            terms, lease = self._terms, int(self._terms.lease * 1000)
            late = terms.too_often(f"its lease of {terms.lease:g} s ran out")
            some = (self._name, lease, self._cursor, min(count, PAGE), terms.limit_of(self._queue), late)
            command = ("EVALSHA", UPKEEP.sha, 3, *keys(self._queue), *some, terms.now())
            return self._send(command, self._absorb_upkeep, now)
        self._has_read = True
        block = int((self._next_upkeep - now) * 1000)
        wait = ("BLOCK", block) if block > 0 else ()  # 0 would wait forever
        read = ("XREADGROUP", "GROUP", self._queue, self._name, "COUNT", count, *wait)
        return self._send((*read, "STREAMS", self._queue, ">"), self._absorb_read, now)

    def _send(self, command: Command, absorb: Callable[[Any], None], now: float) -> _Request:
        until = now + self._period + self._server.answer_timeout
        return _Request(self._connection.send([command]), absorb, until)

    async def _settle_request(self, request: _Request) -> None:
        """Absorb the reply of a request once. If two takes wait, the other one finds what arrived."""
        patience = self._server.answer_timeout
        is_answered = await self._connection.answered(request.answer, request.until, patience)
        if self._request is not request or self.is_closed:
            return
        if not is_answered:
            self.lose(f"no answer from {self._server.place} in {patience:g} s")
            return
        self._request = None
        soon = asyncio.get_running_loop().time() + self._period  # from now, however long the reply took
        self._next_upkeep = min(self._next_upkeep, soon)
        replies = request.answer.result()
        if replies is None:
            self.lose(self._connection.trouble or f"the connection to {self._server.place} was lost")
        elif isinstance(replies[0], ReplyError):
            await self._mend(replies[0])
        else:
            self._server.note_success()
            request.absorb(replies[0])

    def _absorb_read(self, reply: Any) -> None:
        for _, entries in reply or ():
            for entry, fields in entries:
                self._arrive((entry, *content(fields)))

    def _arrive(self, arrival: _Arrival) -> None:
        self._arrived.append(arrival)
        self._prefetch.note(len(arrival[1]))

    def _absorb_upkeep(self, reply: Any) -> None:
        self._cursor, next_due, claimed = reply
        if next_due >= 0:
            due_at = asyncio.get_running_loop().time() + next_due / 1000
            self._next_upkeep = min(self._next_upkeep, due_at)
        if not claimed:
            return
        if self._cursor != ALL_SEEN:  # there may be more of them
            self._next_upkeep = 0.0
        again = {entry[0] for entry in claimed}
        for token in [token for token, entry in self._out.items() if entry in again]:
            del self._out[token]  # its lease ended here, and this is a new delivery
        for entry, redeliveries, fields in claimed:
            self._arrive((entry, content(fields)[0], redeliveries))

    async def _mend(self, reply: ReplyError) -> None:
        """Create a lost group again, or send a lost script again. Any other error ends the consumer."""
        code = error_code(reply)
        try:
            if code == "NOSCRIPT":
                await self._server.ask("SCRIPT", "LOAD", UPKEEP.text)
                self._next_upkeep = 0.0
            elif code in ("NOGROUP", "UNBLOCKED"):
                await self._restore_group(is_gone=code == "NOGROUP")
            else:
                raise self._server.error_of(reply)
        except BrokerError as error:
            self.lose(str(error))
            raise

    async def _restore_group(self, *, is_gone: bool) -> None:
        if is_gone:
            self._out.clear()  # all that is left is delivered again
            self._server.known.clear()  # other groups may be gone, too
        await self._server.make_group(self._queue)

    def _hand_out(self, limit: int) -> list[Delivery]:
        first = self._tokens + 1
        taken = [self._arrived.popleft() for _ in range(min(limit, len(self._arrived)))]
        self._tokens += len(taken)
        queue = self._queue
        self._out.update([(token, arrival[0]) for token, arrival in enumerate(taken, first)])
        return [Delivery(queue, body, token, count) for token, (_, body, count) in enumerate(taken, first)]

    # -- settling -------------------------------------------------------------------------------------------------

    async def _for_own(self, script: Script, held: dict[int | str, bytes]) -> None:
        """Run a script for the messages that this consumer still holds by the server's account."""
        if not held:
            return
        first, last = min(held.values(), key=order), max(held.values(), key=order)
        for some in pages(list(held.values()), SETTLED_TOGETHER):
            with suppress(GroupGone):  # then it holds none
                await self._server.run(script, [self._queue], self._name, first, last, MOST_HELD, *some)

    async def _move(self, delivery: Delivery, delay: float, limit: int, reason: str) -> None:
        found = self._out.pop(delivery.token, None)
        self._changed.set()
        if found is None:
            return
        arguments = (self._name, found, max(0, round(delay * 1000)), limit, text(reason), self._terms.now())
        with suppress(GroupGone):
            await self._server.run(RETRY, keys(self._queue), *arguments)
        if delay > 0:
            self._next_upkeep = min(self._next_upkeep, asyncio.get_running_loop().time() + delay)
