"""How often one of several processes decides a wide run.

Whoever commits first makes the others read the run again, and to read a wide one takes long. An engine that has it in
memory and commits every few milliseconds would leave the others no moment to be first, and with the run all that they
have to decide would wait. So whoever has decided a little of a wide run leaves it to the others for a while, in which
what comes for it gathers. Who has much to decide goes on: that is over the sooner.

With two engines on an idle machine, one that has taken some of the answers to a run of 10,000 tasks leaves it alone for
10,000 x 2 x 20 microseconds = 0.4 s, or until 500 more are there.
"""

from collections import OrderedDict
from collections.abc import Callable
from math import inf

from oraculo.core.run import Changes, Run
from oraculo.engine.inbox import Rest
from oraculo.ports.clock import Entropy

WIDE = 500  # tasks: below, a run is read in a few milliseconds
LITTLE, MUCH = 250, 500  # tasks that are changed together; of a run between them, a tenth is much
A_TASK = 20e-6  # seconds, for each task and each process: a few times as long as an idle machine takes to read one
TIMES = 4  # as long as it takes to read one here: to decide it and to commit takes as long again, and so do others
LONGEST = 5.0
SELDOM = 10  # of the time, one part is for a rest that nothing but its end, or much, ends
_FADES = 0.98  # at each rest
_REMEMBERED = 1_000


class Pace:
    """`deciders`: how many processes decide, this one among them."""

    def __init__(self, deciders: Callable[[], int], entropy: Entropy) -> None:
        self._deciders = deciders
        self._entropy = entropy
        self._to_read = 0.0  # seconds, one task, when many were read at once
        self._rested: OrderedDict[str, float] = OrderedDict()  # when a run last began a rest that nothing ends early

    def has_read(self, tasks: int, seconds: float) -> None:
        """One run from the store. A machine that has much to do takes longer, and for the others too; one that stood
        still for a moment does not, so it takes several to believe it."""
        if tasks >= WIDE:
            believed = max(self._to_read, A_TASK / TIMES)
            self._to_read = min(seconds / tasks, 2 * believed)

    def rest_after(self, changes: Changes, now: float) -> Rest | None:
        """What the one that has just decided this leaves to the others. Not when the run's deadline is near, or that of
        a task: an answer that waits here came in time, and another engine may ring the timer."""
        run, much = changes.run, min(max(LITTLE, len(changes.run.tasks) // 10), MUCH)
        seconds = self._seconds(run)
        if not seconds or len(changes.tasks) >= much or _is_near(changes, now, seconds):
            return None
        self._to_read *= _FADES  # what was read long ago tells little of how it is now
        awaited = sum(map(len, run.awaited.values())) // self._deciders()  # they share what comes
        if awaited < much and self._has_rested_lately(run.id, seconds, now):
            return Rest(seconds, enough=max(1, awaited))  # there is no more to gather: each hop of a chain would wait
        return Rest(seconds, enough=much)

    def rest_of_one_who_lost(self, changes: Changes, now: float) -> Rest | None:
        """To others, twice in a row: they are at it as often as it is, and must not go on in step."""
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
    """A deadline, also of tasks whose answers were decided here and may have to be decided again."""
    changed = changes.tasks
    deadlines = (
        each.deadline for each in changes.run.tasks if each.deadline and (each.is_open or each.number in changed)
    )
    return min(changes.run.head.due_at or inf, min(deadlines, default=inf)) - now < 2 * seconds
