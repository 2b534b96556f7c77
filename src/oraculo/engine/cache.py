"""Hot runs and compiled plans, kept in memory within bounds. Nothing here is needed for correctness."""

from collections import OrderedDict
from threading import Lock

from oraculo.core.pipeline import Definition, decode_definition
from oraculo.core.plan import Plan
from oraculo.core.run import Changes, Run
from oraculo.ports.store import Snapshot

_BYTES_A_TASK = 1024


class Plans:
    """Compiled plans by the hash of their definition, weighed as `HotRuns` are; the least used go first. Large requests
    are read by threads of their own, so they take turns here."""

    def __init__(self, max_weight: int = 100_000) -> None:
        self._plans: OrderedDict[str, tuple[Plan, int]] = OrderedDict()
        self._max_weight = max_weight
        self._weight = 0
        self._turn = Lock()

    def plan(self, definition_hash: str, encoded: bytes, definition: Definition | None = None) -> Plan:
        with self._turn:
            found = self._plans.get(definition_hash)
            if found is not None:
                self._plans.move_to_end(definition_hash)
                return found[0]
        plan = Plan(definition or decode_definition(encoded))  # a large one takes a while: nobody waits for it
        with self._turn:
            self._keep(definition_hash, plan, len(plan) + len(encoded) // _BYTES_A_TASK)
        return plan

    def _keep(self, definition_hash: str, plan: Plan, weight: int) -> None:
        _, before = self._plans.pop(definition_hash, (plan, 0))  # somebody else may have been quicker
        self._plans[definition_hash] = (plan, weight)
        self._weight += weight - before
        while self._weight > self._max_weight and len(self._plans) > 1:
            self._weight -= self._plans.popitem(last=False)[1][1]

    def restore(self, snapshot: Snapshot) -> Run:
        plan = self.plan(snapshot.head.definition_hash, snapshot.definition)
        return Run(snapshot.head, plan, snapshot.definition, snapshot.payload, snapshot.tasks)


class HotRuns:
    """Runs as they were last committed by this engine, weighed in tasks; one kB of payload weighs as one task."""

    def __init__(self, max_weight: int) -> None:
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._weights: dict[str, int] = {}
        self._max_weight = max_weight
        self._weight = 0

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, run_id: str) -> Run | None:
        run = self._runs.get(run_id)
        if run is not None:
            self._runs.move_to_end(run_id)
        return run

    def keep(self, run: Run) -> None:
        self.drop(run.id)
        results = sum(len(task.result) for task in run.tasks if task.result)
        weight = len(run.tasks) + (len(run.payload) + len(run.definition) + results) // _BYTES_A_TASK
        self._runs[run.id] = run
        self._weights[run.id] = weight
        self._weight += weight
        while self._weight > self._max_weight and len(self._runs) > 1:
            self.drop(next(iter(self._runs)))

    def grown(self, changes: Changes) -> None:
        """A commit added results to a kept run."""
        if changes.run.id in self._weights:
            added = sum(len(task.result) for task in changes.tasks.values() if task.result) // _BYTES_A_TASK
            self._weights[changes.run.id] += added
            self._weight += added

    def drop(self, run_id: str) -> None:
        if self._runs.pop(run_id, None) is not None:
            self._weight -= self._weights.pop(run_id)
