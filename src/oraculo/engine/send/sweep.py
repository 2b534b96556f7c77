"""The sweep: finds commands that were committed and never sent, and decides which of them go out now."""

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Sequence

from oraculo.core.queue_health import TroubledQueues
from oraculo.engine.cluster.peers import Peers
from oraculo.engine.inbox import Inbox, Resend
from oraculo.engine.send.backlog import Backlog
from oraculo.engine.send.outbox import Outbox
from oraculo.ports.store import Store, Unsent

MOST_RETRIED = 100  # messages of one refusing queue in one sweep
STAY = 30.0  # seconds at least before the start moves on: the first retry of a full queue offers it everything
_MOST_REFUSED = 50_000  # messages that are remembered; the sweep treats any other like one that was never refused
_MOST_SEEN = 50_000  # commands that are remembered from one sweep to the next
_PAGE = 1000
_COURTESY = 2.0  # seconds that each engine of a better rank has to send a command first

Place = tuple[str, int]  # run id, task


class RefusedCommands:
    """Limits how many refused commands one sweep retries on a full queue.

    A few messages show whether the queue has room again. They take turns, because some may never fit while others
    would. As soon as the queue takes one, all of the others follow.
    """

    def __init__(self) -> None:
        self._refused: dict[Unsent, tuple[str, TroubledQueues]] = {}  # the one that was retried last comes last
        self._chosen: dict[Unsent, None] = {}  # for this sweep, in that order
        self._new: set[Unsent] = set()  # refused since the sweep began
        self._has_sweeps = False  # an API beside engines leaves the sweeps to them

    def note(self, one: Unsent, queue: str, refusing: TroubledQueues) -> None:
        """Remember a command that `queue` refused; `refusing` knows for how long the queue counts as full."""
        if self._has_sweeps and len(self._refused) < _MOST_REFUSED:
            self._refused[one] = queue, refusing
            self._new.add(one)

    def choose(self, now: float, is_wanted: Callable[[Unsent], bool]) -> None:
        """Begin a sweep: choose which refused commands it retries, among those that it wants to send."""
        self._has_sweeps = True
        self._put_missed_last()
        counts = Counter[tuple[str, int]]()
        self._chosen = {}
        self._new = set()
        for one, (queue, refusing) in self._refused.items():
            place = queue, id(refusing)
            if counts[place] < MOST_RETRIED and refusing.has(queue, now) and is_wanted(one):
                counts[place] += 1
                self._chosen[one] = None

    def _put_missed_last(self) -> None:
        """Move chosen commands that the last sweep did not meet to the end: their tasks may have ended."""
        for one in self._chosen:
            if one in self._refused and one not in self._new:
                self._refused[one] = self._refused.pop(one)

    def takes_turn(self, one: Unsent, now: float) -> bool:
        """Return whether this sweep may send the command, and forget the refusal if so."""
        found = self._refused.get(one)
        if found is None:
            return True
        queue, refusing = found
        if refusing.has(queue, now) and one not in self._chosen:
            return False
        del self._refused[one]
        return True

    def keep_only(self, unsent: Container[Unsent]) -> None:
        """Forget refused commands that a whole sweep did not meet."""
        kept = self._refused.items()
        self._refused = {one: found for one, found in kept if one in unsent or one in self._new}


class SweepStart:
    """The place where the next sweep starts, when more is unsent than a sweep can remember.

    Engines send only what they saw before, because a new command may be on its way through another engine. So sweeps
    stay at one place until all that they remember had its time there, and then move on. Otherwise commands that no
    queue takes would hide all that come after them.
    """

    def __init__(self) -> None:
        self.after: Place | None = None  # None: the sweep starts at the first command of all
        self._end: Place | None = None  # the last command that has its time now; None: the last of all
        self._since: float | None = None  # when the sweeps had seen all of them

    def move(self, until: Place | None, began: float, now: float, patience: float) -> None:
        """Note a sweep that began at `began` and remembered commands up to `until` (None: up to the last).

        After `patience` seconds any engine may send what is still unsent.
        """
        if self.after is None and until is None:
            self._since = None
        elif self._since is None:
            self._since, self._end = now, until
        elif began - self._since >= max(STAY, patience):
            self._since, self.after = None, self._end

    def restart_stay(self) -> None:
        """Begin the stay anew, because an interrupted sweep forgot what it did not meet."""
        self._since = None


class Sweep:
    """The repeated search for unsent commands: those of a crash, of another engine, or of a full outbox."""

    def __init__(
        self,
        outbox: Outbox,
        backlog: Backlog,
        refused: RefusedCommands,
        store: Store,
        inbox: Inbox,
        peers: Peers,
        interval: float,
    ) -> None:
        self._outbox = outbox
        self._backlog = backlog
        self._refused = refused
        self._store = store
        self._inbox = inbox
        self._peers = peers
        self._interval = interval
        self._seen: dict[Unsent, float] = {}  # and since when, by the loop's time, because clocks may be set back
        self._start = SweepStart()

    async def run(self) -> None:
        await self.look(is_start=True)
        while True:
            await asyncio.sleep(self._interval)
            await self.look()

    async def look(self, *, is_start: bool = False) -> None:
        """Send again what is unsent and is no other process's to send.

        A command that is seen for the first time may be on its way through another process. A lone engine sends it
        when the next sweep still finds it. With other engines it waits until the one that committed it would be
        missed, and until engines of a better rank had their time. A lone engine does not wait at its start, nor for
        what its own outbox had no room for.
        """
        outbox, peers = self._outbox, self._peers
        if outbox.trouble is not None and not peers.is_alone:
            return  # other engines' commands would only be sent twice when the broker is back
        # An API beside may be sending a wide run at this engine's start.
        at_once = ((is_start and not peers.has_apis_beside) or outbox.has_spilled) and peers.is_alone
        loop = asyncio.get_running_loop()
        began = loop.time()
        outbox.has_spilled = False
        self._refused.choose(began, lambda one: at_once or self._is_ours(one, began))
        if at_once:
            self._start = SweepStart()
        if at_once and is_start:
            await self._read_backlog()
        if not await self._send_backlog():
            outbox.has_spilled = True
            return
        seen: dict[Unsent, float] = {}
        is_full, after = False, self._start.after
        while page := await self._store.unsent(_PAGE, after):
            after = (page[-1].run_id, page[-1].task)
            await self._resend(page, seen, at_once=at_once)
            is_full = outbox.is_full
            if is_full or (len(seen) >= _MOST_SEEN and not at_once):
                break
        self._seen = seen
        if is_full:
            outbox.has_spilled = True
            self._start.restart_stay()
        else:
            self._refused.keep_only(seen)
            patience = peers.ttl + len(peers.engines) * _COURTESY
            self._start.move(after if page else None, began, loop.time(), patience)

    async def _read_backlog(self) -> None:
        try:
            await self._backlog.read()
        except Exception:
            self._send_released()  # new runs must not wait for a store that does not answer
            raise

    def _send_released(self) -> None:
        for changes in self._backlog.release():
            self._outbox.send(changes)

    async def _send_backlog(self) -> bool:
        """Send what was unsent at the start, and return whether there was room for all of it."""
        while True:
            self._send_released()
            if self._backlog.is_empty:
                return True
            if self._outbox.is_full:
                return False
            await self._resend(self._backlog.take(), {}, at_once=True)

    async def _resend(self, page: Sequence[Unsent], seen: dict[Unsent, float], *, at_once: bool) -> None:
        """Have a page decided again, and return when it is: pages must not pile up."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        left = [one for one in page if not self._outbox.is_in_flight(one)]
        ours = [one for one in left if at_once or self._is_ours(one, now)]
        lost = [one for one in ours if self._refused.takes_turn(one, now)]
        if len(seen) < _MOST_SEEN:
            seen.update({one: self._seen.get(one, now) for one in left})
            # Their time begins anew, so that not every engine tries a refused command at every sweep.
            seen.update({one: now for one in ours if self._peers.rank(one.run_id)})
        resends = [Resend(one.run_id, one.task, one.attempt, loop.create_future()) for one in lost]
        self._inbox.put(resends)
        await asyncio.gather(*(resend.done for resend in resends), return_exceptions=True)

    def _is_ours(self, one: Unsent, now: float) -> bool:
        since = self._seen.get(one)
        if since is None:
            return False
        if self._peers.is_alone and not self._peers.has_apis_beside:
            return True
        longer = now - since - self._peers.ttl
        return longer >= 0 and longer >= self._peers.rank(one.run_id) * _COURTESY  # the rank is slow to compute
