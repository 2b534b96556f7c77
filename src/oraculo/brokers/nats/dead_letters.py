"""The dead letters of NATS: a stream beside each queue, looked at and moved by the numbers of its messages."""

import base64
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

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
from oraculo.brokers.nats.outgoing import Refusals
from oraculo.brokers.nats.replies import ApiError, Request
from oraculo.core.chunks import pages
from oraculo.ports.broker_admin import DeadLetter, NotAnId
from oraculo.wire.naming import dlq_name, source_name

PAGE = 128  # letters that are looked at together
PAGE_BYTES = 16 * 1024 * 1024  # and how large they may be; a server cuts off whoever leaves 64 MB unread
_NOTHING_TO_DELETE = frozenset(
    {10043, 10057}
)  # JetStream says the one for a number in use before, the other for one beyond
_LONGEST_ID = 19  # digits; a stream's sequence has no more

Calling = Callable[[], AbstractAsyncContextManager[Connection]]  # a connection for one call
Send = Callable[[Connection, Sequence[Request], Refusals], Awaitable[None]]
_Work = Callable[[Connection, str, Sequence[DeadLetter]], Awaitable[int]]  # returns to how many it was done


class _Extent(NamedTuple):
    last: int  # the last sequence that was given in the quarantine; 0 where there is none
    page: int  # letters that can be looked at together


class DeadLetters:
    """`patience`: seconds that a quarantine has to tell of itself; one without a leader never does."""

    def __init__(self, calling: Calling, send: Send, patience: float) -> None:
        self._patience = patience
        self._calling = calling
        self._send = send

    async def peek(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        if after is not None and not _sequence(after):
            raise NotAnId(after)
        found = DeadLetterPage(limit)
        position = _sequence(after or "0")
        async with self._calling() as connection:
            last, most = await self._extent(connection, queue)
        while not found.is_full and position < last:
            async with self._calling() as connection:  # each page has its own time: a link may be slow
                page = await self._page(connection, queue, position, last, min(most, limit - len(found.letters)))
            if not page:
                break
            found.fill(page)
            position = int(page[-1].id)
        return found.letters

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        async def show(_connection: Connection, _queue: str, letters: Sequence[DeadLetter]) -> int:
            for letter in letters:
                see(letter)
            return len(letters)

        await self._do(queue, None if ids is None else sorted(_sequences(ids)), show)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        """Page by page. When it fails, those that were moved are moved, and the others are where they were."""
        return await self._do(queue, None if ids is None else _sequences(ids), self._move_back)

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        return await self._do(queue, _sequences(ids), self._delete_letters)

    async def _do(self, queue: str, sequences: Sequence[int] | None, work: _Work) -> int:
        """To all, or to those that are named."""
        if name_fault(queue):
            return 0
        return await (self._to_all(queue, work) if sequences is None else self._to_some(queue, sequences, work))

    async def _to_all(self, queue: str, work: _Work) -> int:
        """All that are there now; not what dies again meanwhile."""
        async with self._calling() as connection:
            last, most = await self._extent(connection, queue)
        done = position = 0
        while position < last:
            async with self._calling() as connection:
                page = await self._page(connection, queue, position, last, most)
                if not page:
                    break
                done += await work(connection, queue, page)
                position = int(page[-1].id)
        return done

    async def _to_some(self, queue: str, sequences: Sequence[int], work: _Work) -> int:
        """Does it to those of them that are there, a page at a time. To the others not even a deletion: there a cluster
        of servers before 2.11.11 would give no answer at all."""
        async with self._calling() as connection:
            _, most = await self._extent(connection, queue)
        done = 0
        for some in pages(sequences, most):
            wanted = [{"seq": sequence} for sequence in some]
            async with self._calling() as connection:
                done += await work(connection, queue, await self._read(connection, queue, wanted))
        return done

    async def _delete_letters(self, connection: Connection, queue: str, letters: Sequence[DeadLetter]) -> int:
        return await self._delete(connection, queue, [int(letter.id) for letter in letters])

    async def _move_back(self, connection: Connection, queue: str, letters: Sequence[DeadLetter]) -> int:
        target, stream = source_name(queue), stream_of(dlq_name(queue))
        refusals = Refusals()
        requests = []
        for letter in letters:
            room = connection.max_payload - len(letter.body)
            requests.append(Request(target, letter.body, id_headers(f"{stream}:{letter.id}:{letter.at}", room)))
        await self._send(connection, requests, refusals)
        pairs = zip(letters, requests, strict=True)
        taken = [int(letter.id) for letter, request in pairs if not refusals.is_for(request)]
        deleted = await self._delete(connection, queue, taken)
        refusals.raise_any()
        return deleted

    async def _delete(self, connection: Connection, queue: str, sequences: Sequence[int]) -> int:
        verb = f"STREAM.MSG.DELETE.{stream_of(dlq_name(queue))}"
        answers = await connection.ask_many((verb, {"seq": sequence, "no_erase": True}) for sequence in sequences)
        for answer in answers:
            if isinstance(answer, ApiError) and not (answer.is_missing or answer.err_code in _NOTHING_TO_DELETE):
                raise connection.refusal(answer, f"to delete dead letters of {queue}")
        return sum(not isinstance(answer, ApiError) for answer in answers)

    async def _extent(self, connection: Connection, queue: str) -> _Extent:
        if name_fault(queue):
            return _Extent(0, PAGE)
        quarantine = dlq_name(queue)
        (told,) = await connection.ask_many([(f"STREAM.INFO.{stream_of(quarantine)}", None)], self._patience)
        if not isinstance(told, ApiError):
            state = told["state"]
            most = PAGE if state["bytes"] <= PAGE_BYTES else min(PAGE, PAGE_BYTES // connection.max_payload)
            return _Extent(int(state["last_seq"]) if state["messages"] else 0, max(1, most))
        if told.is_missing:
            return _Extent(0, PAGE)
        raise connection.refusal(told, f"to tell of {quarantine}")

    async def _page(
        self, connection: Connection, queue: str, after: int, last: int, limit: int
    ) -> Sequence[DeadLetter]:
        """Some of those behind `after` and not behind `last`; none only where there are none. JetStream finds the first
        one; the numbers that follow it are tried all at once."""
        first = await self._read(connection, queue, [{"seq": after + 1, "next_by_subj": dlq_name(queue)}])
        if not first or int(first[0].id) > last:
            return []
        start = int(first[0].id) + 1
        numbers = range(start, min(start + limit - 1, last + 1))
        return [*first, *await self._read(connection, queue, [{"seq": number} for number in numbers])]

    async def _read(self, connection: Connection, queue: str, wanted: Sequence[dict[str, Any]]) -> list[DeadLetter]:
        """Those of the wanted messages that are there."""
        verb = f"STREAM.MSG.GET.{stream_of(dlq_name(queue))}"
        answers = await connection.ask_many((verb, each) for each in wanted)
        for answer in answers:
            if isinstance(answer, ApiError) and not answer.is_missing:
                raise connection.refusal(answer, f"to read dead letters of {queue}")
        source = source_name(queue)
        return [_letter_of(source, answer["message"]) for answer in answers if not isinstance(answer, ApiError)]


def _letter_of(source: str, stored: dict[str, Any]) -> DeadLetter:
    headers = parse_headers(base64.b64decode(stored.get("hdrs", "")))
    body = base64.b64decode(stored.get("data", ""))
    sequence, at = str(stored["seq"]), seconds_of(stored["time"])
    return DeadLetter(sequence, source, body, reason_in(headers), at, redeliveries_in(headers))


def _sequence(letter_id: str) -> int:
    """The number behind the id of a dead letter; 0, which no letter has, for what cannot be one."""
    is_number = letter_id.isascii() and letter_id.isdecimal() and len(letter_id) <= _LONGEST_ID
    return int(letter_id) if is_number else 0


def _sequences(ids: Iterable[str]) -> list[int]:
    return list(dict.fromkeys(filter(None, map(_sequence, ids))))
