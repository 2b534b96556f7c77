"""How often one of several processes decides a wide run.

Whoever commits first makes the others read the run again, and to read a wide one takes long. An engine that has it in
memory and commits every few milliseconds would leave the others no moment to be first, and with the run all that they
have to decide would wait. So whoever has decided a little of a wide run leaves it to the others for a while, in which
what comes for it gathers. Who decides much at once takes as long for it as the others take to read.
"""

from collections.abc import Callable

from oraculo.core.run import Changes, Run
from oraculo.ports.clock import Entropy

WIDE = 500  # tasks: below, a run is read in a few milliseconds
MUCH = 250  # tasks that are changed together
A_TASK = 20e-6  # seconds, for each task and each process: a few times as long as it takes to read one
LONGEST = 1.0


class Pace:
    """`deciders`: how many processes decide, this one among them."""

    def __init__(self, deciders: Callable[[], int], entropy: Entropy) -> None:
        self._deciders = deciders
        self._entropy = entropy

    def rest_after(self, changes: Changes) -> float:
        """Seconds in which the one that has just decided this does not decide the run again. 0: as soon as it likes."""
        return self._rest(changes.run) if len(changes.tasks) < MUCH else 0.0

    def rest_of_one_who_lost(self, run: Run) -> float:
        """To others, twice in a row: they are at it as often as it is, and must not go on in step."""
        return self._rest(run) * (0.5 + self._entropy.jitter())

    def _rest(self, run: Run) -> float:
        deciders = self._deciders()
        if deciders == 1 or len(run.tasks) < WIDE:
            return 0.0
        return min(len(run.tasks) * deciders * A_TASK, LONGEST)
