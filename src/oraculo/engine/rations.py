"""How much of what a queue did not take is offered to it again at each look.

To learn whether a full queue has room takes few messages, not all that wait for it. Once it takes what it is offered,
all of the others follow.
"""

from collections import Counter
from collections.abc import Container

from oraculo.core.troubled import TroubledQueues
from oraculo.ports.store import Unsent

RATION = 100  # messages for each queue: what it has room for beyond that it has within two looks
_MOST = 50_000  # that are remembered; others are offered like those that were never tried


class Rations:
    def __init__(self) -> None:
        self._turned_away: dict[Unsent, tuple[str, TroubledQueues]] = {}
        self._offered = Counter[tuple[str, int]]()

    def note(self, one: Unsent, queue: str, refusing: TroubledQueues) -> None:
        """It was not taken. `refusing`: where it is noted for how long the queue is held to take nothing."""
        if len(self._turned_away) < _MOST:
            self._turned_away[one] = queue, refusing

    def begin(self) -> None:
        """Another look: in the order in which they ask."""
        self._offered.clear()

    def grants(self, one: Unsent, now: float) -> bool:
        """Whether it is to be offered at this look."""
        found = self._turned_away.get(one)
        if found is None:
            return True
        queue, refusing = found
        if refusing.has(queue, now):
            place = queue, id(refusing)
            self._offered[place] += 1
            if self._offered[place] > RATION:
                return False
        del self._turned_away[one]
        return True

    def keep_only(self, unsent: Container[Unsent]) -> None:
        """The others were sent by somebody else, or ended unsent."""
        self._turned_away = {one: found for one, found in self._turned_away.items() if one in unsent}
