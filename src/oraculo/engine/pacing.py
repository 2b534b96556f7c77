"""How often one of several processes decides a wide run.

Whoever commits first makes the others read the run again, and to read a wide one takes long. An engine that has it in
memory and commits every few milliseconds would leave the others no moment to be first, and with the run all that they
have to decide would wait. So whoever has decided a little of a wide run leaves it to the others for a while, in which
what comes for it gathers. Who has much to decide goes on: that is over the sooner.
"""

from collections.abc import Callable

from oraculo.core.run import Changes, Run
from oraculo.engine.inputs import Rest
from oraculo.ports.clock import Entropy

WIDE = 500  # tasks: below, a run is read in a few milliseconds
LITTLE, MUCH = 250, 500  # tasks that are changed together; of a run between them, a tenth is much
A_TASK = 20e-6  # seconds, for each task and each process: a few times as long as it takes to read one
LONGEST = 1.0


class Pace:
    """`deciders`: how many processes decide, this one among them."""

    def __init__(self, deciders: Callable[[], int], entropy: Entropy) -> None:
        self._deciders = deciders
        self._entropy = entropy

    def rest_after(self, changes: Changes, now: float) -> Rest | None:
        """What the one that has just decided this leaves to the others. Not when the run's deadline is near: an answer
        that waits here came in time."""
        run, much = changes.run, min(max(LITTLE, len(changes.run.tasks) // 10), MUCH)
        seconds = self._seconds(run)
        is_near = run.head.due_at is not None and run.head.due_at - now < 2 * seconds
        return Rest(seconds, enough=much) if seconds and not is_near and len(changes.tasks) < much else None

    def rest_of_one_who_lost(self, run: Run) -> Rest | None:
        """To others, twice in a row: they are at it as often as it is, and must not go on in step."""
        seconds = self._seconds(run) * (0.5 + self._entropy.jitter())
        return Rest(seconds, after_loss=True) if seconds else None

    def _seconds(self, run: Run) -> float:
        if len(run.tasks) < WIDE or (deciders := self._deciders()) == 1:
            return 0.0
        return min(len(run.tasks) * deciders * A_TASK, LONGEST)
