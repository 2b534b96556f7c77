"""The mailbox of a worker check: it collects the check's answers, and gives back messages of others."""

import asyncio
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from oraculo.core.answers import has_failed
from oraculo.errors import BrokerError, InvalidInput
from oraculo.ports.broker import Broker, Consumer, Delivery
from oraculo.wire import naming
from oraculo.wire.message import Message, decode_message

MOST_FOREIGN = 1_000  # messages of others that a check holds
MARK = "verificacao-"
_CHECK_ID = re.compile(MARK + "[0-9a-f-]{36}-[0-9]+-[a-z]+")
_PAUSE = 0.1
_RENEWAL = 5.0  # seconds between renewals of held messages, less than any sensible lease
_BOUNCES = 3  # how often a message of others is given back at once


class MailboxAnswer(NamedTuple):
    """An answer that came."""

    queue: str
    message: Message
    failure: str  # empty when the worker succeeded

    @property
    def outcome(self) -> str:
        return f"erro: {self.failure}" if self.failure else "ok"


class _Status(msgspec.Struct):
    """The parts of an answer's payload that say how it went. The rest may be unreadable in Python, as 1e999."""

    status: Any = None
    erros: Any = None


_payload_decoder = msgspec.json.Decoder(_Status)


def _failure(message: Message) -> str:
    """Return the failure in an answer, or an empty text. Raises msgspec.DecodeError for an unreadable payload."""
    status = _payload_decoder.decode(message.payload)
    return naming.shown(status.erros or status.status, 200) if has_failed(status.status, status.erros) else ""


class Mailbox:
    """A reader of the queues where answers may come. It keeps the answers of this check by their correlation_id."""

    def __init__(self, broker: Broker, mark: str) -> None:
        self._broker = broker
        self._mark = mark.encode()
        self._answers: dict[str, list[MailboxAnswer]] = {}
        self._came = asyncio.Condition()
        self._readers: list[asyncio.Task[None]] = []
        self.malformed: list[str] = []  # invalid answers: the queue and the fault of each
        self.foreign: dict[str, None] = {}  # descriptions of messages that are not of this check

    async def listen(self, queue: str, *, is_own: bool = False, is_shared: bool = False) -> None:
        """Consume a queue.

        On one that `is_own` everything is for the check; one that `is_shared` may have another reader.
        """
        subscription = _Subscription(await self._consume(queue), is_own, is_shared)
        self._readers.append(asyncio.create_task(self._read(queue, subscription), name=f"read {queue}"))

    async def answers(self, correlation_id: str, count: int, within: float) -> list[MailboxAnswer]:
        """Wait up to `within` seconds for `count` answers, and return those that came."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within), self._came:
                await self._came.wait_for(lambda: len(self._answers.get(correlation_id, ())) >= count)
        return self.answers_so_far(correlation_id)

    def answers_so_far(self, correlation_id: str) -> list[MailboxAnswer]:
        return list(self._answers.get(correlation_id, ()))

    def ids_beside(self, given: Collection[str]) -> list[str]:
        """Return the correlation_ids of answers, except the given ones and those of earlier checks."""
        mark = self._mark.decode()
        left_over = (each for each in self._answers if _CHECK_ID.fullmatch(each) and not each.startswith(mark))
        return list(self._answers.keys() - given - set(left_over))

    def forget_oddities(self) -> None:
        self.malformed.clear()
        self.foreign.clear()

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _consume(self, queue: str) -> Consumer:
        return await self._broker.consume(queue, prefetch=2 * MOST_FOREIGN)

    async def _read(self, queue: str, subscription: "_Subscription") -> None:
        """Read until cancelled, and subscribe again whenever the subscription is lost."""
        while True:
            renewing = asyncio.create_task(subscription.renew())
            try:
                while deliveries := await subscription.consumer.take(MOST_FOREIGN):
                    await self._sort(subscription, deliveries)
            except BrokerError:
                await asyncio.sleep(_PAUSE)
            finally:
                renewing.cancel()
                with suppress(BrokerError):
                    await subscription.consumer.close()
            subscription = _Subscription(await self._consume_again(queue), subscription.is_own, subscription.is_shared)

    async def _consume_again(self, queue: str) -> Consumer:
        while True:
            with suppress(BrokerError):
                return await self._consume(queue)
            await asyncio.sleep(_PAUSE)

    async def _sort(self, subscription: "_Subscription", deliveries: Iterable[Delivery]) -> None:
        ours = []
        for delivery in deliveries:
            if subscription.is_own or self._mark in delivery.body:
                self._keep(delivery)
                ours.append(delivery)
            else:
                self.foreign[_described(delivery.body)] = None
                await subscription.give_back(delivery)
        await subscription.consumer.ack(ours)
        async with self._came:
            self._came.notify_all()

    def _keep(self, delivery: Delivery) -> None:
        try:
            message = decode_message(delivery.body)
            failure = _failure(message)
        except (InvalidInput, msgspec.DecodeError) as error:
            shown = f"it is {naming.shown(delivery.body.decode(errors='replace'))}"
            hint = shown if delivery.body else "on Redis the JSON must be in the field `body`"
            self.malformed.append(f"{delivery.queue} came an answer that is no valid message: {error}; {hint}")
            return
        if message.tipo_evento == naming.PROGRESS:
            return
        kept, answer = (
            self._answers.setdefault(message.correlation_id, []),
            MailboxAnswer(delivery.queue, message, failure),
        )
        if not (delivery.redeliveries and answer in kept):  # otherwise it came again because its ack was lost
            kept.append(answer)


class _Subscription:
    """One life of a consumer, with the messages of others that it holds until it closes."""

    def __init__(self, consumer: Consumer, is_own: bool, is_shared: bool) -> None:
        self.consumer = consumer
        self.is_own = is_own
        self.is_shared = is_shared
        self._held: list[Delivery] = []

    async def give_back(self, delivery: Delivery) -> None:
        """Give a message back at once where somebody may be waiting for it.

        Elsewhere, or after some returns, it is held until the end: too many deliveries would make it a dead letter.
        """
        if self.is_shared and delivery.redeliveries < _BOUNCES:
            await self.consumer.retry(delivery, 0.0, "taken by `oraculo check-worker`, whose answer it is not")
        else:
            self._held.append(delivery)

    async def renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEWAL)
            if self._held:
                with suppress(BrokerError):
                    await self.consumer.extend(self._held)


def _described(body: bytes) -> str:
    try:
        return f"correlation_id {naming.shown(decode_message(body).correlation_id)}"
    except InvalidInput as error:
        return str(error)
