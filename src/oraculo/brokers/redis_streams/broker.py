"""`redis://` and `rediss://`: Redis Streams, on Redis 6.2 or later and on Valkey.

A stream is a queue, with a consumer group of the same name and the JSON in field `body`. A plain client needs to know
no more. A handled message is acked and deleted in one step, so a stream holds only what is still to be done. Messages
that a plain client acks and does not delete are trimmed at a later publish.

- A delivery is a lease. Any consumer claims a message that was neither settled nor extended in time.
- A retry or a close writes the message anew at the end of the stream, with its number of deliveries. So a waiting
consumer gets it at once. A delayed message waits in the sorted set `<queue>:delayed`, and consumers move it back.
- Settling checks on the server whose delivery it is, so it never touches a message that was redelivered meanwhile.

Commands share one connection, which reconnects by itself. Each consumer waits for messages on a connection of its own.
"""

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import MappingProxyType
from typing import Any

from oraculo.brokers.address import read_address
from oraculo.brokers.age import warning_of_age
from oraculo.brokers.dead_letter_page import DeadLetterPage
from oraculo.brokers.redis_streams.consumer import SETTLED_TOGETHER, RedisConsumer, Terms
from oraculo.brokers.redis_streams.layout import (
    is_id,
    is_text,
    keys,
    known_ids,
    letter,
    order,
    table,
    text,
)
from oraculo.brokers.redis_streams.room import LOOKS, Room, eviction_of
from oraculo.brokers.redis_streams.scripts import PAGE, REDRIVE, TIDY, UPKEEP
from oraculo.brokers.redis_streams.server import (
    ERRORS,
    NoRoom,
    Server,
    group_command,
    group_of,
    is_aborted,
    is_about_key,
    is_busy,
    is_out_of_memory,
)
from oraculo.brokers.redis_streams.trimming import Trimmer, trim_command
from oraculo.clients.redis import Command, ReplyError, connect, database_of, error_code, version_of
from oraculo.core.chunks import pages
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge, QueueDown
from oraculo.ports.broker import BrokerStatus, Capabilities, Outgoing, Receipt
from oraculo.ports.broker_admin import DeadLetter, FullBroker, NotAnId, QueueState
from oraculo.ports.clock import Clock, SystemClock
from oraculo.wire.naming import dlq_name, is_dlq, source_name

PORT = 6379
OLDEST = (6, 2)
HEARD_WITHIN = 10.0  # seconds of silence after which a consumer that holds nothing is not counted
FORGOTTEN_AFTER = 10  # leases of silence after which an idle consumer's name is deleted
COUNTED_TOGETHER = 200  # queues in one call
SCANNED_TOGETHER = 1_000
LOOKED_AT_TOGETHER = 20  # dead letters in one call: they may be large
LEAST_BULK = 1024 * 1024  # bytes: the smallest proto-max-bulk-len that a server accepts
ADDED_TOGETHER = 100  # messages of one step, which blocks the server


class RedisStreamsBroker:
    """The broker behind `redis://` and `rediss://`.

    `delivery_limit` is how often a message is delivered before it becomes a dead letter. `lease` is the number of
    seconds after which an unsettled delivery comes again, and `leases` names queues that have another.
    `connect_timeout` limits connecting, and `publish_timeout` limits the answer to any command.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "redis",
        clock: Clock | None = None,
        delivery_limit: int = 20,
        lease: float = 60.0,
        leases: Mapping[str, float] = MappingProxyType({}),
        connect_timeout: float = 3.0,
        publish_timeout: float = 5.0,
    ) -> None:
        address = read_address(url, port=PORT)
        database_of(address)  # a wrong number raises now, not at the first connection
        self.name = name
        self._terms = Terms(delivery_limit, lease, clock or SystemClock())
        self._leases = leases
        self._server = Server(address, connect_timeout, publish_timeout)
        self._trimmer = Trimmer()
        self._room = Room()
        self._consumers: set[RedisConsumer] = set()
        self._taken = Receipt(self.name)

    @property
    def capabilities(self) -> Capabilities:
        """Return what the server can do. It is durable if it kept an append-only file when it was last asked."""
        return Capabilities(
            durable=self._server.keeps, shared=True, priorities=False, counts_consumers=True, peeks=True
        )

    async def start(self) -> None:
        await self._server.start()

    def statuses(self) -> Sequence[BrokerStatus]:
        return [BrokerStatus(self.name, self._server.trouble)]

    def behind(self) -> Sequence[FullBroker]:
        return [self]

    async def declare(self, queues: Sequence[str]) -> None:
        names = [name for queue in queues for name in (source_name(queue), dlq_name(queue))]
        await self._server.make_groups(list(dict.fromkeys(names)))

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        self._server.require_open()
        if not messages:
            return []
        if waiting := await self._without_room(messages):
            return await self._send_what_has_room(messages, waiting)
        return await self._send(messages)

    async def _send(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        server = self._server
        added = [self._addition(message) for message in messages]
        names = {str(command[1]): None for command in added}
        new = [name for name in names if name not in server.known]
        now, was_short = asyncio.get_running_loop().time(), server.trouble is not None
        looks = self._room.looks_due(messages, now, was_short=was_short)
        replies = await self._add(looks, [group_command(name) for name in new], added)
        made, outcomes = replies[: len(new)], replies[len(new) :]
        if None in outcomes:
            outcomes = await self._add_to_deleted(added, outcomes)
        self._room.note_sent(messages)
        if ReplyError in set(map(type, outcomes)) or not all(reply == b"OK" or is_busy(reply) for reply in made):
            return self._receipts(messages, made, outcomes)
        server.know(new)
        self._trimmer.note_sent(names)
        if server.trouble is not None:
            server.note_written(self._room.proven_by(messages))
        return [self._taken] * len(messages)

    async def consume(self, queue: str, *, prefetch: int) -> RedisConsumer:
        if prefetch < 1:
            raise BrokerError(f"prefetch: must be at least 1, got {prefetch}")
        server, terms = self._server, self._terms_of(queue)
        server.require_open()
        await self._give_back_all()
        await server.make_group(queue)
        name = f"oraculo-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        await server.run(TIDY, [queue], int(terms.lease * 1000 * FORGOTTEN_AFTER))
        await server.ask("SCRIPT", "LOAD", UPKEEP.text)
        return await self._open_consumer(queue, name, prefetch)

    def _terms_of(self, queue: str) -> Terms:
        return self._terms._replace(lease=self._leases.get(queue, self._terms.lease))

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        is_asked_for = names is not None
        wanted = await self._find() if names is None else list(dict.fromkeys(names))
        wanted = [name for name in wanted if not is_dlq(name)]
        states: list[QueueState | None] = []
        for some in pages(wanted, COUNTED_TOGETHER):
            replies = iter(await self._server.call([command for name in some for command in _state_commands(name)]))
            states += [self._state(name, list(islice(replies, _STATE_REPLIES)), is_asked_for) for name in some]
        return [state for state in states if state is not None]

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        if after is not None and not is_id(after):
            raise NotAnId(after)
        page, dlq, source = DeadLetterPage(limit), dlq_name(queue), source_name(queue)
        while not page.is_full and (found := await self._entries(dlq, after, limit - len(page.letters))):
            page.fill(letter(source, entry, fields) for entry, fields in found)
            after = found[-1][0].decode()
        return page.letters

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        dlq, source, after = dlq_name(queue), source_name(queue), None
        for some in pages(sorted(known_ids(ids or ()), key=order), LOOKED_AT_TOGETHER):
            for found in await self._server.call([("XRANGE", dlq, one, one) for one in some]):
                for entry, fields in self._server.checked(found):
                    see(letter(source, entry, fields))
        while ids is None and (page := await self._entries(dlq, after, LOOKED_AT_TOGETHER)):
            for entry, fields in page:
                see(letter(source, entry, fields))
            after = page[-1][0].decode()

    async def _entries(self, dlq: str, after: str | None, limit: int) -> list[Any]:
        start, count = "-" if after is None else f"({after}", min(limit, LOOKED_AT_TOGETHER)
        entries: list[Any] = await self._server.ask("XRANGE", dlq, start, "+", "COUNT", count)
        return entries

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        dlq, moved = dlq_name(queue), 0
        places = [dlq, source_name(queue)]
        if ids is not None:
            for some in pages(known_ids(ids), PAGE):
                moved += await self._server.run(REDRIVE, places, "", *some, repeatable=False)
            return moved
        newest = await self._server.ask("XREVRANGE", dlq, "+", "-", "COUNT", 1)
        while newest:  # a limit, or dead letters that come back meanwhile would be moved forever
            count = await self._server.run(REDRIVE, places, newest[0][0], repeatable=False)
            moved += count
            if count < PAGE:
                break
        return moved

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        dlq, gone = dlq_name(queue), 0
        for some in pages(known_ids(ids), SETTLED_TOGETHER):
            replies = await self._server.call([("XACK", dlq, dlq, *some), ("XDEL", dlq, *some)], repeatable=False)
            gone += [self._server.checked(reply) for reply in replies][1]
        return gone

    async def remove(self, queues: Sequence[str]) -> None:
        for queue in queues:
            source, dlq = source_name(queue), dlq_name(queue)
            await self._server.ask("UNLINK", *dict.fromkeys((*keys(source), *keys(dlq))))
            self._server.forget((source, dlq))

    async def check(self) -> str:
        """Return the server's version and warnings.

        Raises BrokerUnavailable also when the server answers but would not take a message. Raises BrokerError when it
        refuses this user.
        """
        self._server.require_open()
        await self._server.start()
        about = await self._server.require_writing()
        return f"{version_of(about)} at {self._server.place}{_warnings(about)}"

    async def close(self) -> None:
        while consumers := [each for each in self._consumers if not each.is_closed]:  # another may be opened meanwhile
            await asyncio.gather(*(consumer.close() for consumer in consumers))
        await self._server.close()

    # -- publishing -----------------------------------------------------------------------------------------------

    def _addition(self, message: Outgoing) -> Command:
        """Return the command that adds a message.

        Where the group is known, the command adds only to an existing stream: a new one would have no group.
        """
        place = _place_of(message)
        if_there = ("NOMKSTREAM",) if place in self._server.known else ()
        if message.reason is None:
            return ("XADD", place, *if_there, "*", "body", message.body)
        why, at = text(message.reason), self._terms.now()
        return ("XADD", place, *if_there, "*", "body", message.body, "reason", why, "at", at, "redeliveries", 0)

    async def _without_room(self, messages: Sequence[Outgoing]) -> set[int]:
        """Return the places of the messages that would use the room kept for answers.

        Streams that are due are trimmed before the look: acked messages may be all that fills the server.
        """
        if not self._room.is_close(messages):
            return set()
        trimmed = self._trimmer.due()
        replies = await self._server.call([*map(trim_command, trimmed), *LOOKS])
        self._trimmer.absorb(trimmed, replies[: len(trimmed)])
        self._room.absorb(replies[len(trimmed) :])
        return self._room.without_room(messages)

    async def _send_what_has_room(self, messages: Sequence[Outgoing], waiting: set[int]) -> Sequence[Receipt]:
        part = [message for place, message in enumerate(messages) if place not in waiting]
        sent = iter(await self._send(part) if part else ())
        refusal = self._server.keeps_the_rest(self._room.due_for(messages[place] for place in waiting))
        if not part:
            raise refusal
        return [Receipt(error=refusal) if place in waiting else next(sent) for place in range(len(messages))]

    async def _add(self, looks: list[Command], groups: list[Command], added: list[Command]) -> list[Any]:
        """Create the groups, add the messages, and return the replies to each.

        Several messages for one queue are added in one step, so that a waiting consumer gets them together. Otherwise
        it would get the first alone, and an engine would commit before it sees the others.
        """
        is_one_step = len({command[1] for command in added}) < len(added) <= ADDED_TOGETHER
        together = [("MULTI",), *added, ("EXEC",)] if is_one_step else added
        trimmed = self._trimmer.due()
        before = [*map(trim_command, trimmed), *looks]
        replies = await self._server.call([*before, *groups, *together], repeatable=False)
        self._trimmer.absorb(trimmed, replies[: len(trimmed)])
        if looks:
            self._room.absorb(replies[len(trimmed) : len(before)])
        made, outcomes = replies[len(before) : len(before) + len(groups)], replies[len(before) + len(groups) :]
        if not is_one_step:
            return [*made, *outcomes]
        begun, *queued, ended = outcomes
        if isinstance(begun, ReplyError):  # each was added alone
            return [*made, *queued]
        if is_aborted(ended):  # one that was refused undid the step; alone, the others may be taken
            return await self._server.call([*groups, *added], repeatable=False)
        if not isinstance(ended, list):  # the step may still be open
            raise self._server.distrusted(f"{self._server.place} does not do transactions as it should: {ended!r}")
        return [*made, *ended]

    async def _add_to_deleted(self, added: list[Command], outcomes: list[Any]) -> list[Any]:
        """Add again, with their groups, the messages whose queue somebody had deleted: their outcome is None.

        A plain worker reads through the group, and may not be allowed to create one.
        """
        missing = [place for place, outcome in enumerate(outcomes) if outcome is None]
        again = [(*added[place][:2], *added[place][3:]) for place in missing]  # now also where the stream is missing
        names = {str(command[1]): None for command in again}
        self._server.known.difference_update(names)  # so that the next publish checks them
        replies = await self._server.call([*map(group_command, names), *again], repeatable=False)
        found = dict(zip(missing, replies[len(names) :], strict=True))
        return [found.get(place, outcome) for place, outcome in enumerate(outcomes)]

    def _receipts(
        self, messages: Sequence[Outgoing], made: Sequence[Any], outcomes: Sequence[Any]
    ) -> Sequence[Receipt]:
        """Return the receipts of a call with errors. Raises BrokerUnavailable when the server takes nothing now."""
        errors = {
            place: self._error(messages[place], outcome)
            for place, outcome in enumerate(outcomes)
            if isinstance(outcome, ReplyError)
        }
        for reply in made:
            if isinstance(reply, ReplyError) and not (is_busy(reply) or is_about_key(reply) or is_out_of_memory(reply)):
                errors = dict.fromkeys(range(len(messages)), self._server.error_of(reply))
        are_all_refused = len(errors) == len(messages)
        for error in errors.values():
            if type(error) is BrokerUnavailable or (are_all_refused and isinstance(error, NoRoom)):
                raise error
        if are_all_refused:  # nothing shows that a retry may help
            errors = {place: _final(error) for place, error in errors.items()}
        self._trimmer.note_sent(_place_of(message) for place, message in enumerate(messages) if place not in errors)
        return [Receipt(error=errors[place]) if place in errors else self._taken for place in range(len(messages))]

    def _error(self, message: Outgoing, reply: ReplyError) -> BrokerError:
        place, size = self._server.place, len(message.body)
        if "invalid bulk length" in str(reply):  # how large the limit is remains unknown
            why = f"a message of {size} bytes for {message.queue} is over the proto-max-bulk-len of {place}"
            return MessageTooLarge(why, size, LEAST_BULK)
        error = self._server.error_of(reply)
        if isinstance(error, NoRoom):
            self._room.note_full()
        if is_about_key(reply):
            return QueueDown(f"{place} refused a message for {_place_of(message)}: {error}")
        return error

    # -- consuming ------------------------------------------------------------------------------------------------

    async def _open_consumer(self, queue: str, name: str, prefetch: int) -> RedisConsumer:
        server = self._server
        try:
            connection = await connect(server.address, server.connect_timeout, ERRORS)
        except BrokerError as error:
            raise server.unavailable(str(error)) from error
        try:
            async with asyncio.timeout(server.answer_timeout):
                creation = ("XGROUP", "CREATECONSUMER", queue, queue, name)
                _, made = await connection.call([("CLIENT", "SETNAME", name), creation])
            if isinstance(made, ReplyError) and error_code(made) != "OOM":  # the first read creates it too
                raise server.error_of(made)
            server.require_open()
        except BaseException as error:
            await connection.close()
            if isinstance(error, TimeoutError):
                raise server.unavailable(f"no answer from {server.place} in {server.answer_timeout:g} s") from None
            raise
        consumer = RedisConsumer(server, self._terms_of(queue), queue, name, prefetch, connection)
        connection.on_loss(consumer.lose)
        self._consumers.add(consumer)
        return consumer

    async def _give_back_all(self) -> None:
        """Give back the messages of all lost consumers. Where there is no room, they come again after their lease."""
        for consumer in list(self._consumers):
            with suppress(NoRoom):
                if consumer.is_over and not consumer.is_forgotten:
                    await consumer.give_back()
        self._consumers = {consumer for consumer in self._consumers if not consumer.is_forgotten}

    # -- counting -------------------------------------------------------------------------------------------------

    async def _find(self) -> list[str]:
        """Return every queue that was seen before, and every stream that looks like a queue."""
        names, cursor = {source_name(name) for name in self._server.known}, b"0"
        while True:
            cursor, found = await self._server.ask("SCAN", cursor, "TYPE", "stream", "COUNT", SCANNED_TOGETHER)
            names.update(source_name(key.decode()) for key in found if is_text(key))
            if cursor == b"0":
                return sorted(names)

    def _state(self, name: str, replies: list[Any], is_asked_for: bool) -> QueueState | None:
        """Return the counts of a queue, or None when it does not exist.

        A stream that is no queue of ours counts only if it was asked for by name.
        """
        for reply in replies:
            if isinstance(reply, ReplyError) and error_code(reply) not in ("ERR", "NOGROUP"):
                if is_about_key(reply) and not is_asked_for:
                    return None
                raise self._server.error_of(reply)
        there, length, groups, consumers, delayed, dead, dead_groups = replies
        group, dead_group = group_of(name, groups), group_of(dlq_name(name), dead_groups)
        if not there or not (is_asked_for or group or dead_group or name in self._server.known):
            return None
        unacked = group.get(b"pending", 0)
        lag = group.get(b"lag")  # since Redis 7; exact even where messages were acked and not deleted, or trimmed
        ready = max(0, length - unacked) if lag is None else min(length, lag)
        return QueueState(name, ready + delayed, unacked, dead, self._alive(consumers), delayed)

    def _alive(self, consumers: Any) -> int:
        """Count the consumers heard of lately: waiting ones always are, others when they take or extend."""
        if isinstance(consumers, ReplyError):
            return 0
        lease = self._terms.lease
        return sum(
            each[b"idle"] < 1000 * (lease if each[b"pending"] else HEARD_WITHIN) for each in map(table, consumers)
        )


_STATE_REPLIES = 7


def _state_commands(name: str) -> list[Command]:
    _, delayed, dlq = keys(name)
    return [
        ("EXISTS", name, dlq, delayed),
        ("XLEN", name),
        ("XINFO", "GROUPS", name),
        ("XINFO", "CONSUMERS", name, name),
        ("ZCARD", delayed),
        ("XLEN", dlq),
        ("XINFO", "GROUPS", dlq),
    ]


def _final(error: BrokerError) -> BrokerError:
    return BrokerError(str(error)) if isinstance(error, QueueDown) else error


def _place_of(message: Outgoing) -> str:
    return message.queue if message.reason is None else dlq_name(message.queue)


def _warnings(about: dict[bytes, bytes]) -> str:
    """Return the warnings for `check`: an old version, and settings with which messages can be lost."""
    warnings = []
    if not about:
        warnings.append("its user may not ask INFO, so that it reserves no room for answers: grant +info")
    if about.get(b"aof_enabled") == b"0":
        warnings.append("it keeps no append-only file: a restart may lose messages")
    if eviction := eviction_of(about):
        warnings.append(eviction)
    age = warning_of_age(about.get(b"redis_version", b"").decode(), OLDEST)
    return age + "".join(f"; {each}" for each in warnings)
