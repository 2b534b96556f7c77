"""The plan: a definition compiled once for all its runs, with numbers instead of names."""

from collections.abc import Iterable, Sequence

from oraculo.pipeline.definition import Definition, Kind, OnLate, Step, quorum_needed
from oraculo.wire import naming


class Plan:
    """An immutable plan, shared by every run of its definition. A task's number is its place in `steps`."""

    __slots__ = (
        "by_id",
        "by_queue",
        "by_short_name",
        "definition",
        "dependencies",
        "dependents",
        "is_collector",
        "needed",
        "on_late",
        "only_of_kind",
        "steps",
    )

    def __init__(self, definition: Definition) -> None:
        steps = definition.steps
        self.definition = definition
        self.steps: Sequence[Step] = steps
        self.by_id: dict[str, int] = {step.id: number for number, step in enumerate(steps)}
        self.by_queue: dict[str, list[int]] = {}
        self.is_collector: list[bool] = []
        self.dependencies: list[tuple[int, ...]] = []
        self.dependents: list[list[int]] = [[] for _ in steps]
        known: dict[Sequence[str], tuple[int, ...]] = {}  # a whole layer may depend on the same steps
        for number, step in enumerate(steps):
            self.by_queue.setdefault(step.queue, []).append(number)
            self.is_collector.append(naming.is_collector(step.queue))
            if (before := known.get(step.depends_on)) is None:
                before = known[step.depends_on] = tuple(self.by_id[name] for name in step.depends_on)
            self.dependencies.append(before)
            for dependency in before:
                self.dependents[dependency].append(number)
        self.by_short_name = _by_short_name(self.by_queue)
        self.needed = quorum_needed(definition.quorum, len(steps))
        self.on_late = definition.on_late
        self.only_of_kind: dict[bool, int | None] = {kind: _only(self.is_collector, kind) for kind in (True, False)}

    @property
    def kind(self) -> Kind:
        return self.definition.kind

    @property
    def amends(self) -> bool:
        return self.on_late is OnLate.AMEND

    def __len__(self) -> int:
        return len(self.steps)

    def named(self, name: str, *, collects: bool | None = None) -> Sequence[int]:
        """Return the tasks that a worker means by `name`: a task's id, a queue, or a queue without its role's prefix.

        `collects` restricts them to collectors (True) or processors (False).
        """
        number = self.by_id.get(name)
        meant = (() if number is None else (number,), self.by_queue.get(name, ()), self._shortened(name))
        return next((found for found in meant if found and collects in (None, self.is_collector[found[0]])), ())

    def _shortened(self, name: str) -> Sequence[int]:
        """Return the tasks of a short name. Collectors come first, because a processor only echoes its `fonte`."""
        queue = self.by_short_name.get((name, True)) or self.by_short_name.get((name, False))
        return () if queue is None else self.by_queue[queue]


def _by_short_name(queues: Iterable[str]) -> dict[tuple[str, bool], str]:
    """Return the queue of each short name and role. The spelling with `_` wins over others, then the first."""
    found: dict[tuple[str, bool], str] = {}
    for queue in queues:
        short = naming.short_name(queue)
        if queue.endswith(f"_{short}"):
            found[short, naming.is_collector(queue)] = queue
        else:
            found.setdefault((short, naming.is_collector(queue)), queue)
    return found


def _only(kinds: Sequence[bool], kind: bool) -> int | None:
    return kinds.index(kind) if kinds.count(kind) == 1 else None
