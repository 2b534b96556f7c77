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
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge, QueueDown
from oraculo.ports.broker import NO_REASON, Outgoing, Receipt
from oraculo.wire.naming import dlq_name

WINDOW = 1000  # messages that wait for their confirm at a time; JetStream refuses when ten thousand do
WINDOW_BYTES = 4 * 1024 * 1024
_KEPT_OUT_PAUSE = 0.02

_log = structlog.get_logger("oraculo.brokers.nats")


class Refusals:
    """Why messages of one call were not taken, by the id of their request."""

    def __init__(self) -> None:
        self._errors: dict[int, BrokerError] = {}
        self.unanswered = False  # whether some were asked about and nobody said anything

    def note(self, request: Request, why: BrokerError) -> None:
        self._errors[id(request)] = why

    def receipt(self, request: Request | BrokerError, taken: Receipt) -> Receipt:
        if isinstance(request, BrokerError):
            return Receipt(error=request)
        return Receipt(error=error) if (error := self._errors.get(id(request))) else taken

    def is_for(self, request: Request) -> bool:
        return id(request) in self._errors

    def are_all_down(self, count: int) -> bool:
        """Return whether none of so many messages was taken, and a queue that does not work is one reason."""
        errors = self._errors.values()
        return len(errors) == count and any(isinstance(error, QueueDown) for error in errors)

    def raise_any(self) -> None:
        """Raise one of the refusals; what no retry will mend comes first."""
        if self._errors:
            raise min(self._errors.values(), key=lambda error: isinstance(error, BrokerUnavailable))


def request_of(message: Outgoing, most: int) -> Request | BrokerError:
    """Return the request that publishes a message, or why NATS can never take it."""
    queue, body, room = message.queue, message.body, most - len(message.body)
    if fault := name_fault(queue):
        return BrokerError(fault)
    if room < 0:
        told = f"a message of {len(body)} bytes for {queue} is over the server's max_payload of {most} bytes"
        return MessageTooLarge(told, len(body), most)
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
