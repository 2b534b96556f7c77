"""A definition compiled once for all its runs: numbers instead of names."""

from collections.abc import Sequence

from oraculo.core import naming
from oraculo.core.pipeline import Definition, Kind, OnLate, Step, quorum_needed


class Plan:
    """Immutable, shared by every run of the same definition. Tasks are known by their place in `steps`."""

    __slots__ = (
        "by_id",
        "by_queue",
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
        for number, step in enumerate(steps):
            self.by_queue.setdefault(step.queue, []).append(number)
            self.is_collector.append(naming.is_collector(step.queue))
            before = tuple(self.by_id[name] for name in step.depends_on)
            self.dependencies.append(before)
            for dependency in before:
                self.dependents[dependency].append(number)
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

    def named(self, name: str) -> Sequence[int]:
        """The tasks that a worker means by `name`: a task's id, a queue, or a queue without its role's prefix."""
        if (number := self.by_id.get(name)) is not None:
            return (number,)
        for queue in (name, f"escavador_{name}", f"executador_{name}"):
            if numbers := self.by_queue.get(queue):
                return numbers
        return ()


def _only(kinds: Sequence[bool], kind: bool) -> int | None:
    return kinds.index(kind) if kinds.count(kind) == 1 else None
