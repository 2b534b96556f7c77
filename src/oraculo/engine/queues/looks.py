"""Looks at the queues of tasks: for the phase of each, and for the reason of a timeout."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

import msgspec

from oraculo.core.phase import Looks, QueueLook
from oraculo.core.run import Run, TaskStatus
from oraculo.errors import BrokerError
from oraculo.pipeline import bridges
from oraculo.ports.broker_admin import BrokerAdmin, QueueState
from oraculo.ports.clock import Clock
from oraculo.ports.threads import handed_over_if_wide
from oraculo.wire.naming import QueueNames

FRESH = 1.0  # seconds for which a look is good enough
_PATIENCE = 0.5  # seconds for the broker to answer
_REST = 5.0  # seconds after a failure in which the broker is not asked again
_MOST_QUEUES = 20  # of one run
_MOST_READ = 64 * 1024  # bytes of a message that is read for the task it belongs to


class _Command(msgspec.Struct):
    """The fields of a command that say whose it is."""

    correlation_id: str = ""
    tarefa: str = ""
    tentativa: int = 0


class _Seen(NamedTuple):
    """The state of a queue at one moment, with the state at each broker when there are several."""

    at: float
    ready: int
    held: int | None
    consumers: int | None
    delayed: int
    paused: str | None
    taken: Collection[tuple[str, str, int]] | None  # runs, tasks and attempts of the commands that are held
    parts: Mapping[str, "_Seen"]


_decoder = msgspec.json.Decoder(_Command)
_Place = tuple[str, str | None]  # a queue, and the broker that took the command


class QueueLooks:
    """The queues of open tasks as they were a moment ago.

    Followers of runs ask often, so one look serves everybody for a second. A broker that does not answer in time is
    left alone for some seconds, and a run is shown without its phases.
    """

    def __init__(
        self, broker: BrokerAdmin, names: QueueNames, clock: Clock, threads: Executor, bridged: Collection[str] = ()
    ) -> None:
        self._broker = broker
        self._names = names
        self._clock = clock
        self._threads = threads
        self._bridged = {*bridges.QUEUES.values(), *bridged}
        self._seen: dict[str, tuple[float, _Seen | None]] = {}  # by queue: good until then
        self._turn = asyncio.Lock()
        self._rests_until = 0.0

    async def at_queues_of(self, run: Run) -> Looks:
        """Return what is known about queues whose commands may be waiting or in work."""
        places = await handed_over_if_wide(self._threads, len(run.tasks), partial(_places_of, run))
        if not places:
            return {}
        await self._refresh(sorted({queue for queue, _ in places})[:_MOST_QUEUES])
        return {place: look for place in places if (look := self._look(run, place)) is not None}

    async def at(self, queues: Sequence[str]) -> Looks:
        """Return what is known about these queues: at each of several brokers, or under no broker's name."""
        await self._refresh(queues)
        looks = dict[_Place, QueueLook]()
        for queue in queues:
            if self._is_fresh(queue) and (seen := self._seen[queue][1]) is not None:
                parts: Iterable[tuple[str | None, _Seen]] = seen.parts.items() or [(None, seen)]
                looks |= {(queue, broker): self._as_look(queue, part) for broker, part in parts}
        return looks

    async def _refresh(self, queues: Sequence[str]) -> None:
        async with self._turn:
            await self._look_at([queue for queue in queues if not self._is_fresh(queue)])

    def _is_fresh(self, queue: str) -> bool:
        return queue in self._seen and self._seen[queue][0] > self._now()

    async def _look_at(self, queues: list[str]) -> None:
        if not queues or self._now() < self._rests_until:
            return
        names, at = self._names, self._clock.now()
        try:
            async with asyncio.timeout(_PATIENCE):
                states = await self._broker.queues(list(map(names.physical, queues)))
        except (BrokerError, TimeoutError):
            self._rests_until = self._now() + _REST
            return
        until = self._now() + FRESH
        found = {names.logical(state.queue): _seen(state, at) for state in states}
        self._seen = {queue: entry for queue, entry in self._seen.items() if entry[0] > self._now()}
        self._seen |= {queue: (until, found.get(queue)) for queue in queues}

    def _look(self, run: Run, place: _Place) -> QueueLook | None:
        queue, broker = place
        if not self._is_fresh(queue) or (seen := self._seen[queue][1]) is None:
            return None
        if seen.parts and (seen := seen.parts.get(broker or "")) is None:
            return None
        taken = None if seen.taken is None else {one[1:] for one in seen.taken if one[0] == run.id}
        return self._as_look(queue, seen, taken)

    def _as_look(self, queue: str, seen: _Seen, taken: Collection[tuple[str, int]] | None = None) -> QueueLook:
        is_bridged = queue in self._bridged
        return QueueLook(seen.at, seen.ready, seen.held, seen.consumers, taken, is_bridged, seen.delayed, seen.paused)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _places_of(run: Run) -> set[_Place]:
    """Return the queues and brokers of running tasks that reported nothing yet."""
    return {
        (run.plan.steps[task.number].queue, task.via)
        for task in run.tasks
        if task.status is TaskStatus.RUNNING and task.percent is None and task.note is None and not task.unsent
    }


def _seen(state: QueueState, at: float) -> _Seen:
    parts = {broker: _seen(part, at) for broker, part in state.at.items()}
    taken = None if state.taken is None else _identities(state.taken)
    return _Seen(at, state.ready, state.unacked, state.consumers, state.delayed, state.paused, taken, parts)


def _identities(bodies: Iterable[bytes]) -> Collection[tuple[str, str, int]] | None:
    """Return the tasks whose commands these are, or None when one is too large to read for that."""
    found = set[tuple[str, str, int]]()
    for body in bodies:
        if len(body) > _MOST_READ:
            return None
        try:
            command = _decoder.decode(body)
        except (msgspec.DecodeError, RecursionError):
            continue  # no command of ours
        found.add((command.correlation_id, command.tarefa, command.tentativa))
    return found
