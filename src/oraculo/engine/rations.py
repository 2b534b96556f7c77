"""How much of what a queue did not take is offered to it again at each look.

To learn whether a full queue has room takes few messages, not all that wait for it. Once it takes what it is offered,
all of the others follow. They take turns: it may be that some never fit, and others would.
"""

from collections import Counter
from collections.abc import Callable, Container

from oraculo.core.troubled import TroubledQueues
from oraculo.ports.store import Unsent

RATION = 100  # messages for each queue: what it has room for beyond that it has within two looks
_MOST = 50_000  # that are remembered; others are offered like those that were never tried


class Rations:
    def __init__(self) -> None:
        self._turned_away: dict[Unsent, tuple[str, TroubledQueues]] = {}  # the one that was tried last, last
        self._granted: set[Unsent] = set()
        self._news: set[Unsent] = set()  # since the look began

    def note(self, one: Unsent, queue: str, refusing: TroubledQueues) -> None:
        """It was not taken. `refusing`: where it is noted for how long the queue is held to take nothing."""
        if len(self._turned_away) < _MOST:
            self._turned_away[one] = queue, refusing
            self._news.add(one)

    def begin(self, now: float, wants: Callable[[Unsent], bool]) -> None:
        """Another look. `wants`: whether it would be offered, if it may."""
        shares = Counter[tuple[str, int]]()
        self._granted = set()
        self._news = set()
        for one, (queue, refusing) in self._turned_away.items():
            place = queue, id(refusing)
            if shares[place] < RATION and refusing.has(queue, now) and wants(one):
                shares[place] += 1
                self._granted.add(one)

    def grants(self, one: Unsent, now: float) -> bool:
        """Whether it is to be offered at this look."""
        found = self._turned_away.get(one)
        if found is None:
            return True
        queue, refusing = found
        if refusing.has(queue, now) and one not in self._granted:
            return False
        del self._turned_away[one]
        return True

    def keep_only(self, unsent: Container[Unsent]) -> None:
        """All that was unsent when it was looked for: the others were sent by somebody else, or ended unsent."""
        kept = self._turned_away.items()
        self._turned_away = {one: found for one, found in kept if one in unsent or one in self._news}
