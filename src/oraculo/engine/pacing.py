"""How often one of several engines decides a wide run.

Whoever commits first makes the others read the run again, and to read a wide one takes long. An engine that has it in
memory and commits every few milliseconds would leave the others no moment to be first, and with the run all that they
have to decide would wait. So whoever has decided a wide run leaves it to the others for a while, in which what comes
for it gathers.
"""

from collections.abc import Callable

from oraculo.core.run import Run
from oraculo.ports.clock import Entropy

WIDE = 500  # tasks: below, a run is read in a few milliseconds
A_TASK = 20e-6  # seconds, for each task and each engine: a few times as long as it takes to read one
LONGEST = 2.0


class Pace:
    def __init__(self, engines: Callable[[], int], entropy: Entropy) -> None:
        self._engines = engines
        self._entropy = entropy

    def rest(self, run: Run) -> float:
        """Seconds in which the engine that has just decided it does not do so again. 0: as soon as it likes."""
        engines = self._engines()
        if engines == 1 or len(run.tasks) < WIDE:
            return 0.0
        return min(len(run.tasks) * engines * A_TASK, LONGEST)

    def rest_of_one_who_lost(self, run: Run) -> float:
        """To others, twice in a row: they are at it as often as it is, and must not go on in step."""
        return self.rest(run) * (0.5 + self._entropy.jitter())
