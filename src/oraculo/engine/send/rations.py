"""How much of what a queue did not take is offered to it again at each look.

To learn whether a full queue has room takes few messages, not all that wait for it. Once it takes what it is offered,
all of the others follow. They take turns: it may be that some never fit, and others would.
"""

from collections import Counter
from collections.abc import Callable, Container

from oraculo.core.troubled_queues import TroubledQueues
from oraculo.ports.store import Unsent

RATION = 100  # messages for each queue: what it has room for beyond that it has within two looks
_MOST = 50_000  # that are remembered; others are offered like those that were never tried


class Rations:
    def __init__(self) -> None:
        self._turned_away: dict[Unsent, tuple[str, TroubledQueues]] = {}  # the one that was tried last, last
        self._granted: dict[Unsent, None] = {}  # in that order
        self._news: set[Unsent] = set()  # since the look began
        self._is_asked = False  # never by a process that leaves the looking to others

    def note(self, one: Unsent, queue: str, refusing: TroubledQueues) -> None:
        """It was not taken. `refusing`: where it is noted for how long the queue is held to take nothing."""
        if self._is_asked and len(self._turned_away) < _MOST:
            self._turned_away[one] = queue, refusing
            self._news.add(one)

    def begin(self, now: float, wants: Callable[[Unsent], bool]) -> None:
        """Another look. `wants`: whether it would be offered, if it may."""
        self._is_asked = True
        self._put_unmet_last()
        shares = Counter[tuple[str, int]]()
        self._granted = {}
        self._news = set()
        for one, (queue, refusing) in self._turned_away.items():
            place = queue, id(refusing)
            if shares[place] < RATION and refusing.has(queue, now) and wants(one):
                shares[place] += 1
                self._granted[one] = None

    def _put_unmet_last(self) -> None:
        """What had its turn and was not met may have ended unsent; a look that is cut short does not say."""
        for one in self._granted:
            if one in self._turned_away and one not in self._news:
                self._turned_away[one] = self._turned_away.pop(one)

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
