"""The commands that were unsent when this engine started: they go out by age, before those of newer runs.

A store lists them in an order of its own, which may say nothing about their age. So they are read first and sorted.
Those of small runs come first, a higher `prioridade` before a lower one. New small runs of no higher `prioridade` wait
until these are lined up. Those of wide runs follow, because they take turns with small ones anyway.
"""

from collections import Counter, deque
from collections.abc import Sequence

from oraculo.core.chunks import pages
from oraculo.core.run import Changes, RunHead
from oraculo.engine.send.run_order import FEW
from oraculo.ports.store import Store, Unsent

MOST = 50_000  # commands that are sorted; others follow in the order of the store
_PAGE = 1000


class Backlog:
    """The sorted unsent commands of a start, and the new small runs that wait for them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._few: deque[Unsent] = deque()
        self._many: deque[Unsent] = deque()
        self._lowest = 0  # the lowest priority of the small runs
        self._since: float | None = None  # runs that were created later wait; None: no run waits
        self._newer: list[Changes] = []  # the commands of runs that wait

    def begin(self, now: float) -> None:
        """Let small runs wait that are created from now on."""
        self._since = now

    async def read(self) -> None:
        """Find and sort what is unsent."""
        found: list[Unsent] = []
        after = None
        while len(found) < MOST and (page := await self._store.unsent(_PAGE, after)):
            found += page
            after = (page[-1].run_id, page[-1].task)
        counts = Counter(one.run_id for one in found)
        heads: dict[str, RunHead] = {}
        for run_ids in pages(list(counts), _PAGE):
            heads |= await self._store.heads(run_ids)
        older = {run_id: head for run_id, head in heads.items() if self._since is None or head.created_at < self._since}
        by_age = sorted((one for one in found if one.run_id in older), key=lambda one: _rank(older[one.run_id]))
        self._few = deque(one for one in by_age if counts[one.run_id] <= FEW)
        self._many = deque(one for one in by_age if counts[one.run_id] > FEW)
        self._lowest = min((older[one.run_id].priority for one in self._few), default=0)

    def makes_wait(self, changes: Changes) -> bool:
        """Keep the commands of a new small run until their turn. Return whether they are kept."""
        head = changes.run.head
        if self._since is None or head.created_at < self._since or head.priority > self._lowest:
            return False
        if len(changes.commands) + len(changes.dead_letters) > FEW or len(self._newer) >= MOST:
            return False
        self._newer.append(changes)
        return True

    @property
    def is_empty(self) -> bool:
        return not self._few and not self._many

    def take(self) -> Sequence[Unsent]:
        """Return the next commands. Ask again when these are lined up."""
        line = self._few or self._many
        return [line.popleft() for _ in range(min(_PAGE, len(line)))]

    def release(self) -> Sequence[Changes]:
        """Return the runs that waited, if older small ones are lined up. From then on none waits."""
        if self._few:
            return ()
        released, self._newer, self._since = self._newer, [], None
        return released


def _rank(head: RunHead) -> tuple[int, float, str]:
    return -head.priority, head.created_at, head.id
