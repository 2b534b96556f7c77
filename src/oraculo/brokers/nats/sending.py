"""Requests are sent to JetStream, their queues made where they are missing."""

import asyncio
from collections.abc import Sequence

from oraculo.brokers.nats.births import Births
from oraculo.brokers.nats.connection import MOST_KNOWN, Connection, Patience
from oraculo.brokers.nats.declare import Maker
from oraculo.brokers.nats.layout import stream_of
from oraculo.brokers.nats.outgoing import Refusals, confirms_of, windows
from oraculo.brokers.nats.replies import NOBODY, UNANSWERED, ApiError, Request
from oraculo.core.chunks import pages
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge, QueueDown, QueueFull
from oraculo.wire.naming import dlq_name, is_dlq, source_name

MADE_TOGETHER = 100  # queues: a slow server has to make them in the time of a call
CONFIRM_SHARE = 0.8  # of the time of a call; in the rest a server that did not confirm may show that it works


class Sender:
    """`patience`: seconds that the server may be silent."""

    def __init__(self, maker: Maker, births: Births, *, patience: float) -> None:
        self._maker = maker
        self._births = births
        self._patience = patience
        self._silence = patience * CONFIRM_SHARE

    async def send(self, connection: Connection, requests: Sequence[Request], refusals: Refusals) -> None:
        """Returns once all are confirmed, but for those that were not taken, which are told in `refusals`. Raises
        TimeoutError when the server falls silent."""
        patience = self._from_now()
        for window in windows(await self._make_missing(connection, requests, refusals)):
            if not refusals.unanswered:  # the server keeps up, however long it has taken so far
                patience = self._from_now()
            elif asyncio.get_running_loop().time() >= patience.until:
                for request in window:
                    late = f"{connection.place} was not asked in time to take {request.subject}"
                    refusals.note(request, QueueFull(late))
                continue
            homeless = await self._send_window(connection, window, refusals, patience)
            if homeless:  # their stream was deleted, so they are nowhere: sending them again makes no duplicate
                connection.forget_made(name for request in homeless for name in _both(request.subject))
                housed = await self._make_missing(connection, homeless, refusals)
                if await self._send_window(connection, housed, refusals, self._from_now()):
                    raise BrokerUnavailable(f"the stream of {homeless[0].subject} at {connection.place} is gone again")

    def _from_now(self) -> Patience:
        now = asyncio.get_running_loop().time()
        return Patience(now + self._silence, self._silence, self._patience - self._silence)

    async def _make_missing(
        self, connection: Connection, requests: Sequence[Request], refusals: Refusals
    ) -> Sequence[Request]:
        """Returns those whose queue is there, as far as is known, and works."""
        used = {request.subject for request in requests if not request.is_reply}
        needed = {request.subject for request in requests if request.is_reply} | set(map(dlq_name, used))
        missing = connection.unmade(needed)
        if len(connection.made) > MOST_KNOWN // 4:  # some may soon be forgotten: not those in use
            connection.note_made(needed & connection.made.keys())
            self._births.note_used(map(stream_of, used))
        forbidden = await self._make_for_sending(connection, missing) if missing else {}
        stuck = connection.stuck()
        if not stuck and not forbidden:
            return requests
        faults: dict[str, BrokerError] = {queue: QueueDown(why) for queue, why in stuck.items()}
        faults |= forbidden
        for request in requests:
            if request.subject in faults:
                refusals.note(request, faults[request.subject])
        return [request for request in requests if request.subject not in faults]

    async def _make_for_sending(self, connection: Connection, missing: set[str]) -> dict[str, BrokerError]:
        """A quarantine is made with its queue, a queue for replies alone. Returns which can never be made as things
        are, and why, their quarantines too. One that cannot be made now counts as stuck for a while."""
        forbidden: dict[str, BrokerError] = {}
        sources = {source_name(name) for name in missing if is_dlq(name)}
        for_replies = {name for name in missing if not is_dlq(name)} - sources
        faults: dict[str, BrokerError] = {}
        for some in pages(sorted(sources | for_replies), MADE_TOGETHER):
            async with asyncio.timeout(self._patience):
                own = [name for name in some if name in sources]
                faults |= await self._maker.make(connection, own, for_replies.intersection(some))
        for source, fault in faults.items():
            both = _both(source)
            if isinstance(fault, BrokerUnavailable):
                connection.note_unmakeable(both, str(fault))
            else:
                forbidden |= dict.fromkeys(both, fault)
        return forbidden

    async def _send_window(
        self, connection: Connection, requests: Sequence[Request], refusals: Refusals, patience: Patience
    ) -> list[Request]:
        """Those for which there is no stream."""
        acks = await confirms_of(connection, requests, patience)
        if all(ack.error is None for ack in acks):
            connection.note_working([request.subject for request in requests])
            if not all(ack.duplicate for ack in acks):  # a full server confirms what it has already
                connection.note_stored()
            return []
        homeless = []
        for request, ack in zip(requests, acks, strict=True):
            if ack.error is UNANSWERED:
                refusals.unanswered = True
                refusals.note(request, self._unheard(connection, request.subject))
            elif ack.error is NOBODY:
                homeless.append(request)
            elif ack.error is not None:
                self._note_refusal(connection, request, ack.error, refusals)
        return homeless

    def _unheard(self, connection: Connection, subject: str) -> QueueDown:
        """Perhaps its stream has no leader; perhaps it is gone and somebody else listens on its subject."""
        told = f"{connection.place} did not confirm what is for {subject} in time, while it answers otherwise"
        connection.note_silent(subject, told)
        connection.forget_made(_both(subject))
        return QueueDown(told)

    @staticmethod
    def _note_refusal(connection: Connection, request: Request, error: ApiError, refusals: Refusals) -> None:
        refusal = connection.refusal(error, f"a message for {request.subject}")
        if error.is_full:
            connection.forget_made(_both(request.subject))  # looked at again: it may be closed by a removal
            refusals.note(request, QueueFull(str(refusal)))
        elif error.is_forbidden:
            refusals.note(request, refusal)
        elif isinstance(refusal, BrokerUnavailable):
            if error.is_server_full:
                connection.note_full(str(refusal))
            raise refusal
        else:
            size, told = len(request.body), str(refusal)
            too_large = MessageTooLarge(f"{told}, it has {size} bytes", size, None)  # the owner's limit is not told
            refusals.note(request, too_large if error.is_over_size else refusal)


def _both(queue: str) -> tuple[str, str]:
    return source_name(queue), dlq_name(queue)
