"""The reason why a run waits, from what its queues, brokers and bridges show; `core.explain` makes the sentence."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

from oraculo.core.aggregate import summary
from oraculo.core.explain import NAMED, Audience, explain, not_succeeded, passed_on_to
from oraculo.core.history import Happened
from oraculo.core.phase import QueueLook
from oraculo.core.run import Run, TaskStatus
from oraculo.engine.bridges import Bridges
from oraculo.engine.dead_letters import DeadLetters
from oraculo.engine.health import EngineHealth
from oraculo.engine.queues.parts import QueueParts
from oraculo.errors import BrokerError
from oraculo.pipeline.bridges import Bridge
from oraculo.ports.broker_admin import FullBroker, QueueState
from oraculo.ports.clock import Clock
from oraculo.ports.store import Storage
from oraculo.ports.threads import handed_over_if_wide
from oraculo.wire import naming

_LATEST = 50  # entries of the history
_MOST_DEAD_LETTERS = 50  # of a queue that are looked through, because each may be large
_OWN_QUEUES = (naming.ANSWERS, naming.REQUESTS)


class _Queues(NamedTuple):
    """The queues that an explanation needs.

    `active`: of open tasks that wait for no other. `unsent`: of those whose commands are unsent. `named`: of the
    unanswered tasks that the sentence names. `destinations`: of named tasks that were sent, by queue and URL, as a
    bridge hands them on.
    """

    active: set[str]
    unsent: set[str]
    named: set[str]
    destinations: Mapping[str, Mapping[str, Bridge]]


class Explanation:
    """The maker of explanations, from all that the engine knows."""

    def __init__(
        self,
        broker: FullBroker,
        store: Storage,
        clock: Clock,
        threads: Executor,
        queues: QueueParts,
        health: EngineHealth,
        bridges: Bridges,
        dead_letters: DeadLetters,
    ) -> None:
        self._broker = broker
        self._store = store
        self._clock = clock
        self._threads = threads
        self._queues = queues
        self._health = health
        self._bridges = bridges
        self._dead_letters = dead_letters

    async def of(self, run: Run) -> str:
        """Return the sentence that explains a run."""
        threads, width, trouble = self._threads, len(run.tasks), self._health.queues
        queues = await handed_over_if_wide(threads, width, partial(_queues_of, run))
        refusals = {queue: why for queue, why in trouble.refusing.items() if queue in queues.unsent}
        concerned = {*queues.active, *_OWN_QUEUES} - refusals.keys()
        stuck = {queue: why for queue, why in trouble.stuck.items() if queue in concerned}
        knows = stuck.keys().isdisjoint(_OWN_QUEUES)  # a broker that fails ours says nothing about others
        asked = queues.active | queues.named
        audiences = await self._audiences(asked, stuck) if asked and knows else {}
        audiences |= {
            queue: await self._searched(run, queue, audiences[queue]) for queue in queues.named & audiences.keys()
        }
        audiences |= {
            queue: audiences[queue]._replace(foreign=await self._bridges.states(queue, destinations))
            for queue, destinations in queues.destinations.items()
            if queue in audiences and audiences[queue].is_bridged
        }
        audiences |= {
            queue: audiences[queue]._replace(meant=await self._queues.served.near(queue))
            for queue in queues.named & audiences.keys()
            if _is_unserved(audiences[queue])
        }
        troubles, missing = (
            self._troubles(queues, stuck),
            self._bridges.missing(audiences, is_sole=self._health.is_sole),
        )
        deaf = trouble.deaf if queues.active and knows else None
        if deaf is not None and deaf not in troubles.values():  # the broker's trouble is not reported twice
            missing.insert(0, f"ORÁCULO itself hears nothing on queue {naming.ANSWERS} now ({deaf})")
            audiences = {queue: audience._replace(is_to_blame=False) for queue, audience in audiences.items()}
        refused = await self._refused_answers(run)
        standstill = await self._health.standstill() if run.is_open else None
        if standstill is None and trouble.unheard_answers is not None:
            missing.append(trouble.unheard_answers)
        now = self._clock.now()
        sentence = partial(explain, run, now, audiences, troubles, refusals, refused, missing, standstill)
        return await handed_over_if_wide(threads, width, sentence)

    async def _refused_answers(self, run: Run) -> Sequence[str]:
        """Return why the last answers to a run that waits, or waited in vain, became dead letters.

        Their worker believes that it has answered. Answers from before a repeat do not count, nor those of a task that
        was answered since.
        """
        if not run.is_open and not summary(run.head)["timeouts"]:
            return ()
        latest = await self._store.history(run.id, after=max(0, run.head.entries - _LATEST))
        refused: list[str] = []
        for entry in latest:
            if entry.what is Happened.RUN_REOPENED:
                refused.clear()
            elif entry.what is Happened.ANSWER_REFUSED and _is_unanswered(run, entry.task):
                refused.append(entry.detail or "")
        return refused

    def _troubles(self, queues: _Queues, stuck: Mapping[str, str]) -> dict[str, str]:
        statuses = self._broker.statuses()
        troubles = {f"broker {status.name}": status.trouble for status in statuses if status.trouble is not None}
        if (why_unsent := self._health.queues.no_queue_takes) and queues.unsent:
            troubles = troubles or {"the broker": why_unsent}  # it answers and seems well, but takes nothing
        troubles |= {f"queue {queue}": why for queue, why in stuck.items()}
        return troubles | self._bridges.troubles(queues.active)

    async def _audiences(self, queues: Collection[str], stuck: Collection[str]) -> dict[str, Audience]:
        """Return the consumers and messages of queues, as far as they are known.

        A broker that is away may be what the run waits for. When one of several is silent, a queue that the others lack
        may still be there.
        """
        names, broker = self._queues.names, self._broker
        try:
            states = await broker.queues([names.physical(queue) for queue in queues])
        except BrokerError:
            return {}
        unseen = Audience(0 if broker.capabilities.counts_consumers else None, 0)
        seen = {names.logical(state.queue): _audience(state) for state in states}
        all_answer = all(status.trouble is None for status in broker.statuses())
        found = dict.fromkeys((queue for queue in queues if all_answer and queue not in stuck), unseen) | seen
        bridged = self._bridges.queues & found.keys()
        return found | {queue: found[queue]._replace(is_bridged=True) for queue in bridged}

    async def _searched(self, run: Run, queue: str, audience: Audience) -> Audience:
        """Return an audience with the run's own dead letters, where these are few and the broker lets us peek."""
        if not (self._broker.capabilities.peeks and 0 < audience.dead_letters <= _MOST_DEAD_LETTERS):
            return audience
        try:
            return audience._replace(own_dead_letters=await self._dead_letters.commands_of(run, queue))
        except BrokerError:
            return audience


def _audience(state: QueueState) -> Audience:
    at = {broker: _audience(part) for broker, part in state.at.items()}
    known = (state.consumers, state.unacked, state.ready, state.dead_letters)
    return Audience(*known, at=at, delayed=state.delayed, paused=state.paused)


def _is_unserved(audience: Audience) -> bool:
    counts = QueueLook(0.0, audience.ready, audience.held, audience.consumers, delayed=audience.delayed)
    return not audience.is_bridged and counts.is_unserved


def _is_unanswered(run: Run, number: int | None) -> bool:
    return number is None or run.tasks[number].is_open or run.tasks[number].status is TaskStatus.TIMED_OUT


def _queues_of(run: Run) -> _Queues:
    active = [task for task in run.tasks if task.is_open and not task.missing]
    named = active[:NAMED]
    if not run.is_open:
        named = [task for task in not_succeeded(run)[:NAMED] if task.status is TaskStatus.TIMED_OUT]
    steps = run.plan.steps
    destinations: dict[str, dict[str, Bridge]] = {}
    for step in (steps[task.number] for task in named if task.is_open and not task.unsent and not task.awaits_retry):
        to = passed_on_to(step)
        destinations.setdefault(step.queue, {})[to.url] = to
    return _Queues(
        {steps[task.number].queue for task in active},
        {steps[task.number].queue for task in active if task.unsent},
        {steps[task.number].queue for task in named},
        destinations,
    )
