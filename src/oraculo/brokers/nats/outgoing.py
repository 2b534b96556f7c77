"""Messages on their way to JetStream: as requests, in windows, and what was not taken of them."""

import asyncio
from collections.abc import Iterable, Sequence

import structlog

from oraculo.brokers.nats.connection import Connection, Patience
from oraculo.brokers.nats.layout import (
    ID_HEADER,
    as_header,
    id_headers,
    letter_headers,
    name_fault,
)
from oraculo.brokers.nats.replies import UNANSWERED, PubAck, Request, read_confirm
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge
from oraculo.ports.broker import NO_REASON, NotTaken, Outgoing
from oraculo.wire.naming import dlq_name

WINDOW = 1000  # messages that wait for their confirm at a time; JetStream refuses when ten thousand do
WINDOW_BYTES = 4 * 1024 * 1024
_MOST_TOLD = 5  # reasons, of the messages of one call
_KEPT_OUT_PAUSE = 0.02

_log = structlog.get_logger("oraculo.brokers.nats")


class Refusals:
    """What became of the messages of one call that were not confirmed."""

    def __init__(self) -> None:
        self.for_good: dict[str, BrokerError] = {}  # why messages are such that NATS can never take them
        self.never: set[int] = set()  # those of them that were sent, by the id of the request
        self.left: dict[int, str] = {}  # why their queue did not take the others, by the id of the request
        self.down: set[int] = set()  # those of them whose queue does not work at all
        self.forbidden: set[int] = set()  # and those of them whose queue will not, as it is now
        self.unanswered = False  # whether some were asked about and nobody said anything

    @property
    def told(self) -> str:
        return "; ".join(list(dict.fromkeys(self.left.values()))[:_MOST_TOLD])

    def note_left(self, request: Request, why: str) -> None:
        self.left[id(request)] = why

    def note_down(self, request: Request, why: BrokerError) -> None:
        self.note_left(request, str(why))
        self.down.add(id(request))
        if not isinstance(why, BrokerUnavailable):
            self.forbidden.add(id(request))

    def note_never(self, request: Request, told: str, why: BrokerError) -> None:
        self.for_good[told] = why
        self.never.add(id(request))

    def raise_for_good(self) -> None:
        if len(self.for_good) == 1:
            raise next(iter(self.for_good.values()))
        if self.for_good:
            raise BrokerError("; ".join(list(self.for_good)[:_MOST_TOLD]))

    def raise_any(self) -> None:
        self.raise_for_good()
        if self.left:
            raise BrokerError(self.told) if len(self.forbidden) == len(self.left) else NotTaken(self.told)


def request_of(message: Outgoing, most: int, refusals: Refusals) -> Request | None:
    """None when NATS cannot take it."""
    queue, body, room = message.queue, message.body, most - len(message.body)
    if fault := name_fault(queue):
        refusals.for_good[fault] = BrokerError(fault)
        return None
    if room < 0:
        told = f"a message of {len(body)} bytes for {queue} is over the server's max_payload of {most} bytes"
        refusals.for_good[told] = MessageTooLarge(told, len(body), most)
        return None
    if message.reason is not None:
        return Request(dlq_name(queue), body, letter_headers(message.reason or NO_REASON, 0, room))
    headers = id_headers(as_header(message.key), room) if message.key else None
    return Request(queue, body, headers, message.is_reply)


async def confirms_of(connection: Connection, requests: Sequence[Request], patience: Patience) -> Sequence[PubAck]:
    """What only its id keeps out is sent again: an id is to spare a worker a repeat, not to lose it a message."""
    requests, acks = list(requests), await _confirms(connection, requests, patience)
    async with asyncio.timeout(patience.silence + patience.proof):
        while kept_out := _kept_out_by_id(requests, acks):
            await asyncio.sleep(_KEPT_OUT_PAUSE)
            for number, request in kept_out.items():
                requests[number] = request
            answers = await _confirms(connection, list(kept_out.values()), patience)
            for number, ack in zip(kept_out, answers, strict=True):
                acks[number] = ack
    if repeats := sum(ack.duplicate for ack in acks):
        _log.info("repeats were dropped: JetStream had these messages already", count=repeats)
    return acks


async def _confirms(connection: Connection, requests: Sequence[Request], patience: Patience) -> list[PubAck]:
    acks = await connection.exchange_patiently(requests, read_confirm, patience)
    return [ack or PubAck(error=UNANSWERED) for ack in acks]


def _kept_out_by_id(requests: Sequence[Request], acks: Sequence[PubAck]) -> dict[int, Request]:
    """And how each is to be sent again, by its number."""
    found: dict[int, Request] = {}
    for number, (request, ack) in enumerate(zip(requests, acks, strict=True)):
        if ack.error is None or request.headers is None:
            continue
        if ack.error.is_id_in_process:
            found[number] = request
        elif ack.error.is_over_size and request.headers.keys() == {ID_HEADER}:
            found[number] = request._replace(headers=None)
    return found


def windows(requests: Sequence[Request]) -> Iterable[Sequence[Request]]:
    """As many at a time as the server may have in hand."""
    start = size = 0
    for end, request in enumerate(requests):
        if end > start and (end - start == WINDOW or size + len(request.body) > WINDOW_BYTES):
            yield requests[start:end]
            start, size = end, 0
        size += len(request.body)
    if start < len(requests):
        yield requests[start:]
