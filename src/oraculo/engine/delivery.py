"""Brings the aggregate of an ended run to its webhook and to its reply queue, and notes how it went."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from string import punctuation
from urllib.parse import quote

import httpx2
import msgspec
from standardwebhooks import Webhook

from oraculo.core import machine, naming
from oraculo.core.events import Delivered, DeliveryFailed, Event
from oraculo.core.message import Message, encode_message
from oraculo.core.naming import QueueNames
from oraculo.core.retry import RetryPolicy
from oraculo.core.run import Channel, Delivery, DeliveryStatus, RunHead
from oraculo.core.timestamps import in_words, to_iso
from oraculo.engine.inputs import Inbox, Note
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Broker, NotTaken, Outgoing
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.telemetry import DeliveryAttempted, Telemetry
from oraculo.settings import WebhookSettings

# Attempts of one channel under way or waiting; past that a run is left to its delivery timer, which finds it again.
MAX_UNDER_WAY = 1_000
MAX_BYTES_UNDER_WAY = 64 * 1024 * 1024
_PLAIN = punctuation.replace("%", "")  # what a header may have unencoded; quote() lets letters and digits pass

Post = Callable[[str, bytes, dict[str, str]], Awaitable[int]]


class Courier:
    def __init__(
        self,
        broker: Broker,
        inbox: Inbox,
        settings: WebhookSettings,
        *,
        names: QueueNames,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
        post: Post,
    ) -> None:
        self._broker = broker
        self._inbox = inbox
        self._names = names
        self._clock = clock
        self._entropy = entropy
        self._telemetry = telemetry
        self._post = post
        self._retry = RetryPolicy(settings.max_attempts, settings.backoff, settings.max_backoff)
        self._signer = Webhook(settings.secret) if settings.secret else None
        # Apart, so that neither webhooks that are slow nor a broker that is frozen hold up the others.
        self._slots = {channel: asyncio.Semaphore(settings.concurrency) for channel in Channel}
        self._attempts = Counter[Channel]()
        self._under_way: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._bytes = 0

    def deliver(self, head: RunHead, aggregate: bytes, due: Sequence[int]) -> None:
        """Starts an attempt for each delivery that is due, by number. Never blocks."""
        for number in due:
            key, delivery = (head.id, number), head.deliveries[number]
            if delivery.status is not DeliveryStatus.PENDING or key in self._under_way:
                continue
            is_too_much = self._bytes and self._bytes + len(aggregate) > MAX_BYTES_UNDER_WAY  # one alone always goes
            if self._attempts[delivery.channel] >= MAX_UNDER_WAY or is_too_much:
                continue
            attempt = self._attempt(head.id, number, msgspec.structs.replace(delivery), head.edition, aggregate)
            self._bytes += len(aggregate)
            self._attempts[delivery.channel] += 1
            self._under_way[key] = asyncio.create_task(attempt)
            self._under_way[key].add_done_callback(partial(self._finished, key, delivery.channel, len(aggregate)))

    def _finished(self, key: tuple[str, int], channel: Channel, size: int, _: object) -> None:
        del self._under_way[key]
        self._attempts[channel] -= 1
        self._bytes -= size

    async def finished(self) -> None:
        """Returns when no attempt is under way."""
        while self._under_way:
            await asyncio.wait(list(self._under_way.values()))

    async def abandon(self) -> None:
        """Stops the attempts under way; their timers bring them back."""
        for task in self._under_way.values():
            task.cancel()
        await self.finished()

    async def _attempt(self, run_id: str, number: int, delivery: Delivery, edition: int, aggregate: bytes) -> None:
        async with self._slots[delivery.channel]:
            try:
                if delivery.channel is Channel.WEBHOOK:
                    await self._send_webhook(run_id, delivery.target, edition, aggregate)
                else:
                    await self._send_reply(run_id, delivery, aggregate)
            except Exception as error:  # noqa: BLE001  whatever it is, the attempt failed and is noted as such
                self._note_failure(run_id, number, delivery, edition, error)
                return
        self._telemetry.emit(DeliveryAttempted(run_id, delivery.channel, "delivered"))
        self._note(run_id, Delivered(number, edition))

    def _note_failure(self, run_id: str, number: int, delivery: Delivery, edition: int, error: Exception) -> None:
        attempt, reason = delivery.attempts + 1, _told(error)
        retry_at = None
        # A reply queue is our own broker's: it comes back, so the reply is never given up.
        if delivery.channel is Channel.QUEUE or attempt < self._retry.max_attempts:
            delay = self._retry.delay(attempt, self._entropy.jitter())
            soon = machine.DELIVERY_LEASE if isinstance(error, _Away) else delay
            retry_at = self._clock.now() + min(delay, soon)
        outcome = "given_up" if retry_at is None else "failed"
        self._telemetry.emit(DeliveryAttempted(run_id, delivery.channel, outcome, reason))
        # An absence of the broker is noted once. What it holds up then comes back with the timer of its lease, soon
        # and however long the absence lasts, where a backoff would have grown with every attempt.
        if not isinstance(error, _Away) or delivery.error is None:
            self._note(run_id, DeliveryFailed(number, edition, reason, retry_at))

    def _note(self, run_id: str, event: Event) -> None:
        self._inbox.note([Note(run_id, event)])

    async def _send_reply(self, run_id: str, delivery: Delivery, aggregate: bytes) -> None:
        message = Message(
            correlation_id=run_id,
            tipo_evento=naming.RUN_ENDED,
            payload=msgspec.Raw(aggregate),
            timestamp=to_iso(self._clock.now()),
        )
        try:
            queue = self._names.physical(delivery.target)
            await self._broker.publish([Outgoing(queue, encode_message(message), prefer=delivery.via)])
        except BrokerError as error:
            is_away = isinstance(error, BrokerUnavailable) and not isinstance(error, NotTaken)
            raise (_Away if is_away else _Refused)(str(error)) from error

    async def _send_webhook(self, run_id: str, url: str, edition: int, aggregate: bytes) -> None:
        status = await self._post(url, aggregate, self._headers(run_id, edition, aggregate))
        if not 200 <= status < 300:
            raise _Refused(f"answered {status}; a 2xx is awaited")

    def _headers(self, run_id: str, edition: int, aggregate: bytes) -> dict[str, str]:
        """The id is the same at every attempt of one edition, so that the receiver can tell a repeat."""
        message_id = _header_value(f"{run_id}.{edition}")
        moment = datetime.fromtimestamp(self._clock.now(), UTC)
        headers = {
            "content-type": "application/json",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(moment.timestamp())),
        }
        if self._signer is not None:
            headers["webhook-signature"] = self._signer.sign(message_id, moment, aggregate.decode())
        return headers


def _header_value(text: str) -> str:
    """Percent-encoded but for visible ASCII characters: HTTP takes no control characters, nor spaces at the ends, and
    who passes it on may change other spaces, which would break the signature."""
    return quote(text, safe=_PLAIN)


class _Refused(Exception):
    pass


class _Away(_Refused):
    """By a broker that cannot be reached."""


def _told(error: Exception) -> str:
    if isinstance(error, _Refused):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")


def http_post(client: httpx2.AsyncClient, seconds: float) -> Post:
    """Posts with `client` and returns the status. The body of the answer is of no use and is not read: a receiver
    that drips it would hold the attempt for ever."""

    async def post(url: str, body: bytes, headers: dict[str, str]) -> int:
        try:
            async with (
                asyncio.timeout(seconds),
                client.stream("POST", url, content=body, headers=headers) as response,
            ):
                return response.status_code
        except TimeoutError:
            raise _Refused(f"no answer in {in_words(seconds)}") from None

    return post
