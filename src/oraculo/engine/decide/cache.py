"""Runs and compiled plans in memory, within bounds. Correctness needs none of it."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from oraculo.core.plan import Plan
from oraculo.core.run import Changes, Run
from oraculo.pipeline.definition import Definition, decode_definition
from oraculo.ports.store import Snapshot

_BYTES_A_TASK = 1024
_OWN_WEIGHT = 2  # a run or a plan without tasks takes about 2 kB
# Seconds for which a run is kept that has ended, or may have. Its late messages come one by one, and loading a wide run
# for each of them would hold up all others.
IDLE = 30.0


class Plans:
    """Compiled plans by the hash of their definition. The least used are dropped first.

    They are weighed as `HotRuns` weighs runs. A lock guards them, because large requests are read in threads.
    """

    def __init__(self, max_weight: int = 100_000) -> None:
        self._plans: OrderedDict[str, tuple[Plan, int]] = OrderedDict()
        self._max_weight = max_weight
        self._weight = 0
        self._turn = Lock()

    def known(self, definition_hash: str) -> Plan | None:
        """Return the plan if it is in memory."""
        with self._turn:
            if (found := self._plans.get(definition_hash)) is None:
                return None
            self._plans.move_to_end(definition_hash)
            return found[0]

    def plan(self, definition_hash: str, encoded: bytes, definition: Definition | None = None) -> Plan:
        """Return the plan, compiled if it is not in memory."""
        if (known := self.known(definition_hash)) is not None:
            return known
        plan = Plan(definition or decode_definition(encoded))  # outside the lock, because a large one takes a while
        with self._turn:
            self._keep(definition_hash, plan, _OWN_WEIGHT + len(plan) + len(encoded) // _BYTES_A_TASK)
        return plan

    def _keep(self, definition_hash: str, plan: Plan, weight: int) -> None:
        _, before = self._plans.pop(definition_hash, (plan, 0))  # somebody else may have been quicker
        self._plans[definition_hash] = (plan, weight)
        self._weight += weight - before
        while self._weight > self._max_weight and len(self._plans) > 1:
            self._weight -= self._plans.popitem(last=False)[1][1]

    def restore(self, snapshot: Snapshot) -> Run:
        """Return the run that a snapshot holds."""
        plan = self.plan(snapshot.head.definition_hash, snapshot.definition)
        return Run(snapshot.head, plan, snapshot.definition, snapshot.payload, snapshot.tasks)


@dataclass(slots=True)
class _Kept:
    run: Run
    weight: int
    used_at: float = 0.0  # by the loop's time, because clocks may be set back


class HotRuns:
    """Runs as this engine last committed them.

    They are weighed in tasks: one kB of payload weighs one task, a run itself two. A run is dropped when it ends, and
    kept again for a while when late answers come. `decides_alone` returns whether no other process decides: another one
    may end a run unseen.
    """

    def __init__(self, max_weight: int, decides_alone: Callable[[], bool]) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # the least used first
        self._ended: OrderedDict[str, _Kept] = OrderedDict()  # those of them that have ended, in the same order
        self._max_weight = max_weight
        self._weight = 0
        self._decides_alone = decides_alone

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, run_id: str) -> Run | None:
        kept = self._kept.get(run_id)
        if kept is None:
            return None
        self._use(run_id, kept)
        return kept.run

    def _use(self, run_id: str, kept: _Kept) -> None:
        kept.used_at = asyncio.get_running_loop().time()
        self._kept.move_to_end(run_id)
        self._ended.pop(run_id, None)
        if not kept.run.is_open:
            self._ended[run_id] = kept

    def keep(self, run: Run) -> None:
        self.drop(run.id)
        results = sum(len(task.result) for task in run.tasks if task.result)
        weight = len(run.tasks) + (len(run.payload) + len(run.definition) + results) // _BYTES_A_TASK + _OWN_WEIGHT
        self._kept[run.id] = kept = _Kept(run, weight)
        self._use(run.id, kept)
        self._weight += weight
        while self._weight > self._max_weight and len(self._kept) > 1:
            self.drop(next(iter(self._kept)))

    def grown(self, changes: Changes) -> None:
        """Add the results of a commit to the weight of a kept run."""
        kept = self._kept.get(changes.run.id)
        if kept is not None:
            added = sum(len(task.result) for task in changes.tasks.values() if task.result) // _BYTES_A_TASK
            kept.weight += added
            self._weight += added

    def drop(self, run_id: str) -> None:
        kept = self._kept.pop(run_id, None)
        self._ended.pop(run_id, None)
        if kept is not None:
            self._weight -= kept.weight

    def drop_idle(self) -> None:
        """Drop unused runs that have ended, or that another process may have ended."""
        oldest = asyncio.get_running_loop().time() - IDLE
        kept = self._ended if self._decides_alone() else self._kept
        while kept and next(iter(kept.values())).used_at < oldest:
            self.drop(next(iter(kept)))
