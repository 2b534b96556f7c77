"""The pauses that an engine makes between its decisions on a wide run, for other processes.

A commit makes the other processes read the run again, and reading a wide one takes long. An engine that commits every
few milliseconds would leave them no moment to be first, and all that they have to decide on the run would wait. So an
engine that decided a little of a wide run leaves it alone for a while, and what comes for it gathers. An engine with
much to decide goes on, because that is over sooner.

With two engines on an idle machine, one that took some of the answers to a run of 10,000 tasks leaves it alone for
10,000 x 2 x 20 microseconds = 0.4 s, or until 500 more have come.
"""

from collections import OrderedDict
from collections.abc import Callable
from math import inf

from oraculo.core.run import Changes, Run
from oraculo.engine.inbox import Rest
from oraculo.ports.clock import Entropy

WIDE = 500  # tasks; a narrower run is read in a few milliseconds
LITTLE, MUCH = 250, 500  # bounds of a tenth of the run: so many tasks changed together are much
A_TASK = 20e-6  # seconds for each task and process: a few times what an idle machine takes to read one
TIMES = 4  # the rest in readings: deciding and committing take as long again, here and elsewhere
LONGEST = 5.0
SELDOM = 10  # a tenth of the time goes to rests that only their end, or much, ends
_FADES = 0.98  # at each rest
_REMEMBERED = 1_000


class Pace:
    """The rests of wide runs. `deciders` counts the processes that decide, this one included."""

    def __init__(self, deciders: Callable[[], int], entropy: Entropy) -> None:
        self._deciders = deciders
        self._entropy = entropy
        self._to_read = 0.0  # seconds for one task of a wide run
        self._rested: OrderedDict[str, float] = OrderedDict()  # when each run last began a rest that only much ends

    def has_read(self, tasks: int, seconds: float) -> None:
        """Learn from the time that one run took to read.

        A busy machine takes longer, and so do the others. One that stood still for a moment does not: several slow
        readings in a row are needed to believe it.
        """
        if tasks >= WIDE:
            believed = max(self._to_read, A_TASK / TIMES)
            self._to_read = min(seconds / tasks, 2 * believed)

    def rest_after(self, changes: Changes, now: float) -> Rest | None:
        """Return the rest of a run after this decision, if any.

        No run rests near its deadline or a task's: an answer that waits here came in time, and another engine may ring
        the timer.
        """
        run, much = changes.run, min(max(LITTLE, len(changes.run.tasks) // 10), MUCH)
        seconds = self._seconds(run)
        if not seconds or len(changes.tasks) >= much or _is_near(changes, now, seconds):
            return None
        self._to_read *= _FADES  # an old reading says little about the present
        awaited = sum(map(len, run.awaited.values())) // self._deciders()  # the processes share what comes
        if awaited < much and self._has_rested_lately(run.id, seconds, now):
            return Rest(seconds, enough=max(1, awaited))  # no more will gather, and each step of a chain would wait
        return Rest(seconds, enough=much)

    def rest_of_one_who_lost(self, changes: Changes, now: float) -> Rest | None:
        """Return the rest of a run after two lost races in a row.

        It is random, because the other engines try as often as this one, and must not go on in step.
        """
        seconds = self._seconds(changes.run) * (0.5 + self._entropy.jitter())
        return Rest(seconds, after_loss=True) if seconds and not _is_near(changes, now, seconds) else None

    def _seconds(self, run: Run) -> float:
        if len(run.tasks) < WIDE or (deciders := self._deciders()) == 1:
            return 0.0
        return min(len(run.tasks) * deciders * max(A_TASK, TIMES * self._to_read), LONGEST)

    def _has_rested_lately(self, run_id: str, seconds: float, now: float) -> bool:
        last = self._rested.pop(run_id, -inf)
        is_lately = abs(now - last) < SELDOM * seconds
        self._rested[run_id] = last if is_lately else now
        if len(self._rested) > _REMEMBERED:
            self._rested.popitem(last=False)
        return is_lately


def _is_near(changes: Changes, now: float, seconds: float) -> bool:
    """Return whether a deadline is near, also of tasks whose answers may have to be decided again."""
    changed = changes.tasks
    deadlines = (
        each.deadline for each in changes.run.tasks if each.deadline and (each.is_open or each.number in changed)
    )
    return min(changes.run.head.due_at or inf, min(deadlines, default=inf)) - now < 2 * seconds
