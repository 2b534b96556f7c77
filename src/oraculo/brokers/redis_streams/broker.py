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
from oraculo.brokers.apart import published_apart_if_refused
from oraculo.brokers.dead_letter_page import DeadLetterPage
from oraculo.brokers.redis_streams.consumer import SETTLED_TOGETHER, Holder, Orphans, RedisConsumer, Terms
from oraculo.brokers.redis_streams.layout import (
    as_far_as_shown,
    is_id,
    is_text,
    keys,
    known_ids,
    letter,
    order,
    table,
    text,
)
from oraculo.brokers.redis_streams.room import LOOKS, Room, eviction_of, evicts, room_of, size_of
from oraculo.brokers.redis_streams.scripts import LAST_ID, LETTERS, PAGE, REDRIVE, TIDY, UPKEEP
from oraculo.brokers.redis_streams.server import (
    ERRORS,
    Server,
    group_command,
    group_of,
    is_aborted,
    is_about_key,
    is_busy,
    is_out_of_memory,
)
from oraculo.brokers.redis_streams.trimming import Trimmer, trim_command
from oraculo.clients.redis import Command, ReplyError, connect, database_of, error_code, read_info, version_of
from oraculo.core.chunks import pages
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge, QueueDown
from oraculo.ports.broker import BrokerStatus, Capabilities, Outgoing, Receipt
from oraculo.ports.broker_admin import DEAD_LETTER_BODY_BYTES, DeadLetter, FullBroker, NotAnId, QueueState
from oraculo.ports.clock import Clock, SystemClock
from oraculo.wire.naming import LONGEST_REASON, dlq_name, is_dlq, source_name

PORT = 6379
OLDEST = (6, 2)
HEARD_WITHIN = 10.0  # seconds of silence after which a consumer that holds nothing is not counted
FORGOTTEN_AFTER = 10  # leases of silence after which an idle consumer's name is deleted
COUNTED_TOGETHER = 200  # queues in one call
SCANNED_TOGETHER = 1_000
MOST_NAMED = 3  # queues named in one error
LOOKED_AT_TOGETHER = 200  # dead letters in one call
READ_TOGETHER = 2 * 1024 * 1024  # bytes of dead letters for one script, which blocks the server
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
        self._orphans = Orphans(self._server, self._terms)
        self._trimmer = Trimmer(self._server.place)
        self._room = Room()
        self._consumers: set[RedisConsumer] = set()
        self._may_transact = True  # until the server refuses
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
            return await self._send_in_parts(messages, waiting)
        return await published_apart_if_refused(self._send, messages)

    async def _send(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        server = self._server
        added = [self._addition(message) for message in messages]
        names = {str(command[1]): None for command in added}
        new = [name for name in names if name not in server.known]
        looks = self._room.looks_due(messages, asyncio.get_running_loop().time())
        replies = await self._add(looks, [group_command(name) for name in new], added)
        if None in replies:
            replies[len(new) :] = await self._add_to_deleted(added, replies[len(new) :])
        self._room.note_sent(messages)
        if ReplyError in set(map(type, replies)):
            self._raise_if_too_large(messages[-1], replies[-1])
            if (full := next(filter(is_out_of_memory, replies), None)) is not None:
                return await self._send_what_fits(messages, replies[len(new) :], full)
            self._raise_worst(replies)
            if refused := await self._refused([str(command[1]) for command in added], replies[len(new) :]):
                return refused
        server.know(new)
        self._trimmer.note_sent(names)
        proved = 0 if server.trouble is None else self._room.proved_by(messages)
        server.note_written(proved)
        return [self._taken] * len(messages)

    async def consume(self, queue: str, *, prefetch: int) -> RedisConsumer:
        if prefetch < 1:
            raise BrokerError(f"prefetch: must be at least 1, got {prefetch}")
        server, terms = self._server, self._terms_of(queue)
        server.require_open()
        self._consumers = {consumer for consumer in self._consumers if not consumer.is_over}
        await self._orphans.give_back_all()
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
        page, source = DeadLetterPage(limit), source_name(queue)
        while not page.is_full and (found := await self._beginnings(queue, after, limit - len(page.letters))):
            page.fill(as_far_as_shown(letter(source, entry, fields), size) for entry, fields, size in found)
            after = found[-1][0].decode()
        return page.letters

    async def _beginnings(self, queue: str, after: str | None, limit: int) -> list[Any]:
        if after == LAST_ID:
            return []
        start = "-" if after is None else f"({after}"
        bounds = (limit, READ_TOGETHER, DEAD_LETTER_BODY_BYTES, 4 * LONGEST_REASON)
        found: list[Any] = await self._server.run(LETTERS, [dlq_name(queue)], start, *bounds)
        return found

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        dlq, source, after = dlq_name(queue), source_name(queue), None
        for some in pages(sorted(known_ids(ids or ()), key=order), LOOKED_AT_TOGETHER):
            for found in await self._server.call([("XRANGE", dlq, one, one) for one in some]):
                for entry, fields in self._server.checked(found):
                    see(letter(source, entry, fields))
        while ids is None and (page := await self._entries(dlq, after)):
            for entry, fields in page:
                see(letter(source, entry, fields))
            after = page[-1][0].decode()

    async def _entries(self, dlq: str, after: str | None) -> list[Any]:
        if after == LAST_ID:
            return []
        start = "-" if after is None else f"({after}"
        entries: list[Any] = await self._server.ask("XRANGE", dlq, start, "+", "COUNT", LOOKED_AT_TOGETHER)
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
        pong, info = await self._server.call([("PING",), ("INFO",)])
        self._server.checked(pong)
        about = read_info(info)
        trouble = _reason_not_to_write(about)
        if trouble:
            raise self._server.refuses(f"{self._server.place} {trouble}")
        await self._server.require_writing(room_of(about)[0])
        return f"{version_of(about)} at {self._server.place}{_warnings(about)}"

    async def close(self) -> None:
        while self._consumers:  # another may be opened meanwhile
            consumers, self._consumers = self._consumers, set()
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
        """Return the places of the messages that would use the room kept for answers."""
        if not self._room.is_close(messages):
            return set()
        names = [_place_of(message) for message in messages]
        return self._room.without_room(messages, names, await self._look_for_room(set(names)))

    async def _look_for_room(self, names: Collection[str]) -> Mapping[str, int]:
        """Return the number of messages in each queue.

        Streams that are due are trimmed first: acked messages may be all that fills the server.
        """
        trimmed = self._trimmer.due()
        replies = await self._server.call([*map(trim_command, trimmed), *LOOKS, *(("XLEN", name) for name in names)])
        self._trimmer.absorb(trimmed, replies[: len(trimmed)])
        seen = len(trimmed) + len(LOOKS)
        self._room.absorb(replies[len(trimmed) : seen])
        lengths = zip(names, replies[seen:], strict=True)
        return {name: length for name, length in lengths if isinstance(length, int)}

    async def _send_in_parts(self, messages: Sequence[Outgoing], waiting: set[int]) -> Sequence[Receipt]:
        """Send as many messages at a time as the last look found room for, and refuse the rest."""
        receipts: dict[int, Receipt] = {}
        left = list(range(len(messages)))
        all_taken = True
        while all_taken and (part := [place for place in left if place not in waiting]):
            left = [place for place in left if place in waiting]
            try:
                sent = await published_apart_if_refused(self._send, [messages[place] for place in part])
                still = await self._without_room([messages[place] for place in left])
                waiting = {left[number] for number in still}
            except BrokerUnavailable as error:
                if not receipts:
                    raise
                sent = [Receipt(error=error)] * len(part)  # earlier parts were taken and must not be sent again
            receipts.update(zip(part, sent, strict=True))
            all_taken = not any(receipt.error for receipt in sent)
        if left:
            rest = self._server.keeps_the_rest(self._room.due_for(messages[place] for place in left))
            if not receipts and self._room.is_none:
                raise rest
            receipts.update(dict.fromkeys(left, Receipt(error=rest)))
        return [receipts[place] for place in range(len(messages))]

    async def _send_what_fits(
        self, messages: Sequence[Outgoing], outcomes: Sequence[Any], full: ReplyError
    ) -> Sequence[Receipt]:
        """Send one by one, smallest first, messages that the server refused together because it was full.

        The server counts the call itself as memory, so that single messages may fit.
        """
        is_answered = len(outcomes) == len(messages)  # otherwise a transaction was undone
        receipts: dict[int, Receipt] = {
            place: self._taken
            for place, outcome in enumerate(outcomes[: len(messages)])
            if is_answered and not isinstance(outcome, ReplyError)
        }
        self._room.note_full()
        self._trimmer.note_sent(_place_of(messages[place]) for place in receipts)
        left = [place for place in range(len(messages)) if place not in receipts] if len(messages) > 1 else []
        may_fit = [place for place in left if not (messages[place].leaves_room and self._room.is_known)]
        away: BrokerError | None = None
        for place in sorted(may_fit, key=lambda place: size_of(messages[place])):
            try:
                [receipts[place]] = await self._send([messages[place]])
            except BrokerUnavailable as error:
                away = error
                break  # the rest is larger
            except BrokerError as error:
                receipts[place] = Receipt(error=error)
        rest = [place for place in range(len(messages)) if place not in receipts]
        if rest and away is None:
            away = self._server.no_room(full, self._room.due_for(messages[place] for place in rest))
        if away is not None and not any(receipt.error is None for receipt in receipts.values()):
            raise away
        not_taken = Receipt(error=away)
        return [receipts.get(place, not_taken) for place in range(len(messages))]

    async def _add(self, looks: list[Command], groups: list[Command], added: list[Command]) -> list[Any]:
        """Add the messages and return the outcome of each.

        If an error about one key ends the transaction, each message is added alone.
        """
        call, together, trimmed = self._server.call, self._together(added), self._trimmer.due()
        before = [*map(trim_command, trimmed), *looks]
        replies = await call([*before, *groups, *together], repeatable=False)
        self._trimmer.absorb(trimmed, replies[: len(trimmed)])
        if looks:
            self._room.absorb(replies[len(trimmed) : len(before)])
        replies = self._outcomes(replies[len(before) :], len(groups), len(added))
        *others, ended = replies
        if is_aborted(ended) and any(map(is_about_key, others)) and not _concerning_all(others):
            return await call([*groups, *added], repeatable=False)
        return replies

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

    def _together(self, added: list[Command]) -> list[Command]:
        """Add in one step where a queue gets several messages, so that a waiting consumer gets them together.

        Otherwise it would get the first alone, and an engine would commit before it sees the others.
        """
        is_worth_it = len({command[1] for command in added}) < len(added) <= ADDED_TOGETHER
        return [("MULTI",), *added, ("EXEC",)] if is_worth_it and self._may_transact else added

    def _outcomes(self, replies: list[Any], before: int, added: int) -> list[Any]:
        """Return the outcome of each message. Raises when the error concerns all of them."""
        if len(replies) == before + added:
            return replies
        begun, *queued, ended = replies[before:]
        is_queued, has_errors = b"QUEUED" in queued, ReplyError in map(type, queued)
        if isinstance(begun, ReplyError) and not is_queued:  # each was added alone
            self._may_transact = has_errors  # otherwise MULTI itself is not allowed
            return [*replies[:before], *queued]
        if isinstance(ended, list) and len(ended) == added:
            return [*replies[:before], *ended]
        if is_aborted(ended):
            self._may_transact = error_code(ended) != "NOPERM"
            return [*replies[:before], *queued, ended]
        self._may_transact = False  # a transaction may still be open
        raise self._server.distrusted(f"{self._server.place} does not do transactions as it should: {ended!r}")

    def _raise_if_too_large(self, last: Outgoing, reply: Any) -> None:
        """Raise MessageTooLarge when the server stopped reading in the middle of a call: it never answers the rest."""
        if isinstance(reply, ReplyError) and "invalid bulk length" in str(reply):
            size = len(last.body)
            replies = (
                f"a message of {size} bytes for {last.queue} is over the proto-max-bulk-len of {self._server.place}"
            )
            raise MessageTooLarge(replies, size, LEAST_BULK)  # how much it is is not replies

    def _raise_worst(self, replies: Sequence[Any]) -> None:
        """Raise the first error. An error worth a retry comes first, because then all messages are tried again."""
        errors = [self._server.error_of(reply) for reply in _concerning_all(replies)]
        for error in sorted(errors, key=lambda error: not isinstance(error, BrokerUnavailable)):
            raise error

    async def _refused(self, names: Sequence[str], outcomes: Sequence[Any]) -> Sequence[Receipt]:
        """Return the receipts of a call in which queues were refused. Raises BrokerError when all were."""
        faults = {name: each for name, each in zip(names, outcomes, strict=True) if isinstance(each, ReplyError)}
        if not faults:
            return []
        left = sum(isinstance(outcome, ReplyError) for outcome in outcomes)
        reason = f"{self._server.place} refused {left} of {len(outcomes)} messages: {await self._reasons(faults)}"
        if left == len(outcomes):
            raise BrokerError(reason)
        refused = Receipt(error=QueueDown(reason))
        return [refused if isinstance(outcome, ReplyError) else self._taken for outcome in outcomes]

    async def _reasons(self, faults: Mapping[str, ReplyError]) -> str:
        kinds: list[Any] = []
        named = list(islice(faults, MOST_NAMED))
        with suppress(BrokerUnavailable):  # the error is raised with or without this
            kinds = await self._server.call([("TYPE", name) for name in named])
        found = dict(zip(named, kinds, strict=False))
        more = f"; and {len(faults) - len(named)} more" if len(faults) > len(named) else ""
        return "; ".join(_fault(name, faults[name], found.get(name)) for name in named) + more

    # -- consuming ------------------------------------------------------------------------------------------------

    async def _open_consumer(self, queue: str, name: str, prefetch: int) -> RedisConsumer:
        server = self._server
        try:
            connection = await connect(server.address, server.connect_timeout, ERRORS)
        except BrokerError as error:
            raise server.unavailable(str(error)) from error
        try:
            async with asyncio.timeout(server.answer_timeout):
                client, info, _, made = await connection.call(
                    [
                        ("CLIENT", "ID"),
                        ("INFO", "server"),
                        ("CLIENT", "SETNAME", name),
                        ("XGROUP", "CREATECONSUMER", queue, queue, name),
                    ]
                )
            if isinstance(made, ReplyError) and error_code(made) != "OOM":  # the first read creates it too
                raise server.error_of(made)
            server.require_open()
        except BaseException as error:
            await connection.close()
            if isinstance(error, TimeoutError):
                raise server.unavailable(f"no answer from {server.place} in {server.answer_timeout:g} s") from None
            raise
        run_id = read_info(info).get(b"run_id")
        holder = Holder(queue, name, client if isinstance(client, int) else None, run_id)
        consumer = RedisConsumer(server, self._terms_of(queue), self._orphans, holder, prefetch, connection)
        connection.on_loss(consumer.lose)
        self._consumers.add(consumer)
        return consumer

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
        if isinstance(consumers, ReplyError):
            return 0
        return sum(self._is_alive(table(consumer)) for consumer in consumers)

    def _is_alive(self, consumer: dict[bytes, Any]) -> bool:
        """Return True for a consumer heard of lately: waiting consumers always are, others when they take or extend."""
        silence = self._terms.lease if consumer[b"pending"] else HEARD_WITHIN
        return bool(consumer[b"idle"] < silence * 1000)


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


def _place_of(message: Outgoing) -> str:
    return message.queue if message.reason is None else dlq_name(message.queue)


def _reason_not_to_write(about: dict[bytes, bytes]) -> str | None:
    used, most = int(about.get(b"used_memory", b"0")), int(about.get(b"maxmemory", b"0"))
    if about.get(b"loading") == b"1":
        return "is still loading its data"
    if about.get(b"role") == b"slave" and about.get(b"slave_read_only") == b"1":
        return "is a replica, and read-only"
    if 0 < most <= used and not evicts(about):
        return f"has reached its maxmemory: {used} of {most} bytes"
    if about.get(b"min_slaves_good_slaves") == b"0":  # present only where min-replicas-to-write is set
        return "refuses to write, because no replica keeps up and min-replicas-to-write asks for some"
    return None


def _warnings(about: dict[bytes, bytes]) -> str:
    """Return the warnings for `check`: an old version, and settings with which messages can be lost."""
    warnings = []
    if not about:
        warnings.append(
            "its user may not ask INFO, so that each start of an engine sends all open commands again: grant +info"
        )
    if about.get(b"aof_enabled") == b"0":
        warnings.append("it keeps no append-only file: a restart may lose messages")
    if eviction := eviction_of(about):
        warnings.append(eviction)
    age = warning_of_age(about.get(b"redis_version", b"").decode(), OLDEST)
    return age + "".join(f"; {each}" for each in warnings)


def _concerning_all(replies: Sequence[Any]) -> list[ReplyError]:
    """Return the errors that are not about one key alone."""
    errors = [reply for reply in replies if isinstance(reply, ReplyError)]
    return [error for error in errors if not is_busy(error) and not is_about_key(error)]


def _fault(name: str, reply: ReplyError, kind: bytes | ReplyError | None) -> str:
    if error_code(reply) != "WRONGTYPE":
        return f"{name} is not permitted to this user ({reply})"
    what = f"a {kind.decode()}" if isinstance(kind, bytes) else "something else"
    return f"{name} is {what} and not a stream"
