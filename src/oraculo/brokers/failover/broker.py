"""Several brokers behind one port: probes, publishing and administration."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import TypeVar
from weakref import WeakSet

import msgspec

from oraculo.brokers.dead_letter_page import DeadLetterPage
from oraculo.brokers.failover.consumer import FailoverConsumer
from oraculo.brokers.failover.member import WORKS_AGAIN, Member, reason_of
from oraculo.brokers.failover.routing import Routing
from oraculo.errors import BrokerError, BrokerUnavailable, QueueUnavailable
from oraculo.ports.broker import BrokerStatus, Capabilities, Outgoing, Receipt
from oraculo.ports.broker_admin import DEAD_LETTER_ID_SEPARATOR, DeadLetter, FullBroker, NotAnId, QueueState

PROBE_PAUSE = 1.0  # seconds between two probes of a broker that is down
LONGEST_PROBE_PAUSE = 5.0
PULSE = 3.0  # seconds between two probes of a broker that is up, because it may freeze
PROBE_PATIENCE = 4.0  # seconds after which a broker that does not answer a probe counts as down
CHECK_PATIENCE = 1.5  # seconds that `check` gives each broker

T = TypeVar("T")


class FailoverBroker:
    """Several brokers in order of preference, each with its own name."""

    def __init__(self, brokers: Sequence[FullBroker]) -> None:
        self._members = [Member(broker) for broker in brokers]
        self._probes: list[asyncio.Task[None]] = []
        self._lifecycle = asyncio.Lock()  # held while starting and closing
        self._consumers: WeakSet[FailoverConsumer] = WeakSet()

    @property
    def name(self) -> str:
        return ", ".join(member.name for member in self._members)

    @property
    def capabilities(self) -> Capabilities:
        """Return what every one of the brokers can do, because any of them may be used."""
        each = [member.broker.capabilities for member in self._members]
        return Capabilities(
            durable=all(one.durable for one in each),
            shared=all(one.shared for one in each),
            priorities=all(one.priorities for one in each),
            counts_consumers=all(one.counts_consumers for one in each),
            peeks=all(one.peeks for one in each),
            drops_repeats=all(one.drops_repeats for one in each),
            lists_queues=all(one.lists_queues for one in each),
        )

    def statuses(self) -> Sequence[BrokerStatus]:
        return [member.status() for member in self._members]

    def behind(self) -> Sequence[FullBroker]:
        return [member.broker for member in self._members]

    # -- the brokers ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all brokers; one that works is enough, and the others are probed until they work.

        Raises BrokerUnavailable while one of them may still come up, and BrokerError when all refused.
        """
        async with self._lifecycle:
            if self._probes:
                return
            faults = await asyncio.gather(*(self._start(member) for member in self._members))
            if all(faults):
                await asyncio.gather(*(member.broker.close() for member in self._members))
                none_works = self._none_works()
                raise BrokerError(str(none_works)) if all(map(_is_refusal, faults)) else none_works
            self._probes = [asyncio.create_task(self._keep_probing(member)) for member in self._members]

    async def _start(self, member: Member) -> Exception | None:
        """Start one broker. One that refuses is left out like one that is away."""
        if fault := await _fault_of(member, member.broker.start()):
            return fault
        member.recover()
        return None

    async def _keep_probing(self, member: Member) -> None:
        pause = PROBE_PAUSE
        while True:
            await asyncio.sleep(PULSE if member.is_up else pause)
            pause = PROBE_PAUSE if await self._is_well(member) else min(pause * 2, LONGEST_PROBE_PAUSE)

    async def _is_well(self, member: Member) -> bool:
        if not await _succeeds(member, _probe(member.broker)):
            return False
        is_back = not member.is_up
        member.recover()
        if is_back:
            await self._declare_again(member)
        return member.is_up

    async def _declare_again(self, member: Member) -> None:
        """Create the queues that are read here on a broker that is back, and is in use already.

        A consumer with a full prefetch subscribes later, and RabbitMQ drops messages for a missing queue silently.
        Queues are created one by one, so that one that is refused or takes forever does not stop the others.
        """
        for queue in {consumer.queue for consumer in self._consumers if not consumer.is_closed}:
            try:
                async with asyncio.timeout(PROBE_PATIENCE):
                    await member.broker.declare([queue])
            except Exception:  # noqa: BLE001 - after any error a probe decides whether the broker is there
                if not await _succeeds(member, _probe(member.broker)):
                    return

    async def close(self) -> None:
        async with self._lifecycle:
            probes, self._probes = self._probes, []
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)
            await asyncio.gather(*(consumer.close() for consumer in self._consumers))
            self._consumers.clear()
            await asyncio.gather(*(member.broker.close() for member in self._members))
            for member in self._members:
                member.fail("closed")

    async def check(self) -> str:
        """Return the versions of the brokers that answer soon. One is enough: probes find a frozen broker."""
        said: dict[str, str] = {}
        versions = await asyncio.gather(*(self._version(member, said) for member in self._up()))
        if not any(versions):
            raise self._none_works(said)
        return "; ".join(filter(None, versions))

    async def _version(self, member: Member, said: dict[str, str]) -> str | None:
        try:
            async with asyncio.timeout(CHECK_PATIENCE):
                return await member.attempt(member.broker.check())
        except (BrokerError, TimeoutError) as error:
            said[member.name] = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        return None

    def _up(self) -> list[Member]:
        return [member for member in self._members if member.is_up]

    def _none_works(self, said: Mapping[str, str] = MappingProxyType({})) -> BrokerUnavailable:
        """Return the error that names why each broker failed. A reason in `said` goes before the broker's trouble."""
        whys = {member.name: said.get(member.name) or member.trouble or WORKS_AGAIN for member in self._members}
        return BrokerUnavailable("no broker works: " + "; ".join(f"{name}: {why}" for name, why in whys.items()))

    async def _with_each(
        self, call: Callable[[FullBroker], Awaitable[T]], *, all_take: bool = False
    ) -> list[tuple[Member, T]]:
        """Return the answer of each broker that works. A broker that refuses does not stop the others.

        Raises when none answers or, with `all_take`, when a queue of one of them did not take something.
        """
        answers: list[tuple[Member, T]] = []
        refusal: BrokerError | None = None
        for member in self._up():
            try:
                answers.append((member, await member.attempt(call(member.broker))))
            except BrokerError as error:
                if isinstance(error, QueueUnavailable) or not isinstance(error, BrokerUnavailable):
                    refusal = error
        if all_take and isinstance(refusal, QueueUnavailable):
            raise refusal
        if not answers:
            raise refusal or self._none_works()
        return answers

    # -- messages -------------------------------------------------------------------------------------------------

    async def declare(self, queues: Sequence[str]) -> None:
        await self._with_each(lambda broker: broker.declare(queues))

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        """Publish to the best broker. An answer prefers the broker that delivered its command."""
        if not messages:
            return []
        routing = Routing(messages)
        for preferred, places in routing.by_preference().items():
            await self._publish(routing, places, preferred)
        return routing.receipts(len(self._members), self._none_works())

    async def _publish(self, routing: Routing, places: Sequence[int], preferred: str | None) -> None:
        """Offer the messages to one broker after the other. A broker whose queue is stuck comes last."""
        left, passed_over = list(places), list[tuple[Member, Collection[int]]]()
        asked: list[Member] = []
        while left and (member := self._best(preferred, asked)) is not None:
            asked.append(member)
            if stuck := routing.stuck_at(member, left):
                passed_over.append((member, stuck))
            offered = [place for place in left if place not in stuck]
            refused = await routing.offer(member, offered)
            left = [place for place in left if place in stuck or place in refused]
        for member, stuck in passed_over:
            if member.is_up:
                offered = [place for place in left if place in stuck]
                refused = await routing.offer(member, offered)
                left = [place for place in left if place not in offered or place in refused]

    def _best(self, preferred: str | None, asked: Collection[Member]) -> Member | None:
        """Return the next broker to ask. A better one may have come back while another hung."""
        left = [member for member in self._up() if member not in asked]
        return min(left, key=lambda member: (member.name != preferred, member.is_deaf), default=None)

    async def consume(self, queue: str, *, prefetch: int) -> FailoverConsumer:
        if not self._probes:
            raise self._none_works()
        consumer = FailoverConsumer(self._members, queue, prefetch)
        await consumer.open()
        self._consumers.add(consumer)
        return consumer

    # -- looking ----------------------------------------------------------------------------------------------------

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        found: dict[str, dict[str, QueueState]] = {}
        for member, states in await self._with_each(lambda broker: broker.queues(names)):
            for state in states:
                found.setdefault(state.queue, {})[member.name] = state
        return [_sum(queue, at) for queue, at in found.items()]

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        """Return the dead letters of the first broker, then those of the next. An id begins with its broker's name.

        Where the queue does not work at one broker, the others are still shown.
        """
        first, place = self._place(after)
        page = DeadLetterPage(limit)
        failure: QueueUnavailable | None = None
        for member in self._members[first:]:
            if member.is_up and not page.is_full:
                asking = member.broker.dead_letters(queue, limit=limit - len(page.letters), after=place)
                try:
                    page.fill(_renamed(letter, member.name) for letter in await member.attempt(asking))
                except QueueUnavailable as error:
                    failure = error
            place = None
        if failure is not None and not page.letters:
            raise failure
        return page.letters

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        for member in self._members:
            own = None if ids is None else _own_ids(member, ids)
            if own or (own is None and member.is_up):
                looking = member.broker.look_through(queue, partial(_show, see, member.name), own)
                # Without ids, a queue that does not work is passed over, like a broker that is away.
                with suppress(QueueUnavailable) if own is None else nullcontext():
                    await member.attempt(looking)

    def _place(self, after: str | None) -> tuple[int, str | None]:
        if after is None:
            return 0, None
        name, separator, letter_id = after.partition(DEAD_LETTER_ID_SEPARATOR)
        for number, member in enumerate(self._members):
            if separator and member.name == name:
                return number, letter_id
        raise NotAnId(after)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> int:
        if ids is None:
            moved = await self._with_each(lambda broker: broker.redrive(queue), all_take=True)
            return sum(count for _, count in moved)
        return await self._for_owners(ids, lambda broker, own: broker.redrive(queue, own))

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        return await self._for_owners(ids, lambda broker, own: broker.discard(queue, own))

    async def remove(self, queues: Sequence[str]) -> None:
        """Remove queues from every broker that works. One that is away keeps them."""
        await self._with_each(lambda broker: broker.remove(queues))

    async def _for_owners(self, ids: Sequence[str], call: Callable[[FullBroker, list[str]], Awaitable[int]]) -> int:
        """Ask each broker for its own dead letters. Raises its refusal only after all were asked."""
        count, refusal = 0, None
        for member in self._members:
            if own := _own_ids(member, ids):
                try:
                    count += await member.attempt(call(member.broker, own))
                except BrokerError as error:
                    refusal = refusal or error
        if refusal is not None:
            raise refusal
        return count


async def _probe(broker: FullBroker) -> None:
    await broker.start()
    await broker.check()


async def _succeeds(member: Member, call: Awaitable[object]) -> bool:
    return await _fault_of(member, call) is None


async def _fault_of(member: Member, call: Awaitable[object]) -> Exception | None:
    """Return the fault of a call and take the broker out of use.

    A fault in one adapter must end neither the start nor the probes of the others.
    """
    try:
        async with asyncio.timeout(PROBE_PATIENCE):
            await call
    except Exception as error:  # noqa: BLE001
        member.fail("no answer to a probe" if isinstance(error, TimeoutError) else reason_of(error))
        return error
    return None


def _is_refusal(fault: Exception | None) -> bool:
    """Return True for a refusal, which a retry does not change."""
    return isinstance(fault, BrokerError) and not isinstance(fault, BrokerUnavailable)


def _sum(queue: str, at: Mapping[str, QueueState]) -> QueueState:
    """Add up the counts of one queue. Consumers are not added, because each of ORÁCULO's listens to every broker."""
    each = at.values()
    held = [state.unacked for state in each if state.unacked is not None]
    return QueueState(
        queue,
        sum(state.ready for state in each),
        sum(held) if len(held) == len(at) else None,
        sum(state.dead_letters for state in each),
        max((state.consumers for state in each if state.consumers is not None), default=None),
        sum(state.delayed for state in each),
        at,
    )


def _own_ids(member: Member, ids: Collection[str]) -> list[str]:
    mine = member.name + DEAD_LETTER_ID_SEPARATOR
    return [letter_id.removeprefix(mine) for letter_id in ids if letter_id.startswith(mine)]


def _show(see: Callable[[DeadLetter], None], broker: str, letter: DeadLetter) -> None:
    see(_renamed(letter, broker))


def _renamed(letter: DeadLetter, broker: str) -> DeadLetter:
    return msgspec.structs.replace(letter, id=f"{broker}{DEAD_LETTER_ID_SEPARATOR}{letter.id}")
