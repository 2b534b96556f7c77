"""Deliveries: brings the aggregate of an ended run to its webhook and its reply queue, and notes the outcome.

A delivery has a lease: until its timer rings, only this engine may attempt it. When the lease is too short, the timer
is moved. An attempt that waited for its turn begins only when the store agrees that it is still this engine's, so that
several engines do not deliver the same aggregate twice.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from urllib.parse import urlsplit

import msgspec

from oraculo.core.events import Delivered, DeliveryFailed, DeliveryMoved, Event
from oraculo.core.machine import Verdict
from oraculo.core.machine import delivery as core_delivery
from oraculo.core.run import Channel, DeliveryStatus, RunDelivery, RunHead
from oraculo.engine.deliver.receivers import Absence, Receivers
from oraculo.engine.deliver.reply_queues import ReplyQueues
from oraculo.engine.deliver.webhooks import NotPosted, TargetRefused, Webhooks, is_away
from oraculo.engine.inbox import Inbox, Note, Wish
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge, OraculoError
from oraculo.pipeline.retry import RetryPolicy
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.telemetry import DeliveryAttempted, LoopFailed, Telemetry
from oraculo.settings import WebhookSettings
from oraculo.wire.naming import shortened

# Attempts of one channel that are under way or wait. The delivery timer brings any other run back.
MAX_UNDER_WAY = 2_000
MAX_BYTES_UNDER_WAY = 64 * 1024 * 1024
_MARGIN = 2.0  # seconds of a lease for the outcome of an attempt to be committed
# Seconds for which a delivery rests. A reply should come soon after its broker is back.
_SHORTEST_REST = 1.0
_LONGEST_REST = {Channel.WEBHOOK: 120.0, Channel.QUEUE: core_delivery.DELIVERY_LEASE}
# Seconds of a receiver's absence after which waiting deliveries are given up, unless all attempts take longer.
_LEAST_PATIENCE = 120.0
_LOOK_AGAIN = 0.1  # seconds
_LONGEST_PAUSE = {Channel.WEBHOOK: inf, Channel.QUEUE: 300.0}  # seconds; the setting is for webhooks


@dataclass(slots=True, eq=False)
class _Errand:
    """One delivery that waits for its turn, or is being attempted."""

    run_id: str
    number: int
    delivery: RunDelivery
    edition: int
    aggregate: bytes
    ended_at: float
    has_begun: bool = False
    is_put_off: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.run_id, self.number

    @property
    def receiver(self) -> str:
        """The host and port, or the queue."""
        if self.delivery.channel is Channel.QUEUE:
            return self.delivery.target
        url = urlsplit(self.delivery.target)
        return f"{url.scheme}://{url.hostname}:{url.port}"

    def moved(self, until: float) -> DeliveryMoved:
        return DeliveryMoved(self.number, self.edition, self.delivery.due_at, until)


class Deliveries:
    """The deliveries of this engine that wait or are under way."""

    def __init__(
        self,
        webhooks: Webhooks,
        replies: ReplyQueues,
        inbox: Inbox,
        settings: WebhookSettings,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
    ) -> None:
        self._webhooks = webhooks
        self._replies = replies
        self._inbox = inbox
        self._clock = clock
        self._entropy = entropy
        self._telemetry = telemetry
        self._retry = RetryPolicy(settings.max_attempts, settings.backoff, settings.max_backoff)
        # Webhooks and replies have places of their own, so that slow webhooks and a frozen broker delay nothing else.
        # One receiver of webhooks has a quarter of the places. All reply queues are on one broker.
        places = settings.concurrency
        self._receivers = {
            Channel.WEBHOOK: Receivers(places, max(1, places // 4), MAX_UNDER_WAY, MAX_BYTES_UNDER_WAY),
            Channel.QUEUE: Receivers(places, places, MAX_UNDER_WAY, MAX_BYTES_UNDER_WAY),
        }
        self._longest = {Channel.WEBHOOK: settings.timeout + _MARGIN, Channel.QUEUE: 0.0}
        self._patience = max(_LEAST_PATIENCE, sum(self._retry.delay(n, 0.5) for n in range(1, settings.max_attempts)))
        self._longest_backoff = settings.max_backoff
        self._errands: dict[tuple[str, int], _Errand] = {}
        self._under_way: dict[asyncio.Task[None], _Errand] = {}

    def deliver(self, head: RunHead, aggregate: bytes, due: Sequence[int]) -> None:
        """Begin an attempt for each due delivery, by number. Never block."""
        for number in due:
            delivery = msgspec.structs.replace(head.deliveries[number])
            if delivery.status is DeliveryStatus.PENDING:
                ended_at = head.ended_at or self._clock.now()
                self._take_up(_Errand(head.id, number, delivery, head.edition, aggregate, ended_at))

    def _take_up(self, errand: _Errand) -> None:
        under_way = self._errands.get(errand.key)
        if under_way is None:
            if self._receivers[errand.delivery.channel].enter(errand.receiver, len(errand.aggregate)):
                self._begin(errand)
            elif (reason := self._why_hopeless(errand)) is not None:
                self._note_failed(errand, reason, None)
            else:
                self._put_off(errand)
        elif not under_way.has_begun:
            self._receivers[errand.delivery.channel].resize(
                errand.receiver, len(errand.aggregate) - len(under_way.aggregate)
            )
            under_way.edition, under_way.aggregate = errand.edition, errand.aggregate
            under_way.delivery = errand.delivery  # with its new lease
            self._put_off(under_way)

    def _begin(self, errand: _Errand) -> None:
        self._errands[errand.key] = errand
        task = asyncio.create_task(self._attempt(errand))
        self._under_way[task] = errand
        task.add_done_callback(partial(self._ended, errand))

    def _ended(self, errand: _Errand, task: "asyncio.Task[None]") -> None:
        del self._under_way[task]
        del self._errands[errand.key]
        self._receivers[errand.delivery.channel].leave(errand.receiver, len(errand.aggregate))
        if not task.cancelled() and (error := task.exception()) is not None:  # its timer brings it back
            self._telemetry.emit(LoopFailed("delivery", f"{type(error).__name__}: {error}"))

    def _put_off(self, errand: _Errand) -> None:
        """Move the timer of a delivery behind its turn, when the turn can be estimated."""
        ahead = self._receivers[errand.delivery.channel].seconds_ahead(errand.receiver)
        if ahead:
            # The rest is random, because many deliveries may be put off together.
            rest = min(ahead, self._longest_rest(errand))
            self._move(errand, max(_SHORTEST_REST, rest * (1 + self._entropy.jitter()) / 2))
            errand.is_put_off = True

    def _longest_rest(self, errand: _Errand) -> float:
        """Return the longest rest of a delivery.

        Each rest is a commit, and the longer a receiver is away the more deliveries wait. So rests grow with the
        absence.
        """
        longest, absence = _LONGEST_REST[errand.delivery.channel], self._away(errand)
        if absence is None:
            return longest
        away_for = asyncio.get_running_loop().time() - absence.since
        return max(longest, min(away_for / 8, self._longest_backoff))

    def _move(self, errand: _Errand, rest: float) -> None:
        moved = errand.moved(self._clock.now() + rest)
        errand.delivery.due_at = moved.until
        self._note(errand.run_id, moved)

    async def finished(self) -> None:
        """Return when no attempt is under way, except for receivers that are away."""
        while coming := [
            task for task, errand in self._under_way.items() if errand.has_begun or not self._away(errand)
        ]:
            await asyncio.wait(coming, timeout=_LOOK_AGAIN)

    def _away(self, errand: _Errand) -> Absence | None:
        return self._receivers[errand.delivery.channel].absence(errand.receiver)

    async def abandon(self) -> None:
        """Stop the attempts under way, and let their timers ring soon.

        The engine that takes them up does not know the order of this one's line.
        """
        for errand in self._errands.values():
            if errand.is_put_off and not errand.has_begun:
                self._move(errand, _SHORTEST_REST + core_delivery.DELIVERY_LEASE * self._entropy.jitter())
        for task in self._under_way:
            task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def _attempt(self, errand: _Errand) -> None:
        async with self._receivers[errand.delivery.channel].turn(errand.receiver):
            errand.has_begun = True
            if not await self._is_still_ours(errand):
                return
            try:
                await self._send(errand)
            except Exception as error:  # noqa: BLE001 - the attempt failed and is noted as such
                self._note_whether_met(errand, error)
                self._note_failure(errand, error)
                return
            self._note_whether_met(errand, None)
        self._telemetry.emit(DeliveryAttempted(errand.run_id, errand.delivery.channel, "delivered"))
        self._note(errand.run_id, Delivered(errand.number, errand.edition))

    async def _is_still_ours(self, errand: _Errand) -> bool:
        """Return whether this engine may still attempt a delivery that waited, after renewing a short lease.

        The renewal fails when another engine took the delivery over, or has delivered.
        """
        now, longest = self._clock.now(), self._longest[errand.delivery.channel]
        if not errand.is_put_off and (errand.delivery.due_at or now) >= now + longest:
            return True
        until = now + max(core_delivery.DELIVERY_LEASE, longest + _MARGIN)
        wish = Wish(errand.run_id, errand.moved(until), asyncio.get_running_loop().create_future())
        self._inbox.put([wish])
        return await wish.done is Verdict.APPLIED

    async def _send(self, errand: _Errand) -> None:
        run_id, delivery = errand.run_id, errand.delivery
        if delivery.channel is Channel.WEBHOOK:
            await self._webhooks.send(run_id, delivery.target, errand.edition, errand.aggregate)
        else:
            await self._replies.send(run_id, delivery, errand.aggregate)

    def _note_whether_met(self, errand: _Errand, error: Exception | None) -> None:
        """Note whether a webhook's receiver was reached.

        While it is away, one waiting delivery tries it now and then, and the others lose no attempt.
        """
        if errand.delivery.channel is not Channel.WEBHOOK:
            return
        receivers = self._receivers[Channel.WEBHOOK]
        if error is not None and is_away(error):
            receivers.missed(errand.receiver, _reason_of(error))
        else:
            receivers.met(errand.receiver)

    def _note_failure(self, errand: _Errand, error: Exception) -> None:
        delivery = errand.delivery
        attempt = delivery.attempts + 1
        is_brokers = isinstance(error, BrokerUnavailable)
        retry_at = None
        if self._may_come_through(errand, attempt, error):
            delay = self._retry.delay(attempt, self._entropy.jitter())
            longest = core_delivery.DELIVERY_LEASE if is_brokers else _LONGEST_PAUSE[delivery.channel]
            retry_at = self._clock.now() + min(delay, longest)
        # An absent broker, or a full queue, is noted once. The timer of the lease then brings the reply back soon after
        # it ends, while a backoff would grow with every attempt.
        self._note_failed(errand, _reason_of(error), retry_at, in_history=not is_brokers or delivery.error is None)

    def _note_failed(self, errand: _Errand, reason: str, retry_at: float | None, *, in_history: bool = True) -> None:
        outcome = "given_up" if retry_at is None else "failed"
        self._telemetry.emit(DeliveryAttempted(errand.run_id, errand.delivery.channel, outcome, reason))
        if in_history:
            self._note(errand.run_id, DeliveryFailed(errand.number, errand.edition, reason, retry_at))

    def _may_come_through(self, errand: _Errand, attempt: int, error: Exception) -> bool:
        """Return whether another attempt may succeed.

        A reply queue is on our own broker, which comes back. So a reply is given up only when the broker can never take
        it, or refused it as often as a webhook may fail: a missing right would otherwise keep the run for ever.
        """
        if isinstance(error, (MessageTooLarge, TargetRefused)) or self._why_hopeless(errand) is not None:
            return False
        is_refused = isinstance(error, BrokerError) and not isinstance(error, BrokerUnavailable)
        return attempt < self._retry.max_attempts or (errand.delivery.channel is Channel.QUEUE and not is_refused)

    def _why_hopeless(self, errand: _Errand) -> str | None:
        """Return why a delivery is given up although attempts are left, or None.

        When many wait for a receiver that is gone, all their attempts would take weeks while more runs come. So each is
        given up after the time that its attempts would take alone.
        """
        absence = self._away(errand)
        if absence is None or asyncio.get_running_loop().time() - absence.since < self._patience:
            return None
        return absence.reason if self._clock.now() - errand.ended_at >= self._patience else None

    def _note(self, run_id: str, event: Event) -> None:
        self._inbox.note([Note(run_id, event)])


def _reason_of(error: Exception) -> str:
    """Return the reason of a failure, shortened, because a receiver may be quoted in it."""
    is_ours = isinstance(error, (NotPosted, OraculoError))
    return shortened(str(error) if is_ours else f"{type(error).__name__}: {error}".rstrip(": "))
