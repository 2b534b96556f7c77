"""The dead letters of NATS: a stream beside each queue, read and moved by the numbers of its messages."""

import base64
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from oraculo.brokers.dead_letter_page import DeadLetterPage
from oraculo.brokers.nats.connection import Connection
from oraculo.brokers.nats.layout import (
    id_headers,
    name_fault,
    parse_headers,
    reason_in,
    redeliveries_in,
    seconds_of,
    stream_of,
)
from oraculo.brokers.nats.publisher import JetStreamPublisher
from oraculo.brokers.nats.replies import ApiError, Request
from oraculo.core.chunks import pages
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker_admin import DeadLetter, NotAnId
from oraculo.wire.naming import dlq_name, source_name

PAGE = 128  # letters that are read together
PAGE_BYTES = 16 * 1024 * 1024  # of them, at most; a server cuts off a client that leaves 64 MB unread
_NOT_THERE = frozenset({10043, 10057})  # JetStream's answers to a deletion of a past number and of a future one
_LONGEST_ID = 19  # digits; a stream's sequence has no more

Calling = Callable[[], AbstractAsyncContextManager[Connection]]  # a connection for one call


class NatsDeadLetters:
    """The dead letters of all queues. Each page of them has the time of one call, because a line may be slow."""

    def __init__(self, calling: Calling, publisher: JetStreamPublisher) -> None:
        self._calling = calling
        self._publisher = publisher

    async def peek(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        if after is not None and not _sequence(after):
            raise NotAnId(after)
        found = DeadLetterPage(limit)
        async for page in self._pages(queue, None, after=_sequence(after or "0"), most=limit):
            found.fill(page)
            if found.is_full:
                break
        return found.letters

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        async for page in self._pages(queue, ids if ids is None else sorted(ids, key=_sequence)):
            for letter in page:
                see(letter)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        """Move dead letters back page by page. When it fails, the pages before are moved."""
        moved = 0
        async for page in self._pages(queue, ids):
            async with self._calling() as connection:
                moved += await self._move_back(connection, queue, page)
        return moved

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        gone = 0
        async for page in self._pages(queue, ids):
            async with self._calling() as connection:
                gone += await self._delete(connection, queue, page)
        return gone

    async def _move_back(self, connection: Connection, queue: str, letters: Sequence[DeadLetter]) -> int:
        target, stream = source_name(queue), stream_of(dlq_name(queue))
        requests = []
        for letter in letters:
            room = connection.max_payload - len(letter.body)
            requests.append(Request(target, letter.body, id_headers(f"{stream}:{letter.id}:{letter.at}", room)))
        errors = await self._publisher.send(connection, requests)
        taken = [letter for letter, error in zip(letters, errors, strict=True) if error is None]
        moved = await self._delete(connection, queue, taken)
        raise_worst(errors)
        return moved

    async def _delete(self, connection: Connection, queue: str, letters: Sequence[DeadLetter]) -> int:
        verb = f"STREAM.MSG.DELETE.{stream_of(dlq_name(queue))}"
        answers = await connection.ask_many((verb, {"seq": int(letter.id), "no_erase": True}) for letter in letters)
        for answer in answers:
            if isinstance(answer, ApiError) and not (answer.is_missing or answer.err_code in _NOT_THERE):
                raise connection.refusal(answer, f"to delete dead letters of {queue}")
        return sum(not isinstance(answer, ApiError) for answer in answers)

    async def _pages(
        self, queue: str, ids: Collection[str] | None, *, after: int = 0, most: int = PAGE
    ) -> AsyncIterator[Sequence[DeadLetter]]:
        """Yield the named letters, or all that were there at first after number `after`, a page at a time."""
        if name_fault(queue):
            return
        async with self._calling() as connection:
            last, size = await self._extent(connection, queue)
        if ids is not None:
            for some in pages(_sequences(ids), size):
                async with self._calling() as connection:
                    page = await self._read(connection, queue, [{"seq": number} for number in some])
                yield page
            return
        while after < last:
            async with self._calling() as connection:
                page = await self._next_page(connection, queue, after, last, min(size, most))
            if not page:
                return
            yield page
            after = int(page[-1].id)

    async def _extent(self, connection: Connection, queue: str) -> tuple[int, int]:
        """Return the last number of the stream, 0 where nothing is in it, and how many letters to read together."""
        name = dlq_name(queue)
        stream = (await connection.streams([name]))[name]
        if isinstance(stream, ApiError):
            if stream.is_missing:
                return 0, PAGE
            raise connection.refusal(stream, f"to show the stream of {name}")
        state = stream["state"]
        size = PAGE if state["bytes"] <= PAGE_BYTES else min(PAGE, PAGE_BYTES // connection.max_payload)
        return int(state["last_seq"]) if state["messages"] else 0, max(1, size)

    async def _next_page(
        self, connection: Connection, queue: str, after: int, last: int, size: int
    ) -> list[DeadLetter]:
        """Return letters after one number, up to another; none only where there are none.

        JetStream finds the first. The numbers that follow it are tried all at once.
        """
        first = await self._read(connection, queue, [{"seq": after + 1, "next_by_subj": dlq_name(queue)}])
        if not first or int(first[0].id) > last:
            return []
        start = int(first[0].id) + 1
        numbers = range(start, min(start + size - 1, last + 1))
        return [*first, *await self._read(connection, queue, [{"seq": number} for number in numbers])]

    async def _read(self, connection: Connection, queue: str, wanted: Sequence[dict[str, Any]]) -> list[DeadLetter]:
        """Return those of the wanted letters that are there."""
        verb = f"STREAM.MSG.GET.{stream_of(dlq_name(queue))}"
        answers = await connection.ask_many((verb, each) for each in wanted)
        for answer in answers:
            if isinstance(answer, ApiError) and not answer.is_missing:
                raise connection.refusal(answer, f"to read dead letters of {queue}")
        source = source_name(queue)
        return [_letter_of(source, answer["message"]) for answer in answers if not isinstance(answer, ApiError)]


def raise_worst(errors: Iterable[BrokerError | None]) -> None:
    """Raise one of the errors, if there are any; those that no retry will mend come first."""
    found = [error for error in errors if error is not None]
    if found:
        raise min(found, key=lambda error: isinstance(error, BrokerUnavailable))


def _letter_of(source: str, stored: dict[str, Any]) -> DeadLetter:
    headers = parse_headers(base64.b64decode(stored.get("hdrs", "")))
    body = base64.b64decode(stored.get("data", ""))
    sequence, at = str(stored["seq"]), seconds_of(stored["time"])
    return DeadLetter(sequence, source, body, reason_in(headers), at, redeliveries_in(headers))


def _sequence(letter_id: str) -> int:
    """Return the number behind the id of a dead letter; 0, which no letter has, for what cannot be one."""
    is_number = letter_id.isascii() and letter_id.isdecimal() and len(letter_id) <= _LONGEST_ID
    return int(letter_id) if is_number else 0


def _sequences(ids: Iterable[str]) -> list[int]:
    return list(dict.fromkeys(filter(None, map(_sequence, ids))))
