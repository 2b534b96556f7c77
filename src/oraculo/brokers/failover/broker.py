"""Several brokers behind the port of one."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TypeVar
from weakref import WeakSet

import msgspec

from oraculo.brokers.dead_letter_page import LetterPage
from oraculo.brokers.failover.branch import WORKS_AGAIN, Branch, told
from oraculo.brokers.failover.consumer import FailoverConsumer
from oraculo.brokers.failover.offers import Group, Outcome
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge
from oraculo.ports.broker import (
    LETTER_SEPARATOR,
    Broker,
    Capabilities,
    DeadLetter,
    Link,
    NotAnId,
    NotTaken,
    Outgoing,
    QueueState,
)

PROBE_PAUSE = 1.0  # seconds between two looks at a broker that is down
LONGEST_PROBE_PAUSE = 5.0
PULSE = 3.0  # seconds between two looks at one that is up: a frozen one says nothing by itself
PROBE_PATIENCE = 4.0  # seconds after which a broker that does not answer a probe counts as down
MOST_DECLARED = 10_000  # queues that one which is back gets again; who publishes or consumes makes the others
CHECK_PATIENCE = 1.5  # seconds for each of them when somebody asks whether all is well

T = TypeVar("T")


class FailoverBroker:
    """`brokers` in order of preference, each with a name of its own."""

    def __init__(self, brokers: Sequence[Broker]) -> None:
        self._branches = [Branch(broker) for broker in brokers]
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
            peeks=all(one.peeks for one in each),
            drops_repeats=all(one.drops_repeats for one in each),
            removes_safely=all(one.removes_safely for one in each),
            lists_queues=all(one.lists_queues for one in each),
        )

    def links(self) -> Sequence[Link]:
        return [branch.link() for branch in self._branches]

    def behind(self) -> Sequence[Broker]:
        return [branch.broker for branch in self._branches]

    # -- the brokers ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Content with one of them; the others are tried again and again. Raises BrokerUnavailable while one may still
        come up, and BrokerError when all say no."""
        async with self._turn:
            if self._probes:
                return
            faults = await asyncio.gather(*(self._start(branch) for branch in self._branches))
            if all(faults):
                await asyncio.gather(*(branch.broker.close() for branch in self._branches))
                none_works = self._none_works({})
                raise BrokerError(str(none_works)) if all(map(_says_no, faults)) else none_works
            self._probes = [asyncio.create_task(self._keep_probing(branch)) for branch in self._branches]

    async def _start(self, branch: Branch) -> Exception | None:
        """One whose settings are wrong, so that it says no, is as bad as one that is away: the others serve."""
        if fault := await _fault_of(branch, branch.broker.start()):
            return fault
        branch.recover()
        return None

    async def _keep_probing(self, branch: Branch) -> None:
        pause = PROBE_PAUSE
        while True:
            await asyncio.sleep(PULSE if branch.is_up else pause)
            pause = PROBE_PAUSE if await self._is_well(branch) else min(pause * 2, LONGEST_PROBE_PAUSE)

    async def _is_well(self, branch: Branch) -> bool:
        if not await _succeeds(branch, _probe(branch.broker)):
            return False
        is_back = not branch.is_up
        branch.recover()
        if is_back:
            await self._declare_again(branch)
        return branch.is_up

    async def _declare_again(self, branch: Branch) -> None:
        """While it is used already: who publishes or consumes makes the queue anyway. One by one, so that a queue which
        it refuses, or which takes for ever, keeps neither the others nor the broker. Also those that are read: a
        consumer whose hands are full makes its own only when it has room again."""
        read = [consumer.queue for consumer in self._consumers if not consumer.is_closed]
        for queue in dict.fromkeys([*self._declared, *read]):
            try:
                async with asyncio.timeout(PROBE_PATIENCE):
                    await branch.broker.declare([queue])
            except Exception:  # noqa: BLE001 - whatever it is, the broker is asked whether it is there
                if not await _succeeds(branch, _probe(branch.broker)):
                    return

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
        said: dict[str, str] = {}
        versions = await asyncio.gather(*(self._version(branch, said) for branch in self._up()))
        if not any(versions):
            raise self._none_works(said)
        return "; ".join(filter(None, versions))

    async def _version(self, branch: Branch, said: dict[str, str]) -> str | None:
        try:
            async with asyncio.timeout(CHECK_PATIENCE):
                return await branch.attempt(branch.broker.check())
        except (BrokerError, TimeoutError) as error:
            said[branch.name] = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        return None

    def _up(self) -> list[Branch]:
        return [branch for branch in self._branches if branch.is_up]

    def _none_works(self, said: Mapping[str, str]) -> BrokerUnavailable:
        """`said` is why the call failed, by broker: by now a probe may have found it well."""
        whys = {branch.name: said.get(branch.name) or branch.trouble or WORKS_AGAIN for branch in self._branches}
        return BrokerUnavailable("no broker works: " + "; ".join(f"{name}: {why}" for name, why in whys.items()))

    async def _with_each(
        self, call: Callable[[Broker], Awaitable[T]], *, all_take: bool = False
    ) -> list[tuple[Branch, T]]:
        """What each of those that work answers; one that says no does not keep the others. Raises when none answers;
        `all_take`: or when one of them did not take something."""
        answers: list[tuple[Branch, T]] = []
        said: dict[str, str] = {}
        refusal: BrokerError | None = None
        for branch in self._up():
            try:
                answers.append((branch, await branch.attempt(call(branch.broker))))
            except NotTaken as error:
                refusal = error
            except BrokerUnavailable as error:
                said[branch.name] = str(error)
            except BrokerError as error:
                refusal = error
        if all_take and isinstance(refusal, NotTaken):
            raise refusal
        if not answers:
            raise refusal or self._none_works(said)
        return answers

    # -- messages -------------------------------------------------------------------------------------------------

    async def declare(self, queues: Sequence[str]) -> None:
        self._remember(queues)
        await self._with_each(lambda broker: broker.declare(queues))

    def _remember(self, queues: Iterable[str]) -> None:
        """Forgets those that were declared longest ago: pipelines come and go, and the queues of each."""
        for queue in queues:
            self._declared.pop(queue, None)
            self._declared[queue] = None
        while len(self._declared) > MOST_DECLARED:
            del self._declared[next(iter(self._declared))]

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        """An answer goes back by the broker that brought its command, while that one works: whoever waits for it can be
        reached there."""
        outcome = Outcome(messages)
        for preferred, places in _by_preference(messages).items():
            try:
                await self._publish(outcome, places, preferred)
            except BrokerUnavailable as error:
                if not outcome.has_any:
                    raise
                outcome.refused(error)  # what others of the call were taken is not to be sent again
        return outcome.vias()

    async def _publish(self, outcome: Outcome, places: Sequence[int], preferred: str | None) -> None:
        """What one broker does not take because the queue is down there goes to the next, and while it is known to be
        so at once: a broker may take its time to say it again. It is asked when no other takes them. And so is one that
        does not let us read: what is done there for us would not be heard of."""
        group, passed_over = Group(outcome, places), list[tuple[Branch, Collection[int]]]()
        asked: list[Branch] = []
        while group.left and (branch := self._best(preferred, asked)) is not None:
            asked.append(branch)
            if down := group.known_to_be_down_at(branch):
                passed_over.append((branch, down))
            await group.offer(branch, [place for place in group.left if place not in down])
        for branch, down in passed_over:
            await group.offer(branch, [place for place in group.left if place in down and branch.is_up])
        if group.left and not group.was_answered:
            raise self._final(group.refusal, group.too_large_for) if group.refusal else self._none_works(group.said)

    def _best(self, preferred: str | None, asked: Collection[Branch]) -> Branch | None:
        """Return the next one to ask. While one hung, a better one may have come back."""
        left = [branch for branch in self._up() if branch not in asked]
        return min(left, key=lambda branch: (branch.name != preferred, branch.is_deaf), default=None)

    def _final(self, refusal: BrokerError, too_large_for: Collection[str]) -> BrokerError:
        """That a message is too large for one broker says nothing of those that were not asked, or did not answer."""
        if isinstance(refusal, MessageTooLarge) and any(one.name not in too_large_for for one in self._branches):
            return BrokerError(str(refusal))
        return refusal

    async def consume(self, queue: str, *, prefetch: int) -> FailoverConsumer:
        if not self._probes:
            raise self._none_works({})
        consumer = FailoverConsumer(self._branches, queue, prefetch)
        await consumer.open()
        self._consumers.add(consumer)
        return consumer

    # -- looking ----------------------------------------------------------------------------------------------------

    async def queues(self, names: Sequence[str] | None = None) -> Sequence[QueueState]:
        found: dict[str, dict[str, QueueState]] = {}
        for branch, states in await self._with_each(lambda broker: broker.queues(names)):
            for state in states:
                found.setdefault(state.queue, {})[branch.name] = state
        return [_sum(queue, at) for queue, at in found.items()]

    async def dead_letters(self, queue: str, *, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        """Those of the first broker, then those of the next: an id names its broker. One at which the queue does not
        work keeps nobody from seeing the others'."""
        first, place = self._place(after)
        page = LetterPage(limit)
        untold: NotTaken | None = None
        for branch in self._branches[first:]:
            if branch.is_up and not page.is_full:
                asking = branch.broker.dead_letters(queue, limit=limit - len(page.letters), after=place)
                try:
                    page.fill(_renamed(letter, branch.name) for letter in await branch.attempt(asking))
                except NotTaken as error:
                    untold = error
            place = None
        if untold is not None and not page.letters:
            raise untold
        return page.letters

    async def look_through(
        self, queue: str, see: Callable[[DeadLetter], None], ids: Collection[str] | None = None
    ) -> None:
        for branch in self._branches:
            own = None if ids is None else _own_ids(branch, ids)
            if own or (own is None and branch.is_up):
                looking = branch.broker.look_through(queue, partial(_show, see, branch.name), own)
                with suppress(NotTaken) if own is None else nullcontext():  # as for one that is not up
                    await branch.attempt(looking)

    def _place(self, after: str | None) -> tuple[int, str | None]:
        if after is None:
            return 0, None
        name, separator, letter_id = after.partition(LETTER_SEPARATOR)
        for number, branch in enumerate(self._branches):
            if separator and branch.name == name:
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
        """From every one that is there; one that is away keeps them, and does not get them again when it is back."""
        for queue in queues:
            self._declared.pop(queue, None)
        await self._with_each(lambda broker: broker.remove(queues))

    async def remove_unused(self, queues: Sequence[str]) -> Sequence[str]:
        """Remove them from every broker that is there. Return those that none of these has any more."""
        for queue in queues:
            self._declared.pop(queue, None)
        gone = [set(names) for _, names in await self._with_each(lambda broker: broker.remove_unused(queues))]
        return [queue for queue in queues if all(queue in each for each in gone)]

    async def _for_owners(self, ids: Sequence[str], call: Callable[[Broker, list[str]], Awaitable[int]]) -> int:
        """What one of them cannot do keeps nobody else's: it is told at the end."""
        count, refusal = 0, None
        for branch in self._branches:
            if own := _own_ids(branch, ids):
                try:
                    count += await branch.attempt(call(branch.broker, own))
                except BrokerError as error:
                    refusal = refusal or error
        if refusal is not None:
            raise refusal
        return count


async def _probe(broker: Broker) -> None:
    await broker.start()
    await broker.check()


async def _succeeds(branch: Branch, call: Awaitable[object]) -> bool:
    return await _fault_of(branch, call) is None


async def _fault_of(branch: Branch, call: Awaitable[object]) -> Exception | None:
    """Whatever it raises is the trouble of that broker alone: a fault of an adapter ends neither start nor probes."""
    try:
        async with asyncio.timeout(PROBE_PATIENCE):
            await call
    except Exception as error:  # noqa: BLE001
        branch.fail("no answer to a probe" if isinstance(error, TimeoutError) else told(error))
        return error
    return None


def _says_no(fault: Exception | None) -> bool:
    """A matter of settings, that waiting does not mend."""
    return isinstance(fault, BrokerError) and not isinstance(fault, BrokerUnavailable)


def _by_preference(messages: Sequence[Outgoing]) -> dict[str | None, list[int]]:
    """The numbers of the messages that prefer the same broker."""
    groups: dict[str | None, list[int]] = {}
    for number, message in enumerate(messages):
        groups.setdefault(message.prefer, []).append(number)
    return groups


def _sum(queue: str, at: Mapping[str, QueueState]) -> QueueState:
    """Consumers are not added up: each of ours listens to every broker."""
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


def _own_ids(branch: Branch, ids: Iterable[str]) -> list[str]:
    mine = branch.name + LETTER_SEPARATOR
    return [letter_id.removeprefix(mine) for letter_id in ids if letter_id.startswith(mine)]


def _show(see: Callable[[DeadLetter], None], broker: str, letter: DeadLetter) -> None:
    see(_renamed(letter, broker))


def _renamed(letter: DeadLetter, broker: str) -> DeadLetter:
    return msgspec.structs.replace(letter, id=f"{broker}{LETTER_SEPARATOR}{letter.id}")
