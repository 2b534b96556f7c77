"""The order in which waiting commands go out: small runs first, and wide runs in turns.

Every second place is for wide runs, so that any number of small ones cannot keep them waiting. In both, a higher
`prioridade` goes first.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

FEW = 50  # commands of one commit that count as those of a small run
TURN = 20  # commands of a wide run that go out together

T = TypeVar("T")


class _Share(Generic[T]):
    """A wide run's waiting items, and what is left of its turn."""

    __slots__ = ("items", "left", "run_id")

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.items: deque[T] = deque()
        self.left = TURN  # of its turn


class RunOrder(Generic[T]):
    """Items that wait, each of a run. Those of small runs go by priority, then by the age of the run."""

    def __init__(self) -> None:
        self._few: list[tuple[int, float, int, T]] = []  # a heap
        self._many: dict[int, deque[_Share[T]]] = {}  # by priority; the run whose turn it is comes first
        self._shares: dict[tuple[int, str], _Share[T]] = {}
        self._numbers = count()
        self._length = 0
        self._is_turn_of_many = False

    def __len__(self) -> int:
        return self._length

    def add(self, run_id: str, item: T, *, priority: int = 0, age: float = 0.0, is_one_of_many: bool = False) -> None:
        """Add an item of a run that was created at `age`."""
        self._length += 1
        if not is_one_of_many:
            heappush(self._few, (-priority, age, next(self._numbers), item))
            return
        share = self._shares.get((priority, run_id))
        if share is None:
            share = self._shares[priority, run_id] = _Share(run_id)
            self._many.setdefault(priority, deque()).append(share)
        share.items.append(item)

    def take(self, most: int, room: float, size_of: Callable[[T], int], *, few_only: bool = False) -> list[T]:
        """Take up to `most` items that fit into `room` together; the first always fits."""
        taken: list[T] = []
        while len(taken) < most and (self._few or (self._many and not few_only)):
            is_of_many = bool(self._many) and not few_only and (self._is_turn_of_many or not self._few)
            room -= size_of(self._first_of_many() if is_of_many else self._few[0][3])
            if taken and room < 0:
                break
            taken.append(self._pop_of_many() if is_of_many else heappop(self._few)[3])
            self._is_turn_of_many = not is_of_many
        self._length -= len(taken)
        return taken

    def _first_of_many(self) -> T:
        return self._many[max(self._many)][0].items[0]

    def _pop_of_many(self) -> T:
        priority = max(self._many)
        runs = self._many[priority]
        share = runs[0]
        item = share.items.popleft()
        share.left -= 1
        if not share.items:
            runs.popleft()
            del self._shares[priority, share.run_id]
            if not runs:
                del self._many[priority]
        elif not share.left:
            share.left = TURN
            runs.rotate(-1)
        return item
