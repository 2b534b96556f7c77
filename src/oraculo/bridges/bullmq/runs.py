"""Runs that were started by a job of BullMQ: started by a message, followed in the store, ended by their aggregate.

The aggregate comes to a queue that all bridges share, so it may come to another than the one that holds the job. It is
put into Redis, where whoever holds the job then, or later, finds it.

How far a run is, is read from its head in the store: cheap whatever its width, and the same for every engine.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
from redis.exceptions import RedisError

from oraculo.clients.subscription import Backoff, Subscription
from oraculo.core.chunks import pages
from oraculo.core.run import DeliveryStatus, RunHead, RunStatus
from oraculo.errors import BrokerError, InvalidInput, OraculoError, WrittenByNewer
from oraculo.ports.broker import Broker, Delivery, Outgoing
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.readable import readable
from oraculo.ports.store import Store
from oraculo.ports.telemetry import DeadLettered, LoopFailed, Telemetry
from oraculo.wire import naming
from oraculo.wire.message import (
    Message,
    correlation_id_at_start,
    correlation_id_of,
    decode_message,
    encode_message,
)
from oraculo.wire.naming import QueueNames
from oraculo.wire.timestamps import to_iso

REPLIES = "agregados-bullmq"  # the queue on which aggregates come back
POLL = 0.3
PAGE = 500
REFUSAL_AFTER = 1.5  # seconds without a sign of the run, after which its request is looked for among the dead letters
MOST_LETTERS = 10_000
LOST_AFTER = 60.0  # seconds after a run's aggregate was delivered, until one that is not here counts as lost

_log = structlog.get_logger("oraculo.bullmq")


class RequestRefused(Exception):
    """The orchestrator did not take the request; the text says why."""


class Lost(Exception):
    """The run ended, and its aggregate is not here any more."""


class Overtaken(Exception):
    """The job was lost to BullMQ and came back: whoever took it then follows the run."""

    def __init__(self, successor: "Followed") -> None:
        super().__init__("the job was taken again")
        self.successor = successor


class Followed:
    """A run that a job waits for. `changed` is set when there is something new to see."""

    def __init__(self, run_id: str, since: float) -> None:
        self.run_id = run_id
        self.since = since  # when it was asked for, by the loop's clock
        self.changed = asyncio.Event()
        self.head: RunHead | None = None
        self.aggregate: str | None = None
        self.fault: Exception | None = None
        self.delivered_since: float | None = None
        self.left = asyncio.Event()  # set when nobody follows it any more

    @property
    def percent(self) -> int:
        if self.aggregate is not None:  # which comes before the head that tells of the end is looked at
            return 100
        head = self.head
        if head is None or not head.total:
            return 0
        done = head.succeeded + head.failed + head.timed_out + head.skipped + head.task_cancelled
        return 100 * done // head.total

    def news(self, head: RunHead | None) -> None:
        if head is not None and (self.head is None or head.version != self.head.version):
            self.head = head
            self.changed.set()

    def fails(self, fault: Exception) -> None:
        self.fault = fault
        self.changed.set()

    def ends(self, aggregate: str) -> None:
        self.aggregate = aggregate
        self.changed.set()


class Runs:
    def __init__(
        self,
        client: Any,
        broker: Broker,
        store: Store,
        *,
        names: QueueNames,
        keep: float,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
    ) -> None:
        self._client = client
        self._broker = broker
        self._store = store
        self._names = names
        self._keep = max(60, int(keep))
        self._clock = clock
        self._entropy = entropy
        self._telemetry = telemetry
        self._followed: dict[str, Followed] = {}

    @property
    def replies(self) -> str:
        return self._names.physical(REPLIES)

    def follow(self, run_id: str) -> Followed:
        followed = Followed(run_id, asyncio.get_running_loop().time())
        if (before := self._followed.get(run_id)) is not None:
            before.fails(Overtaken(followed))
        self._followed[run_id] = followed
        return followed

    def leave(self, followed: Followed) -> None:
        followed.left.set()
        if self._followed.get(followed.run_id) is followed:
            del self._followed[followed.run_id]

    async def is_started(self, run_id: str) -> bool:
        return run_id in await self._store.heads([run_id])

    async def start(self, run_id: str, request: bytes) -> None:
        """Asks for the run; asking twice gives one. Raises BrokerError."""
        message = Message(
            correlation_id=run_id,
            tipo_evento=naming.START_RUN,
            payload=msgspec.Raw(request),
            timestamp=to_iso(self._clock.now()),
            responder_em=self.replies,
        )
        await self._broker.publish([Outgoing(self._names.requests, encode_message(message))])

    # -- following --------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """For ever; a store or a Redis that is away is asked again."""
        while True:
            await asyncio.sleep(POLL)
            if self._followed:
                try:
                    await self._look()
                except OraculoError as error:
                    self._telemetry.emit(LoopFailed("bridge bullmq", f"runs cannot be followed: {error}"))

    async def _look(self) -> None:
        """Raises WrittenByNewer for a run that cannot be read, once the others were looked at."""
        unreadable: dict[str, WrittenByNewer] = {}
        for run_ids in pages(list(self._followed), PAGE):
            heads, strange = await readable(self._store.heads, run_ids)
            unreadable |= strange
            for run_id in run_ids:
                if (followed := self._followed.get(run_id)) is not None:
                    followed.news(heads.get(run_id))
        await self._look_for_aggregates()
        await self._look_for_refusals()
        for error in unreadable.values():
            raise error

    async def _look_for_aggregates(self) -> None:
        ended = [one for one in self._followed.values() if one.head and one.head.status is not RunStatus.RUNNING]
        ended = [one for one in ended if one.aggregate is None and one.fault is None][:PAGE]
        if not ended:
            return
        now = asyncio.get_running_loop().time()
        for followed, aggregate in zip(
            ended, await self._client.mget([self._key(one.run_id) for one in ended]), strict=True
        ):
            if aggregate is not None:
                followed.ends(aggregate)
            elif self._was_delivered(followed):
                followed.delivered_since = followed.delivered_since or now
                if now - followed.delivered_since > LOST_AFTER:
                    followed.fails(Lost(f"run {followed.run_id} ended before, and its aggregate is not kept here"))

    def _was_delivered(self, followed: Followed) -> bool:
        assert followed.head is not None
        mine = [one for one in followed.head.deliveries if one.target == REPLIES]
        return all(one.status is DeliveryStatus.DELIVERED for one in mine)

    async def _look_for_refusals(self) -> None:
        """A request that is refused goes to the dead letters with the reason, and no run comes of it."""
        now = asyncio.get_running_loop().time()
        silent = {
            one.run_id: one
            for one in self._followed.values()
            if one.head is None and one.fault is None and now - one.since > REFUSAL_AFTER
        }
        if not silent:
            return
        async for letter in _letters_of(self._broker, self._names.requests):
            run_id = correlation_id_of(letter.body) or correlation_id_at_start(letter.body)  # it may be cut
            if (followed := silent.pop(run_id or "", None)) is not None:
                # Taken away first: whoever asked is told, and asks anew if nobody lives to tell it.
                await self._broker.discard(self._names.requests, [letter.id])
                # Of the message around the request whoever wrote the job knows nothing.
                followed.fails(RequestRefused(letter.reason.removeprefix("payload.")))
        for followed in silent.values():  # it may only be slow: looked for again later
            followed.since = now

    # -- aggregates -------------------------------------------------------------------------------------------

    async def take(self, subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
        """Puts them where every bridge finds them, and tells the job that waits here."""
        for number, delivery in enumerate(deliveries):
            try:
                message = decode_message(delivery.body)
            except InvalidInput as error:
                if await subscription.dead_letter(delivery, str(error)):
                    self._telemetry.emit(DeadLettered(REPLIES, str(error)))
                continue
            aggregate = bytes(message.payload).decode()
            await self._keep_surely(subscription, deliveries[number:], self._key(message.correlation_id), aggregate)
            if (followed := self._followed.get(message.correlation_id)) is not None:
                followed.ends(aggregate)
            await subscription.ack([delivery])

    async def _keep_surely(
        self, subscription: Subscription, held: Sequence[Delivery], key: str, aggregate: str
    ) -> None:
        """Waits for Redis as long as it takes, whatever it says: given back, they would come again only so often."""
        backoff = Backoff(self._entropy)
        while True:
            try:
                await self._client.set(key, aggregate, ex=self._keep)
                return
            except (RedisError, OSError) as error:
                self._telemetry.emit(LoopFailed("bridge bullmq", f"aggregates wait for Redis: {error}"))
            await backoff.pause()
            await subscription.extend(held)

    def _key(self, run_id: str) -> str:
        return f"oraculo:{self._names.prefix}ponte-bullmq:aggregate:{run_id}"


async def _letters_of(broker: Broker, queue: str) -> Any:
    after, seen = None, 0
    while seen < MOST_LETTERS:
        try:
            page = await broker.dead_letters(queue, limit=PAGE, after=after)
        except BrokerError as error:
            _log.warning("the dead letters cannot be looked at", queue=queue, reason=str(error))
            return
        for letter in page:
            yield letter
        if not page:
            return
        after, seen = page[-1].id, seen + len(page)
