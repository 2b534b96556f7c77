"""The sweep: finds commands that were committed and never sent, and decides which of them go out now."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from oraculo.core.queue_health import QueueHealth
from oraculo.engine.cluster.peers import Peers
from oraculo.engine.inbox import Inbox, Resend
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

    A few show whether the queue has room again. They take turns, because some may never fit while others would. Once
    the queue takes one, the next sweep sends all of the others.
    """

    def __init__(self) -> None:
        self._refused: dict[Unsent, tuple[str, QueueHealth]] = {}  # the one that was chosen last comes last
        self._chosen: set[Unsent] = set()  # for this sweep

    def note(self, one: Unsent, queue: str, refusing: QueueHealth) -> None:
        """Remember a command that `queue` refused; `refusing` knows for how long the queue counts as full."""
        if len(self._refused) < _MOST_REFUSED:
            self._refused[one] = queue, refusing

    def choose(self, now: float) -> None:
        """Begin a sweep: choose the refused commands that it may retry."""
        self._refused = {one: found for one, found in self._refused.items() if found[1].has(found[0], now)}
        self._chosen = set()
        counts = Counter[tuple[str, int]]()
        for one, (queue, refusing) in list(self._refused.items()):
            place = queue, id(refusing)
            if counts[place] < MOST_RETRIED:
                counts[place] += 1
                self._chosen.add(one)
                self._refused[one] = self._refused.pop(one)

    def takes_turn(self, one: Unsent) -> bool:
        """Return whether this sweep may send the command, and forget its refusal if so."""
        if one in self._refused and one not in self._chosen:
            return False
        self._refused.pop(one, None)
        return True


class Sweep:
    """The repeated search for unsent commands: those of a crash, of another engine, or of a full outbox."""

    def __init__(
        self, outbox: Outbox, refused: RefusedCommands, store: Store, inbox: Inbox, peers: Peers, interval: float
    ) -> None:
        self._outbox = outbox
        self._refused = refused
        self._store = store
        self._inbox = inbox
        self._peers = peers
        self._interval = interval
        self._seen: dict[Unsent, float] = {}  # and since when, by the loop's time, because clocks may be set back
        self._after: Place | None = None  # where a sweep starts; None: at the first command of all
        self._stays_until = 0.0

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
        outbox.has_spilled = False
        self._refused.choose(loop.time())
        seen: dict[Unsent, float] = {}
        is_full, after = False, None if at_once else self._after
        while page := await self._store.unsent(_PAGE, after):
            after = (page[-1].run_id, page[-1].task)
            await self._resend(page, seen, at_once=at_once)
            is_full = outbox.is_full
            if is_full or (len(seen) >= _MOST_SEEN and not at_once):
                break
        self._seen = seen
        if is_full:
            outbox.has_spilled = True
            self._stays_until = loop.time() + self._stay  # this sweep forgot what it did not meet
        else:
            self._move_start(after if page else None, loop.time())

    @property
    def _stay(self) -> float:
        """The seconds after which any engine may send what is still unsent."""
        return max(STAY, self._peers.ttl + len(self._peers.engines) * _COURTESY)

    def _move_start(self, until: Place | None, now: float) -> None:
        """Let the next sweep start behind `until`, the last command that was remembered; None: at the first of all.

        An engine sends only what it saw before, because a new command may be on its way through another. So sweeps stay
        at one place until all that they remember had its time there. Otherwise commands that no queue takes would hide
        all that come after them.
        """
        is_all_seen = self._after is None and until is None
        if is_all_seen or now >= self._stays_until:
            self._after, self._stays_until = until, now + self._stay

    async def _resend(self, page: Sequence[Unsent], seen: dict[Unsent, float], *, at_once: bool) -> None:
        """Have a page decided again, and return when it is: pages must not pile up."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        left = [one for one in page if not self._outbox.is_in_flight(one)]
        ours = [one for one in left if at_once or self._is_ours(one, now)]
        lost = [one for one in ours if self._refused.takes_turn(one)]
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
