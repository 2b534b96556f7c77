"""Messages on their way to JetStream: as requests, in windows, and what was not taken of them."""

import asyncio
from collections.abc import Iterable, Sequence

import structlog

from oraculo.brokers.nats.connection import Connection, PubAck, Request, read_confirm
from oraculo.brokers.nats.layout import (
    ID_HEADER,
    NO_REASON,
    as_header,
    id_headers,
    letter_headers,
    name_fault,
    quarantine_of,
)
from oraculo.errors import BrokerError
from oraculo.ports.broker import NotTaken, Outgoing

WINDOW = 1000  # messages that wait for their confirm at a time; JetStream refuses when ten thousand do
WINDOW_BYTES = 4 * 1024 * 1024
_MOST_TOLD = 5  # reasons, of the messages of one call
_KEPT_OUT_PAUSE = 0.02

_log = structlog.get_logger("oraculo.brokers.nats")


class Refusals:
    """What became of the messages of one call that were not confirmed."""

    def __init__(self) -> None:
        self.for_good: dict[str, None] = {}  # the reasons
        self.full: dict[int, str] = {}  # the reasons, by the id of a request whose stream has no room now

    @property
    def told(self) -> str:
        return "; ".join(list(dict.fromkeys(self.full.values()))[:_MOST_TOLD])

    def raise_for_good(self) -> None:
        if self.for_good:
            raise BrokerError("; ".join(list(self.for_good)[:_MOST_TOLD]))

    def raise_any(self) -> None:
        self.raise_for_good()
        if self.full:
            raise NotTaken(self.told)


def request_of(message: Outgoing, most: int, refusals: Refusals) -> Request | None:
    """None when NATS cannot take it."""
    queue, body, room = message.queue, message.body, most - len(message.body)
    if fault := name_fault(queue):
        refusals.for_good[fault] = None
        return None
    if room < 0:
        told = f"{queue}: a message of {len(body)} bytes is over the server's max_payload of {most} bytes"
        refusals.for_good[told] = None
        return None
    if message.reason is not None:
        return Request(quarantine_of(queue), body, letter_headers(message.reason or NO_REASON, 0, room))
    return Request(queue, body, id_headers(as_header(message.key), room) if message.key else None)


async def confirms_of(connection: Connection, requests: Sequence[Request]) -> Sequence[PubAck]:
    """What only its id keeps out is sent again: an id is to spare a worker a repeat, not to lose it a message."""
    requests, acks = list(requests), await connection.exchange(requests, read_confirm)
    while kept_out := _kept_out_by_id(requests, acks):
        await asyncio.sleep(_KEPT_OUT_PAUSE)
        for number, request in kept_out.items():
            requests[number] = request
        answers = await connection.exchange(list(kept_out.values()), read_confirm)
        for number, ack in zip(kept_out, answers, strict=True):
            acks[number] = ack
    if repeats := sum(ack.duplicate for ack in acks):
        _log.info("repeats were dropped: JetStream had these messages already", count=repeats)
    return acks


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
