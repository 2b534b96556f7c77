"""How messages get into queues, and what can be known of those that did not.

A nack has no reason: a full queue makes it, and one whose members are down. One that shows no message is tried once
more, for it may have been emptied since, and if that does not help it is down. A queue may also say nothing: without
its majority, to a channel that knew it before; a channel that did not waits for it, and with it all that is behind.
So whatever is in doubt is tried again on a channel of its own, and what is for a queue that did not work of late is
sent on one to begin with: it holds up no other.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pika.exceptions import AMQPError

from oraculo.brokers.rabbitmq.connection import Refused
from oraculo.brokers.rabbitmq.frames import Parcel
from oraculo.brokers.rabbitmq.publisher import LONGEST, NotConfirmed, Overdue, Publisher, Unheard
from oraculo.brokers.rabbitmq.queues import DECLARED_TOGETHER, Queues
from oraculo.core.chunks import pages
from oraculo.core.queue_health import TroubledQueues
from oraculo.errors import BrokerError, BrokerUnavailable

UNHEARD_FOR = 30.0  # seconds until something is sent again to a queue that said nothing, though it says nothing yet
MOST_UNHEARD = 500  # each is a channel, of which a connection has 2,047 unless the server says otherwise
STUCK_TOLD = 30.0  # seconds that a queue is told of that did not work: who wants it to tries again sooner
AGAIN_PATIENCE = 2.0  # seconds for what is tried once more: it was waited for already
ANSWER_PATIENCE = 1.0  # seconds in which a server that could not make a queue may say that it is there
REFUSAL_KEPT = 1.0  # seconds in which a queue that was refused is not asked for again: to ask takes a new channel
DEPTHS_PATIENCE = 5.0  # seconds for a look at all queues of a call that refused something

Down = dict[str, str]  # queues that do not work, and why, as far as RabbitMQ told
NotSent = tuple[Sequence[Parcel], Down]  # what was not taken, and which of their queues are down
Fault = BrokerUnavailable | Refused  # why a queue could not be made


class _NotMade(NamedTuple):
    down: Down
    late: Collection[str] = ()  # those that there was no time to ask for: nothing is known of them


class _MakingTime:
    """Begins anew with each answer: to make a queue takes RabbitMQ a while, and a call may be for hundreds."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._now = asyncio.get_running_loop().time
        self._last = self._now() + LONGEST * patience  # that one is begun with, and then has its time
        self.until = self._now() + patience
        self.is_answered = False
        self.is_doubtful = False  # one of them is perhaps never answered for: it is not to take the time of all

    @property
    def is_over(self) -> bool:
        return self._now() >= min(self.until, self._last)

    def for_many(self) -> float:
        return self.until - self._patience / 2

    def for_one(self) -> float:
        return min(self.until, self._now() + self._patience / 4) if self.is_doubtful else self.until

    def renew(self) -> None:
        self.is_answered = True
        self.until = self._now() + self._patience


class StuckQueues:
    """Queues that take or give nothing, as those of a cluster without its majority, while the server answers otherwise.

    `proof_within`: seconds in which some queue works, if any does. None: nobody sees to it that one is tried.
    """

    def __init__(self, proof_within: float | None) -> None:
        self._proof_within = proof_within
        self._found = TroubledQueues(STUCK_TOLD)
        self._failing_since: float | None = None  # the first that did not work since one did

    def note(self, queues: Iterable[str], why: str) -> None:
        now = time.monotonic()
        if not self._found.reasons(now):
            self._failing_since = None
        self._found.note(queues, why, now)
        if self._failing_since is None and self._found:
            self._failing_since = now

    def works(self, queues: Iterable[str] = ()) -> None:
        """Without queues: some does."""
        self._failing_since = None
        self._found.works(queues)

    def clear(self) -> None:
        self._failing_since = None
        self._found.clear()

    def among(self, queues: Iterable[str]) -> set[str]:
        if not self._found:
            return set()
        now = time.monotonic()
        return {queue for queue in queues if self._found.has(queue, now)}

    def told(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._found.reasons(time.monotonic()).items()) if self._found else ()

    def all_of_them(self) -> str | None:
        """Why the server is of no use, though it answers."""
        if self._proof_within is None or self._failing_since is None:
            return None
        if time.monotonic() - self._failing_since < self._proof_within:
            return None
        told = self.told()
        return told[-1][1] if told else None


class Sender:
    def __init__(self, publisher: Publisher, queues: Queues, publish_timeout: float, stuck: StuckQueues) -> None:
        self._publisher = publisher
        self._queues = queues
        self._publish_timeout = publish_timeout
        self._stuck = stuck
        self._refusals: dict[str, tuple[Refused, float]] = {}  # those of late, and until when they count
        self._unheard: dict[str, tuple[Unheard, float]] = {}  # the last that was sent alone, and until when it counts

    async def send(self, parcels: Sequence[Parcel]) -> None:
        """Makes the queues that were never seen, and publishes. Raises NotConfirmed for what was not taken, which says
        what is down; BrokerUnavailable when nothing is known, Refused when RabbitMQ wants none of the queues."""
        queues = {parcel.queue for parcel in parcels}
        stuck = self._stuck.among(queues)
        unmade = self._queues.unmade(queues - stuck)
        not_made = await self._not_made(unmade, queues) if unmade else _NotMade({})
        if stuck or any(not_made):
            left, down = await self._send_by_state(parcels, stuck, not_made)
        else:
            left, down = await self._send_together(parcels)
        if left:
            raise NotConfirmed(left, len(parcels), down, not_made.late)

    async def _send_by_state(self, parcels: Sequence[Parcel], stuck: set[str], unmade: _NotMade) -> NotSent:
        not_made, down = {*unmade.down, *unmade.late}, unmade.down
        refused = [parcel for parcel in parcels if parcel.queue in not_made]
        well = [parcel for parcel in parcels if parcel.queue not in stuck and parcel.queue not in not_made]
        if well:
            left, also_down = await self._send_together(well)
            refused, down = [*refused, *left], down | also_down
        must_tell = not well and not not_made
        left, also_down = await self._send_apart(_by_queue(parcels, stuck), must_tell=must_tell)
        return [*refused, *left], down | also_down

    async def _not_made(self, unmade: Sequence[str], queues: set[str]) -> _NotMade:
        """Makes them. Returns those that could not be made; raises why when nothing else is known of the server, or
        when it refuses all that the call is for."""
        faults, late = await self._faults_of_making(unmade)
        refusals = {queue: str(fault) for queue, fault in faults.items() if isinstance(fault, Refused)}
        if len(faults) == len(queues) and not refusals and not await self._answers():
            raise next(iter(faults.values()))
        for queue, fault in faults.items():
            self._stuck.note([queue], str(fault))
        if faults and len(refusals) == len(queues):
            raise next(iter(faults.values()))
        return _NotMade(dict.fromkeys(faults, "") | refusals, late)

    async def _faults_of_making(self, unmade: Sequence[str]) -> tuple[dict[str, Fault], list[str]]:
        """And those that there was no time for, while others were made: where none was, all are as bad."""
        now, time_left = time.monotonic(), _MakingTime(self._publish_timeout)
        self._refusals = {name: kept for name, kept in self._refusals.items() if kept[1] > now}
        faults: dict[str, Fault] = {
            queue: self._refusals[queue][0].with_traceback(None) for queue in unmade if queue in self._refusals
        }
        late: list[str] = []
        for some in pages([queue for queue in unmade if queue not in faults], DECLARED_TOGETHER):
            if await self._are_made_together(some, time_left):
                continue
            for queue in some:
                if time_left.is_over:
                    late.append(queue)
                elif fault := await self._fault_of_making(queue, time_left):
                    faults[queue] = fault
        if late and not time_left.is_answered:
            return faults | {queue: _not_in_time(queue) for queue in late}, []
        return faults, late

    async def _are_made_together(self, queues: Sequence[str], time_left: _MakingTime) -> bool:
        if len(queues) == 1 or time_left.is_over:
            return False
        time_left.is_doubtful = False
        try:
            async with asyncio.timeout_at(time_left.for_many()):
                are_made = await self._queues.ensure_together(queues)
        except (TimeoutError, BrokerUnavailable):
            time_left.is_doubtful = True
            return False
        if are_made:
            time_left.renew()
        return are_made

    async def _fault_of_making(self, queue: str, time_left: _MakingTime) -> Fault | None:
        try:
            async with asyncio.timeout_at(time_left.for_one()):
                await self._queues.ensure(queue)
        except TimeoutError:
            return _not_in_time(queue)
        except Refused as refusal:
            self._refusals[queue] = refusal, time.monotonic() + REFUSAL_KEPT
            time_left.renew()
            return refusal
        except BrokerUnavailable as error:
            return error
        time_left.renew()
        return None

    async def _send_together(self, parcels: Sequence[Parcel]) -> NotSent:
        try:
            await self._publish(parcels, self._publish_timeout)
        except NotConfirmed as error:
            silent = set(error.silent)
            is_blocked = isinstance(error, Overdue) and error.is_blocked  # then nothing is known of any one queue
            down = Down() if is_blocked else dict.fromkeys(silent, "")
            self._stuck.note(down, str(error))
            doubtful = await self._quiet(parcels, error) | (silent - down.keys())
            left = [parcel for parcel in error.parcels if parcel.queue not in doubtful]
            again, also_down = await self._send_apart(_by_queue(error.parcels, doubtful), once_more=True)
            return [*left, *again], down | also_down
        return [], {}

    async def _send_apart(
        self, groups: dict[str, list[Parcel]], *, must_tell: bool = False, once_more: bool = False
    ) -> NotSent:
        """Each queue's on a channel of its own. What went wrong is only told when nothing else is known: the others of
        the call may be confirmed."""
        patience = min(self._publish_timeout, AGAIN_PATIENCE) if once_more else self._publish_timeout
        calls = (self._send_alone(queue, parcels, patience) for queue, parcels in groups.items())
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        # Where some are refused and others fail otherwise, what is told of one of them would be wrong of the rest.
        are_alike = len({isinstance(failure, Refused) for failure in failures}) == 1
        if must_tell and len(failures) == len(groups) and are_alike:
            raise failures[0]
        left, down = list[Parcel](), Down()
        for (queue, parcels), outcome in zip(groups.items(), outcomes, strict=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, BrokerError | AMQPError | OSError):
                raise outcome
            refused, is_down = (parcels, True) if isinstance(outcome, BaseException) else outcome
            left += refused
            if is_down:
                down[queue] = str(outcome) if isinstance(outcome, Refused) else ""
        return left, down

    async def _send_alone(
        self, queue: str, parcels: Sequence[Parcel], patience: float
    ) -> tuple[Sequence[Parcel], bool]:
        """What the queue did not take, and whether it is down."""
        if self._awaits_word_from(queue):
            self._stuck.note([queue], f"{queue} has not confirmed what was sent to it")
            return parcels, True
        if any(await self._not_made(self._queues.unmade([queue]), {queue})):
            return parcels, True
        try:
            await self._publish(parcels, patience, alone=True)
        except NotConfirmed as error:
            if isinstance(error, Overdue) and error.unheard is not None:
                self._await_word_from(queue, error.unheard)
            took_some = len(error.parcels) < len(parcels)
            is_down = bool(error.silent) or (not took_some and await self._is_quiet(queue))
            if is_down:
                self._stuck.note([queue], str(error))
            return error.parcels, is_down
        return [], False

    def _awaits_word_from(self, queue: str) -> bool:
        """While a queue has said nothing of the last that was sent alone, it is sent no more for a while: it would have
        every one of them when it works again."""
        unheard, until = self._unheard.get(queue, (None, 0.0))
        return unheard is not None and unheard.is_open and time.monotonic() < until

    def _await_word_from(self, queue: str, unheard: Unheard) -> None:
        if queue in self._unheard:
            self._unheard.pop(queue)[0].give_up()
        self._unheard[queue] = unheard, time.monotonic() + UNHEARD_FOR
        while len(self._unheard) > MOST_UNHEARD:
            self._unheard.pop(next(iter(self._unheard)))[0].give_up()

    async def _publish(self, parcels: Sequence[Parcel], patience: float, *, alone: bool = False) -> None:
        """A server that does not confirm in time, nor answer, is given up, so that nothing piles up for it; the next
        call connects anew."""
        queues = {parcel.queue for parcel in parcels}
        until = asyncio.get_running_loop().time() + patience
        try:
            await self._publisher.publish(parcels, until, alone=alone)
        except TimeoutError:
            raise self._gave_up(parcels, patience) from None
        except NotConfirmed as error:
            if isinstance(error, Overdue) and error.is_gone:
                raise self._gave_up(parcels, patience) from error
            refused = set(map(id, error.parcels))
            if taking := {parcel.queue for parcel in parcels if id(parcel) not in refused}:
                self._stuck.works(taking - set(error.silent))
            raise
        self._stuck.works(queues)

    def _gave_up(self, parcels: Sequence[Parcel], patience: float) -> BrokerUnavailable:
        self._publisher.give_up("it did not confirm in time")
        return BrokerUnavailable(f"RabbitMQ did not confirm {len(parcels)} messages in {patience} s")

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(ANSWER_PATIENCE):
                await self._publisher.ping()
        except (BrokerError, TimeoutError):
            return False
        return True

    async def _quiet(self, parcels: Sequence[Parcel], error: NotConfirmed) -> set[str]:
        """Of the queues that said no to something, those that took nothing else and show no message."""
        refused = set(map(id, error.parcels))
        known = {parcel.queue for parcel in parcels if id(parcel) not in refused} | set(error.silent)
        doubtful = {parcel.queue for parcel in error.parcels} - known
        looks = await asyncio.gather(*map(self._is_quiet, doubtful))
        return {queue for queue, is_quiet in zip(doubtful, looks, strict=True) if is_quiet}

    async def _is_quiet(self, queue: str) -> bool:
        try:
            async with asyncio.timeout(DEPTHS_PATIENCE):
                depth = await self._queues.depth(queue)
        except (BrokerError, AMQPError, OSError, TimeoutError):
            return False  # nothing is known of it: a limit may be its owner's
        return depth is None or not depth.messages


def _not_in_time(queue: str) -> BrokerUnavailable:
    return BrokerUnavailable(f"RabbitMQ did not make {queue} in time")


def _by_queue(parcels: Iterable[Parcel], queues: set[str]) -> dict[str, list[Parcel]]:
    groups: dict[str, list[Parcel]] = {}
    for parcel in parcels:
        if parcel.queue in queues:
            groups.setdefault(parcel.queue, []).append(parcel)
    return groups
