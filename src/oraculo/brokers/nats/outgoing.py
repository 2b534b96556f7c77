"""Messages on their way to JetStream: as requests, in windows, and what was not taken of them."""

from collections.abc import Iterable, Sequence

from oraculo.brokers.nats.connection import Request
from oraculo.brokers.nats.layout import NO_REASON, as_header, id_headers, letter_headers, name_fault, quarantine_of
from oraculo.errors import BrokerError
from oraculo.ports.broker import NotTaken, Outgoing

WINDOW = 1000  # messages that wait for their confirm at a time; JetStream refuses when ten thousand do
WINDOW_BYTES = 4 * 1024 * 1024
_MOST_TOLD = 5  # reasons, of the messages of one call


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
            raise NotTaken(self.told, (), "")


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
    key = "" if message.key is None else as_header(message.key)
    if message.reason is None:
        return Request(queue, body, id_headers(key, room) if key else None)
    return Request(quarantine_of(queue), body, letter_headers(message.reason or NO_REASON, 0, room, key))


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
