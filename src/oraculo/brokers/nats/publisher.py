"""Publishing to JetStream: requests in windows, their queues made where they are missing."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import structlog

from oraculo.brokers.nats.connection import Connection, Patience
from oraculo.brokers.nats.declare import QueueMaker
from oraculo.brokers.nats.layout import as_header, id_headers, letter_headers, name_fault
from oraculo.brokers.nats.replies import NOBODY, UNANSWERED, ApiError, PubAck, Request, read_confirm
from oraculo.core.chunks import pages
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge, QueueDown, QueueFull
from oraculo.ports.broker import NO_REASON, Outgoing
from oraculo.wire.naming import dlq_name, is_dlq, source_name

WINDOW = 1000  # messages that wait for their confirm at a time; JetStream refuses when ten thousand do
WINDOW_BYTES = 4 * 1024 * 1024
MADE_TOGETHER = 100  # queues: a slow server has to make them in the time of a call
_IN_PROCESS_PAUSE = 0.02

Requests = dict[int, Request]  # by their number in the call
Errors = dict[int, BrokerError]

_log = structlog.get_logger("oraculo.brokers.nats")


def request_of(message: Outgoing, most: int) -> Request | BrokerError:
    """Return the request that publishes a message, or why NATS can never take it."""
    queue, body, room = message.queue, message.body, most - len(message.body)
    if fault := name_fault(queue):
        return BrokerError(fault)
    if room < 0:
        why = f"a message of {len(body)} bytes for {queue} is over the server's max_payload of {most} bytes"
        return MessageTooLarge(why, len(body), most)
    if message.reason is not None:
        return Request(dlq_name(queue), body, letter_headers(message.reason or NO_REASON, 0, room))
    headers = id_headers(as_header(message.key), room) if message.key else None
    return Request(queue, body, headers, message.is_reply)


class JetStreamPublisher:
    """Sends requests until each is stored or refused. `timeout`: seconds that the server may be silent."""

    def __init__(self, maker: QueueMaker, timeout: float) -> None:
        self._maker = maker
        self._timeout = timeout
        self._patience = Patience(0.7 * timeout, 0.3 * timeout, 0.5)

    async def send(self, connection: Connection, requests: Sequence[Request]) -> list[BrokerError | None]:
        """Return None for each request that is stored, and the error for each that is not.

        Raises BrokerUnavailable when the server stores nothing, TimeoutError when it falls silent.
        """
        errors: Errors = {}
        is_slow = False
        for window in _windows(await self._with_queues(connection, dict(enumerate(requests)), errors)):
            if is_slow:  # each further window might be waited for as long
                late = f"{connection.place} was not asked in time to take "
                errors |= {number: QueueFull(late + request.subject) for number, request in window.items()}
                continue
            homeless = await self._send_window(connection, window, errors)
            is_slow = any(isinstance(errors.get(number), QueueDown) for number in window)
            if homeless:  # their stream was deleted, so they are nowhere: sending them again makes no duplicate
                for request in homeless.values():
                    connection.queues.forget_made(_both(request.subject))
                again = await self._with_queues(connection, homeless, errors)
                if await self._send_window(connection, again, errors):
                    subject = next(iter(again.values())).subject
                    raise BrokerUnavailable(f"the stream of {subject} at {connection.place} is gone again")
        return [errors.get(number) for number in range(len(requests))]

    async def _with_queues(self, connection: Connection, requests: Requests, errors: Errors) -> Requests:
        """Make missing queues, and return the requests whose queue works."""
        queues = connection.queues
        needed = {request.subject if request.is_reply else dlq_name(request.subject) for request in requests.values()}
        missing = queues.missing(needed)
        refused = await self._make(connection, missing) if missing else {}
        faults: dict[str, BrokerError] = {queue: QueueDown(why) for queue, why in queues.stuck().items()}
        faults |= refused
        if not faults:
            return requests
        subjects = {number: request.subject for number, request in requests.items()}
        errors |= {number: faults[subject] for number, subject in subjects.items() if subject in faults}
        return {number: request for number, request in requests.items() if number not in errors}

    async def _make(self, connection: Connection, missing: set[str]) -> dict[str, BrokerError]:
        """Make queues. Return those that can never be made as things are; others count as stuck for a while."""
        sources = {source_name(name) for name in missing if is_dlq(name)}
        replies = {name for name in missing if not is_dlq(name)} - sources
        refused: dict[str, BrokerError] = {}
        for some in pages(sorted(sources | replies), MADE_TOGETHER):
            own = [name for name in some if name in sources]
            async with asyncio.timeout(self._timeout):
                faults = await self._maker.make(connection, own, replies.intersection(some))
            for queue, fault in faults.items():
                if isinstance(fault, BrokerUnavailable):
                    connection.queues.note_stuck(_both(queue), str(fault))
                else:
                    refused |= dict.fromkeys(_both(queue), fault)
        return refused

    async def _send_window(self, connection: Connection, window: Requests, errors: Errors) -> Requests:
        """Send requests together, and return those for which there is no stream."""
        acks = await self._exchange(connection, window)
        failed = _failed(acks)
        async with asyncio.timeout(self._timeout):
            # A cluster refuses an id while it stores another message with it.
            while again := {number: window[number] for number, error in failed.items() if error.is_id_in_process}:
                await asyncio.sleep(_IN_PROCESS_PAUSE)
                acks |= await self._exchange(connection, again)
                failed = _failed(acks)
        if repeats := sum([ack.duplicate for ack in acks.values()]):
            _log.info("repeats were dropped: JetStream had these messages already", count=repeats)
        if len(acks) > len(failed) + repeats:
            connection.queues.note_stored()  # a full server confirms what it has already
        connection.queues.note_working(window[number].subject for number in acks.keys() - failed.keys())
        for number, error in failed.items():
            if error is UNANSWERED:
                errors[number] = self._unheard(connection, window[number].subject)
            elif error is not NOBODY:
                errors[number] = _refused(connection, window[number], error)
        return {number: window[number] for number, error in failed.items() if error is NOBODY}

    async def _exchange(self, connection: Connection, window: Requests) -> dict[int, PubAck]:
        acks = await connection.exchange(list(window.values()), read_confirm, self._patience)
        return dict(zip(window, [ack or PubAck(error=UNANSWERED) for ack in acks], strict=True))

    @staticmethod
    def _unheard(connection: Connection, subject: str) -> QueueDown:
        """Note a queue whose stream may have no leader, or be gone while somebody else listens on its subject."""
        why = f"{connection.place} did not confirm what is for {subject} in time, while it answers otherwise"
        connection.queues.note_stuck([subject], why)
        connection.queues.forget_made(_both(subject))
        return QueueDown(why)


def _refused(connection: Connection, request: Request, error: ApiError) -> BrokerError:
    """Return why one message is refused. Raises BrokerUnavailable when others would be refused too."""
    refusal = connection.refusal(error, f"a message for {request.subject}")
    if error.is_full:
        connection.queues.forget_made(_both(request.subject))  # looked at again: a removal may have closed it
        return QueueFull(str(refusal))
    if error.is_over_size:  # the owner's limit is not known, and the headers count
        size = len(request.body)
        return MessageTooLarge(f"{refusal}, it has {size} bytes", size, None)
    if isinstance(refusal, BrokerUnavailable):
        if error.is_server_full:
            connection.queues.note_full(str(refusal))
        raise refusal
    return refusal


def _failed(acks: Mapping[int, PubAck]) -> dict[int, ApiError]:
    return {number: ack.error for number, ack in acks.items() if ack.error is not None}


def _windows(requests: Requests) -> Iterator[Requests]:
    """Yield as many requests at a time as the server may have in hand."""
    window: Requests = {}
    size = 0
    for number, request in requests.items():
        if window and (len(window) == WINDOW or size + len(request.body) > WINDOW_BYTES):
            yield window
            window, size = {}, 0
        window[number] = request
        size += len(request.body)
    if window:
        yield window


def _both(queue: str) -> tuple[str, str]:
    return source_name(queue), dlq_name(queue)
