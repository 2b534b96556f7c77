"""Several brokers as one: each message goes to the first that works, and all that work are listened to.

A broker that refuses, breaks or does not confirm in time is passed over until a probe finds it well again. What went to
it and was not answered is sent again by the engine, which asks `links()`. So there may be duplicates, and order is not
kept across brokers; nothing is lost, and nothing waits for a broker that is gone while another works.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar
from weakref import WeakSet

from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import (
    Broker,
    Capabilities,
    Consumer,
    DeadLetter,
    Delivery,
    Link,
    NotTaken,
    Outgoing,
    QueueState,
)

PROBE_PAUSE = 1.0  # seconds between two looks at a broker that is down
LONGEST_PROBE_PAUSE = 5.0
PULSE = 3.0  # seconds between two looks at one that is up: a frozen one says nothing by itself
PROBE_PATIENCE = 4.0  # seconds after which a broker that does not answer a probe counts as down
CHECK_PATIENCE = 1.5  # seconds for each of them when somebody asks whether all is well
RESUBSCRIBE_PAUSE = 0.2
_SEPARATOR = ":"  # between a broker's name and the id of a dead letter in it

T = TypeVar("T")


class _Branch:
    """One of the brokers, and whether it is to be used now."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.name = broker.name
        self.trouble: str | None = "not connected yet"
        self.unheard: dict[str, None] = {}  # queues that it does not let us read
        self.usable = asyncio.Event()

    @property
    def is_up(self) -> bool:
        return self.trouble is None

    def fail(self, error: object) -> None:
        self.trouble = str(error) or type(error).__name__
        self.usable.clear()

    def recover(self) -> None:
        self.trouble = None
        self.usable.set()

    def link(self) -> Link:
        [seen] = self.broker.links()
        deaf = tuple(dict.fromkeys((*seen.deaf, *self.unheard)))
        return Link(self.name, self.trouble, seen.losses, deaf if self.is_up else (), seen.stuck)

    async def attempt(self, call: Awaitable[T]) -> T:
        """A call that fails because the broker cannot be reached takes it out of use."""
        try:
            return await call
        except NotTaken:  # by a broker that works
            raise
        except BrokerUnavailable as error:
            self.fail(error)
            raise


class _Outcome:
    """What became of the messages of one call, each known by its place among them."""

    def __init__(self, messages: Sequence[Outgoing]) -> None:
        self._messages = messages
        self._vias: list[str | None] = [None] * len(messages)
        self._down: set[int] = set()
        self._told: list[str] = []

    def messages_at(self, places: Sequence[int]) -> list[Outgoing]:
        return [self._messages[place] for place in places]

    def is_for(self, place: int, queues: Collection[str]) -> bool:
        message = self._messages[place]
        return message.reason is None and message.queue in queues

    def took(self, places: Sequence[int], vias: Sequence[str | None]) -> None:
        for place, via in zip(places, vias, strict=True):
            self._vias[place] = via

    def took_some(self, places: Sequence[int], refusal: NotTaken) -> list[int]:
        """Returns those that another broker may take: a limit that its owner set is not gone round."""
        self.took(places, refusal.vias)
        self.refused(refusal)
        left = [places[number] for number in sorted(refusal.down)]
        self._down |= set(left)
        return left

    def refused(self, error: BrokerError) -> None:
        self._told.append(str(error))

    def vias(self) -> Sequence[str]:
        """Raises NotTaken when one is missing."""
        vias = [via for via in self._vias if via is not None]
        if len(vias) == len(self._vias):
            return vias
        down = {place for place in self._down if self._vias[place] is None}
        raise NotTaken("; ".join(dict.fromkeys(self._told)), self._vias, down)


class _Group:
    """Messages of one call that prefer the same broker, offered to one broker after the other."""

    def __init__(self, outcome: _Outcome, places: Sequence[int]) -> None:
        self._outcome = outcome
        self.left = list(places)  # those that another broker may take
        self.is_known = False  # what became of each
        self.refusal: BrokerError | None = None

    def known_to_be_down_at(self, branch: _Branch) -> Collection[int]:
        queues = {queue for queue, _ in branch.link().stuck}
        return {place for place in self.left if self._outcome.is_for(place, queues)} if queues else ()

    async def offer(self, branch: _Branch, places: Sequence[int]) -> None:
        if not places:
            return
        try:
            left = await self._offered(branch, places)
        except BrokerUnavailable:
            return
        except BrokerError as error:
            if len(places) > 1 and not self.is_known:
                raise  # which of them it does not want will be found out one by one
            self.refusal = error
            left = await self._offered_singly(branch, places) if self.is_known else places
        else:
            self.is_known = True
        gone = set(places).difference(left)
        self.left = [place for place in self.left if place not in gone]

    async def _offered(self, branch: _Branch, places: Sequence[int]) -> Sequence[int]:
        """Returns those that it did not take and another may."""
        try:
            self._outcome.took(places, await branch.attempt(branch.broker.publish(self._outcome.messages_at(places))))
        except NotTaken as error:
            return self._outcome.took_some(places, error)
        return ()

    async def _offered_singly(self, branch: _Branch, places: Sequence[int]) -> Sequence[int]:
        """One of them it will never take; the others are taken already, or will be."""
        left: list[int] = []
        for number, place in enumerate(places):
            try:
                left += await self._offered(branch, [place])
            except BrokerUnavailable:
                return [*left, *places[number:]]
            except BrokerError as error:
                self._outcome.refused(error)
                left.append(place)
        return left


class FailoverBroker:
    """`brokers` in order of preference, each with a name of its own."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._branches = [_Branch(broker) for broker in brokers]
        self._declared: dict[str, None] = {}
        self._probes: list[asyncio.Task[None]] = []
        self._turn = asyncio.Lock()  # of starting and closing
        self._consumers: WeakSet[FailoverConsumer] = WeakSet()

    @property
    def name(self) -> str:
        return ", ".join(branch.name for branch in self._branches)

    @property
    def capabilities(self) -> Capabilities:
        """What every one of them can do: nobody knows beforehand which of them it will be."""
        each = [branch.broker.capabilities for branch in self._branches]
        return Capabilities(
            durable=all(one.durable for one in each),
            shared=all(one.shared for one in each),
            priorities=all(one.priorities for one in each),
            counts_consumers=all(one.counts_consumers for one in each),
            drops_repeats=all(one.drops_repeats for one in each),
        )

    def links(self) -> Sequence[Link]:
        return [branch.link() for branch in self._branches]

    # -- the brokers ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Content with one of them; the others are tried again and again."""
        async with self._turn:
            if self._probes:
                return
            await asyncio.gather(*(self._start(branch) for branch in self._branches))
            if not any(branch.is_up for branch in self._branches):
                await asyncio.gather(*(branch.broker.close() for branch in self._branches))
                raise self._none_works()
            self._probes = [asyncio.create_task(self._keep_probing(branch)) for branch in self._branches]

    async def _start(self, branch: _Branch) -> None:
        """One whose settings are wrong, so that it says no, is as bad as one that is away: the others serve."""
        try:
            async with asyncio.timeout(PROBE_PATIENCE):
                await branch.broker.start()
            branch.recover()
        except (BrokerError, TimeoutError) as error:
            branch.fail(_told(error))

    async def _keep_probing(self, branch: _Branch) -> None:
        pause = PROBE_PAUSE
        while True:
            await asyncio.sleep(PULSE if branch.is_up else pause)
            pause = PROBE_PAUSE if await self._is_well(branch) else min(pause * 2, LONGEST_PROBE_PAUSE)

    async def _is_well(self, branch: _Branch) -> bool:
        try:
            async with asyncio.timeout(PROBE_PATIENCE):
                await branch.broker.start()
                await branch.broker.check()
                if not branch.is_up:
                    await branch.broker.declare(list(self._declared))
        except (BrokerError, TimeoutError) as error:
            branch.fail(_told(error))
            return False
        branch.recover()
        return True

    async def close(self) -> None:
        async with self._turn:
            probes, self._probes = self._probes, []
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)
            await asyncio.gather(*(consumer.close() for consumer in self._consumers))
            self._consumers.clear()
            await asyncio.gather(*(branch.broker.close() for branch in self._branches))
            for branch in self._branches:
                branch.fail("closed")

    async def check(self) -> str:
        """Content with one that answers, and soon: a frozen one is the probes' business."""
        versions = await asyncio.gather(*(self._version(branch) for branch in self._up()))
        if not any(versions):
            raise self._none_works()
        return "; ".join(filter(None, versions))

    async def _version(self, branch: _Branch) -> str | None:
        with suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(CHECK_PATIENCE):
                return await branch.attempt(branch.broker.check())
        return None

    def _up(self) -> list[_Branch]:
        return [branch for branch in self._branches if branch.is_up]

    def _none_works(self) -> BrokerUnavailable:
        told = "; ".join(f"{branch.name}: {branch.trouble}" for branch in self._branches)
        return BrokerUnavailable(f"no broker works: {told}")

    async def _with_each(self, call: Callable[[Broker], Awaitable[T]]) -> list[tuple[_Branch, T]]:
        """What each of those that work answers; one that says no does not keep the others. Raises when none answers."""
        answers: list[tuple[_Branch, T]] = []
        refusal: BrokerError | None = None
        for branch in self._up():
            try:
                answers.append((branch, await branch.attempt(call(branch.broker))))
            except NotTaken as error:
                refusal = error
            except BrokerUnavailable:
                continue
            except BrokerError as error:
                refusal = error
        if not answers:
            raise refusal or self._none_works()
        return answers

    # -- messages -------------------------------------------------------------------------------------------------

    async def declare(self, queues: Sequence[str]) -> None:
        self._declared |= dict.fromkeys(queues)
        await self._with_each(lambda broker: broker.declare(queues))

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        """An answer goes back by the broker that brought its command, while that one works: whoever waits for it can be
        reached there."""
        outcome = _Outcome(messages)
        for preferred, places in _by_preference(messages).items():
            await self._publish(outcome, places, preferred)
        return outcome.vias()

    async def _publish(self, outcome: "_Outcome", places: Sequence[int], preferred: str | None) -> None:
        """What one broker does not take because the queue is down there goes to the next, and while it is known to be
        so at once: a broker may take its time to say it again. It is asked when no other takes them."""
        group, passed_over = _Group(outcome, places), list[tuple[_Branch, Collection[int]]]()
        for branch in sorted(self._up(), key=lambda branch: branch.name != preferred):
            if down := group.known_to_be_down_at(branch):
                passed_over.append((branch, down))
            await group.offer(branch, [place for place in group.left if place not in down])
        for branch, down in passed_over:
            await group.offer(branch, [place for place in group.left if place in down and branch.is_up])
        if group.left and not group.is_known:
            raise group.refusal or self._none_works()

    async def consume(self, queue: str, *, prefetch: int) -> "FailoverConsumer":
        if not self._probes:
            raise BrokerUnavailable("the brokers are closed: call start() first")
        self._declared[queue] = None
        consumer = FailoverConsumer(self._branches, queue, prefetch)
        await consumer.open()
        self._consumers.add(consumer)
        return consumer

    # -- looking ----------------------------------------------------------------------------------------------------

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        found: dict[str, QueueState] = {}
        for _, states in await self._with_each(lambda broker: broker.queues(names)):
            for state in states:
                found[state.queue] = _sum(found[state.queue], state) if state.queue in found else state
        return list(found.values())

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        """Those of the first broker, then those of the next: an id names its broker."""
        first, place = self._place(after)
        letters: list[DeadLetter] = []
        for branch in self._branches[first:]:
            if branch.is_up and len(letters) < limit:
                found = await branch.attempt(branch.broker.dead_letters(queue, limit=limit - len(letters), after=place))
                letters += [_renamed(letter, branch.name) for letter in found]
            place = None
        return letters

    def _place(self, after: str | None) -> tuple[int, str | None]:
        if after is None:
            return 0, None
        name, separator, letter_id = after.partition(_SEPARATOR)
        for number, branch in enumerate(self._branches):
            if separator and branch.name == name:
                return number, letter_id
        raise BrokerError(f"after: not the id of a dead letter: {after[:80]!r}")

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        if ids is None:
            return sum(count for _, count in await self._with_each(lambda broker: broker.redrive(queue)))
        return await self._for_owners(ids, lambda broker, own: broker.redrive(queue, own))

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        return await self._for_owners(ids, lambda broker, own: broker.discard(queue, own))

    async def _for_owners(self, ids: Sequence[str], call: Callable[[Broker, list[str]], Awaitable[int]]) -> int:
        count = 0
        for branch in self._branches:
            mine = branch.name + _SEPARATOR
            own = [letter_id.removeprefix(mine) for letter_id in ids if letter_id.startswith(mine)]
            if own:
                count += await branch.attempt(call(branch.broker, own))
        return count


class FailoverConsumer:
    """One subscription to a queue on every broker; what one of them had not settled when it was lost is that broker's,
    and settling it does nothing."""

    def __init__(self, branches: Sequence[_Branch], queue: str, prefetch: int) -> None:
        self._branches = branches
        self._queue = queue
        self._prefetch = prefetch
        self._feeds: list[asyncio.Task[None]] = []
        self._inner: dict[_Branch, Consumer] = {}
        self._waiting: list[Delivery] = []  # taken from a broker and not yet asked for
        self._out: dict[int | str, tuple[Consumer, Delivery]] = {}  # by our token: whose it is
        self._tokens = 0
        self._changed = asyncio.Condition()
        self._closed = False

    async def open(self) -> None:
        """Subscribes where it can at once, so that a caller knows it is heard; the rest follows."""
        subscribed = [await self._subscribe(branch) for branch in self._branches if branch.is_up]
        if not any(subscribed):
            raise BrokerUnavailable(f"no broker works that could be asked for {self._queue}")  # nothing was opened
        self._feeds = [asyncio.create_task(self._feed(branch)) for branch in self._branches]

    async def _subscribe(self, branch: _Branch) -> bool:
        """One that says no is told as deaf on this queue, and asked again and again."""
        try:
            consuming = branch.broker.consume(self._queue, prefetch=self._prefetch)
            self._inner[branch] = await branch.attempt(consuming)
        except BrokerUnavailable:
            return False
        except BrokerError:
            branch.unheard[self._queue] = None
            return False
        branch.unheard.pop(self._queue, None)
        return True

    async def _feed(self, branch: _Branch) -> None:
        """Brings what arrives on one broker, and subscribes again whenever it was lost and is back."""
        while not self._closed:
            consumer = self._inner.get(branch)
            if consumer is None:
                await branch.usable.wait()
                if not await self._subscribe(branch):
                    await asyncio.sleep(PROBE_PAUSE)
                continue
            try:
                await self._bring(branch, consumer)
            except Exception:  # noqa: BLE001 - whatever an adapter raises, a feed that ends would end in silence
                # No reason to give up the whole broker: it may be this consumer alone. A publish or a probe will tell.
                await self._drop(branch, consumer)
                await asyncio.sleep(RESUBSCRIBE_PAUSE)
            else:
                await self._drop(branch, consumer)

    async def _bring(self, branch: _Branch, consumer: Consumer) -> None:
        while not self._closed:
            async with self._changed:
                await self._changed.wait_for(lambda: self._closed or self._room > 0)
            if self._closed or not (deliveries := await consumer.take(max(1, self._room))):
                return
            async with self._changed:
                self._waiting += [self._adopt(branch.name, consumer, delivery) for delivery in deliveries]
                self._changed.notify_all()

    @property
    def _room(self) -> int:
        return self._prefetch - len(self._out)

    def _adopt(self, via: str, consumer: Consumer, delivery: Delivery) -> Delivery:
        """Under a token of ours: two brokers, or two lives of one consumer, may give the same."""
        self._tokens += 1
        self._out[self._tokens] = (consumer, delivery)
        return Delivery(delivery.queue, delivery.body, self._tokens, delivery.redeliveries, via)

    async def _drop(self, branch: _Branch, consumer: Consumer) -> None:
        """A consumer that is lost takes with it what was not settled: the broker will deliver it again."""
        self._inner.pop(branch, None)
        with suppress(BrokerError):
            await consumer.close()
        async with self._changed:
            lost = {token for token, (owner, _) in self._out.items() if owner is consumer}
            for token in lost:
                del self._out[token]
            self._waiting = [delivery for delivery in self._waiting if delivery.token not in lost]
            self._changed.notify_all()

    async def take(self, limit: int) -> Sequence[Delivery]:
        if limit < 1:
            raise BrokerError(f"limit: must be at least 1, got {limit}")
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or (self._waiting and self._handed < self._prefetch))
            if self._closed:
                return []
            count = min(limit, self._prefetch - self._handed)
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
            return taken

    @property
    def _handed(self) -> int:
        return len(self._out) - len(self._waiting)

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        for consumer, own in _by_owner(self._settle(delivery) for delivery in deliveries):
            await self._settle_with(consumer, consumer.ack(own))
        await self._made_room()

    async def retry(self, delivery: Delivery, delay: float, reason: str) -> None:
        if (owned := self._settle(delivery)) is not None:
            await self._settle_with(owned[0], owned[0].retry(owned[1], delay, reason))
        await self._made_room()

    async def dead_letter(self, delivery: Delivery, reason: str) -> None:
        if (owned := self._settle(delivery)) is not None:
            await self._settle_with(owned[0], owned[0].dead_letter(owned[1], reason))
        await self._made_room()

    async def extend(self, deliveries: Sequence[Delivery]) -> None:
        """And what waits here, which nobody else knows of."""
        held = dict.fromkeys(delivery.token for delivery in (*deliveries, *self._waiting))
        for consumer, own in _by_owner(self._out.get(token) for token in held):
            with suppress(BrokerUnavailable):
                await consumer.extend(own)

    async def _settle_with(self, consumer: Consumer, settling: Awaitable[None]) -> None:
        """A broker that cannot be told will deliver it again. Its consumer is closed, and made again by its feed, so
        that what could not be settled does not fill its prefetch."""
        try:
            await settling
        except BrokerUnavailable:
            with suppress(BrokerError):
                await consumer.close()

    def _settle(self, delivery: Delivery) -> tuple[Consumer, Delivery] | None:
        return self._out.pop(delivery.token, None)

    async def _made_room(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def close(self) -> None:
        if self._closed:
            return
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
        for feed in self._feeds:
            feed.cancel()
        await asyncio.gather(*self._feeds, return_exceptions=True)
        consumers = list(self._inner.values())
        await asyncio.gather(*(consumer.close() for consumer in consumers), return_exceptions=True)
        self._inner.clear()
        self._out.clear()
        self._waiting.clear()


def _told(error: BrokerError | TimeoutError) -> object:
    return "no answer to a probe" if isinstance(error, TimeoutError) else error


def _by_preference(messages: Sequence[Outgoing]) -> dict[str | None, list[int]]:
    """The numbers of the messages that prefer the same broker."""
    groups: dict[str | None, list[int]] = {}
    for number, message in enumerate(messages):
        groups.setdefault(message.prefer, []).append(number)
    return groups


def _by_owner(
    owned: Iterable[tuple[Consumer, Delivery] | None],
) -> Iterable[tuple[Consumer, list[Delivery]]]:
    groups: dict[int, tuple[Consumer, list[Delivery]]] = {}
    for one in owned:
        if one is not None:
            groups.setdefault(id(one[0]), (one[0], []))[1].append(one[1])
    return groups.values()


def _sum(one: QueueState, other: QueueState) -> QueueState:
    """Consumers are not added up: each of ours listens to every broker."""
    return QueueState(
        one.queue,
        one.ready + other.ready,
        one.unacked + other.unacked,
        one.dead_letters + other.dead_letters,
        max((count for count in (one.consumers, other.consumers) if count is not None), default=None),
        one.delayed + other.delayed,
    )


def _renamed(letter: DeadLetter, broker: str) -> DeadLetter:
    return DeadLetter(
        f"{broker}{_SEPARATOR}{letter.id}", letter.queue, letter.body, letter.reason, letter.at, letter.redeliveries
    )
