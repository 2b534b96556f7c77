"""The laws can fail: each bug, planted alone, is caught within a bounded number of seeds, without the oracle."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from oraculo.brokers.failover.broker import FailoverBroker
from oraculo.brokers.failover.member import Member
from oraculo.brokers.failover.routing import Routing
from oraculo.core import machine
from oraculo.core.machine import Verdict, ending, moves
from oraculo.core.machine import answers as machine_answers
from oraculo.core.run import Changes, Run, Task
from oraculo.core.transitions import RUN_TRANSITIONS, RunTrigger
from oraculo.engine.cluster.broker_marks import _BrokerMark
from oraculo.engine.cluster.broker_watch import BrokerWatch
from oraculo.engine.consumers import EngineConsumers
from oraculo.engine.decide.batches import Batch, Decision
from oraculo.engine.decide.intake import Intake
from oraculo.engine.decide.settle import Settling
from oraculo.engine.deliver.deliveries import Deliveries
from oraculo.engine.inbox import Arrived, Input, Note, Submission
from oraculo.engine.operations import Operations
from oraculo.engine.send import outbox
from oraculo.engine.send.outbox import Outbox
from oraculo.engine.send.publisher import Key
from oraculo.engine.send.sweep import Sweep
from oraculo.engine.timers import Timers
from oraculo.ports.broker import BrokerStatus, Consumer, Receipt
from oraculo.ports.store import Committed, Created
from oraculo.ports.store import CreationOutcome as Stored
from oraculo.testing.simulation import running, virtual_time
from oraculo.testing.simulation.laws import EveryRunEnds
from oraculo.testing.simulation.running import SeedOutcome
from oraculo.testing.simulation.scenario import Scenario, random_scenario
from tests.simulation.test_laws import (
    BROKERS_LOST,
    COMMITS_LOST,
    ONE_WIDE_RUN,
    STORE_SLOW,
    with_a_small_prefetch,
    with_two_engines,
)

Plant = Callable[[pytest.MonkeyPatch], None]
MOST_SEEDS = 150

run_seed = partial(running.run_seed, by_laws_alone=True)


def ack_before_commit(patch: pytest.MonkeyPatch) -> None:
    real = Intake._process

    async def process(self: Intake, inputs: Sequence[Input], notes: Sequence[Note]) -> None:
        for one in inputs:
            if isinstance(one, Arrived):
                await one.consumer.ack([one.delivery])
        await real(self, inputs, notes)

    patch.setattr(Intake, "_process", process)


def no_resend(patch: pytest.MonkeyPatch) -> None:
    async def look(self: Sweep, *, is_start: bool = False) -> None:
        return

    patch.setattr(Sweep, "look", look)


def timers_never_ring(patch: pytest.MonkeyPatch) -> None:
    import asyncio

    async def run(self: Timers) -> None:
        await asyncio.Event().wait()

    patch.setattr(Timers, "run", run)


def retry_without_a_timer(patch: pytest.MonkeyPatch) -> None:
    real = machine_answers._schedule_retry

    def schedule(run: Run, task: Task, *rest: Any) -> None:
        real(run, task, *rest)
        task.due_at = None

    patch.setattr(machine_answers, "_schedule_retry", schedule)


def sent_before_its_dependency(patch: pytest.MonkeyPatch) -> None:
    real = machine.start

    def start(run: Run, now: float) -> Changes:
        changes = real(run, now)
        for task in run.tasks:
            if task.missing == 1:
                task.missing = 0
                moves.dispatch(run, task, now, changes)
        return changes

    patch.setattr(machine, "start", start)


def delivered_under_two_versions(patch: pytest.MonkeyPatch) -> None:
    real = machine_answers._answered_after_end

    def answered(run: Run, task: Task, event: Any, now: float, changes: Changes) -> Verdict:
        verdict = real(run, task, event, now, changes)
        if not run.is_open and verdict is not Verdict.APPLIED and RunTrigger.AMEND in RUN_TRANSITIONS[run.head.status]:
            ending.set_end(run, RunTrigger.AMEND, now, changes)
        return verdict

    patch.setattr(machine_answers, "_answered_after_end", answered)


def dropped_without_a_dead_letter(patch: pytest.MonkeyPatch) -> None:
    real = Settling.settle

    async def settle(self: Settling, batch: Batch) -> None:
        batch.handled += [arrived for arrived, _ in batch.refused]
        batch.refused.clear()
        await real(self, batch)

    patch.setattr(Settling, "settle", settle)


def conflict_ignored(patch: pytest.MonkeyPatch) -> None:
    real = Intake._commit

    async def commit(self: Intake, submissions: Any, decisions: Any) -> Committed:
        committed = await real(self, submissions, decisions)
        return Committed(committed.created, frozenset())

    patch.setattr(Intake, "_commit", commit)


def cache_not_invalidated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Decision, "must_be_fresh", property(lambda self: False))
    patch.setattr(virtual_time, "MOST_TURNS", 20_000)  # it ends in a timer that rings for ever


def lost_commands_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    async def missed(self: BrokerWatch, link: BrokerStatus) -> None:
        return

    patch.setattr(BrokerWatch, "_missed", missed)


def lost_memory_not_noticed(patch: pytest.MonkeyPatch) -> None:
    async def look(self: BrokerWatch, name: str) -> None:
        return

    patch.setattr(BrokerWatch, "_look_after_loss", look)


def a_loss_that_is_not_told_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    async def look(self: _BrokerMark) -> None:
        return

    patch.setattr(_BrokerMark, "look", look)


def the_preferred_broker_alone_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FailoverBroker, "_up", lambda self: [member for member in self._members[:1] if member.is_up])


def a_lost_broker_is_never_asked_again(patch: pytest.MonkeyPatch) -> None:
    real = FailoverBroker._is_well

    async def is_well(self: FailoverBroker, member: Member) -> bool:
        return member.is_up and await real(self, member)

    patch.setattr(FailoverBroker, "_is_well", is_well)


def the_wrong_broker_is_noted(patch: pytest.MonkeyPatch) -> None:
    real = Routing.receipts

    def receipts(self: Routing, *args: Any) -> list[Receipt]:
        return [one if one.broker is None else Receipt("simulated-1") for one in real(self, *args)]

    patch.setattr(Routing, "receipts", receipts)


def another_attempt_taken_for_a_repeat(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outbox, "_message_key", lambda run, task: f"{run.id}:{task.number}:{task.sent_at}")


def accepted_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    real = Intake._commit

    async def commit(self: Intake, submissions: Sequence[Submission], decisions: Any) -> Committed:
        for one in submissions:
            if one.done is not None and not one.done.done():
                one.done.set_result(Created(Stored.CREATED, one.changes.run.id))
        return await real(self, submissions, decisions)

    patch.setattr(Intake, "_commit", commit)


def a_delivery_is_given_up_at_its_first_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deliveries, "_may_come_through", lambda self, channel, attempt, error: False)


def dead_letters_are_noted_as_sent_and_are_not(patch: pytest.MonkeyPatch) -> None:
    real = Outbox._line_up

    def line_up(self: Outbox, key: Key, run: Run, dead: str | None, *rest: Any) -> None:
        if dead is None:
            real(self, key, run, dead, *rest)
        else:
            self.confirmed([key], [self._broker.name], self._clock.now())

    patch.setattr(Outbox, "_line_up", line_up)


def the_prefetch_is_unbounded(patch: pytest.MonkeyPatch) -> None:
    async def subscribe(self: EngineConsumers, queue: str) -> Consumer:
        consumer = await self._broker.consume(queue, prefetch=10**9)
        self._consumers[queue] = consumer
        return consumer

    patch.setattr(EngineConsumers, "_subscribe", subscribe)


# And the law that each of them breaks.
BUGS: dict[Plant, int] = {
    ack_before_commit: 6,
    no_resend: 4,
    timers_never_ring: 2,
    retry_without_a_timer: 3,
    sent_before_its_dependency: 5,
    delivered_under_two_versions: 7,
    dropped_without_a_dead_letter: 8,
    conflict_ignored: 6,
    accepted_before_the_commit: 1,
    a_delivery_is_given_up_at_its_first_failure: 7,
    dead_letters_are_noted_as_sent_and_are_not: 8,
}

BROKER_BUGS: dict[Plant, int] = {
    lost_commands_not_taken_back: 4,
    lost_memory_not_noticed: 4,
    a_loss_that_is_not_told_is_not_noticed: 4,
    the_preferred_broker_alone_is_used: 4,
    a_lost_broker_is_never_asked_again: 7,
    the_wrong_broker_is_noted: 4,
    another_attempt_taken_for_a_repeat: 4,
}


# Where they were last seen: asked first, so that the others need not be asked before them.
SEEN_AT: dict[Plant, int] = {
    lost_commands_not_taken_back: 15,
    lost_memory_not_noticed: 6,
    a_loss_that_is_not_told_is_not_noticed: 55,
    the_wrong_broker_is_noted: 15,
    accepted_before_the_commit: 45,
    a_delivery_is_given_up_at_its_first_failure: 10,
    dead_letters_are_noted_as_sent_and_are_not: 57,
}


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert _is_broken(BUGS[plant], (run_seed(seed) for seed in _seeds(plant)))


@pytest.mark.parametrize("plant", BROKER_BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_the_fail_over_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    outcomes = (run_seed(seed, BROKERS_LOST, _with_two_brokers(seed)) for seed in _seeds(plant))
    assert _is_broken(BROKER_BUGS[plant], outcomes)


def test_a_stale_copy_of_a_run_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_not_invalidated(monkeypatch)
    assert _is_broken(2, (run_seed(seed, COMMITS_LOST, with_two_engines(seed)) for seed in range(MOST_SEEDS)))


def test_more_messages_in_memory_than_the_prefetch_allows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    the_prefetch_is_unbounded(monkeypatch)
    with_a_small_prefetch(monkeypatch)
    assert _is_broken(9, iter([run_seed(0, STORE_SLOW, ONE_WIDE_RUN)]))


@pytest.mark.parametrize("kind", ["submit", "cancel", "repeat", "redrive"])
def test_an_operation_that_ends_in_an_error_of_the_code_is_caught(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Operations, *args: object, **options: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(Operations, kind, fail)
    asked = (seed for seed in range(MOST_SEEDS) if any(one.kind == kind for one in _scenario(seed).actions))
    outcome = next(outcome for seed in asked if not (outcome := run_seed(seed)).is_clean)
    assert outcome.violations[0].law == 0
    assert outcome.violations[0].how.endswith("KeyError: 'planted'")
    assert any("in fail" in line for line in outcome.story)


def test_a_law_that_cannot_look_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def second(self: EveryRunEnds) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(EveryRunEnds, "second", second)
    assert _is_broken(0, iter([run_seed(0)]))


def _seeds(plant: Plant) -> list[int]:
    return sorted(range(MOST_SEEDS), key=lambda seed: seed != SEEN_AT.get(plant))


def _is_broken(law: int, outcomes: Iterator[SeedOutcome]) -> bool:
    return any(one.law == law for outcome in outcomes for one in outcome.violations)


def _scenario(seed: int) -> Scenario:
    return random_scenario(random.Random(f"scenario {seed}"))


def _with_two_brokers(seed: int) -> Scenario:
    return msgspec.structs.replace(_scenario(seed), brokers=2, durable=True)
