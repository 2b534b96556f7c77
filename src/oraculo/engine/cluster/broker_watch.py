"""The watch over brokers: what a lost one had taken is sent again through another, under the same identity.

A broker counts as lost when it is away for a moment while another works; a connection that breaks and comes back at
once kept its messages. A broker that works but does not let engines read counts as lost too, because nobody would hear
the answers. So does one that came back without its memory, with its dead letters, and one that is no longer configured.
"""

import asyncio
from collections.abc import Callable, Iterable

from oraculo.core.events import BrokerLost
from oraculo.core.machine import Verdict
from oraculo.engine.cluster.peers import Peers
from oraculo.engine.inbox import Inbox, Wish
from oraculo.errors import StoreError
from oraculo.ports.broker import Broker, BrokerStatus
from oraculo.ports.clock import Clock
from oraculo.ports.store import Store
from oraculo.ports.telemetry import BrokerChanged, CommandsTakenBack, Telemetry

GRACE = 2.0  # seconds that a broker must have been away
LONGEST_PAUSE = 30.0  # seconds between two looks for what a lost broker took, whose notes may still come
LOOKS_AFTER_A_LOSS = 3  # because some sendings are noted only after the loss
MOST_LEFT = 10_000  # runs
_PAGE = 50


class _Absence:
    """The times at which the engine looks for what an absent broker took.

    They are of the loop, because clocks may be set back.
    """

    def __init__(self, now: float) -> None:
        self.next_look = now + GRACE
        self._pause = GRACE
        self._left: dict[str, tuple[float, float]] = {}  # runs: until when they are left alone, and for how long

    def leaves(self, run_id: str, now: float) -> bool:
        return now < self._left.get(run_id, (now, 0.0))[0]

    def note_taken(self, run_ids: Iterable[str], now: float) -> None:
        """Note runs whose commands are sent again, and leave those for longer that come back to this broker.

        Another engine that reaches the broker sent them there again, perhaps because it misses a different one. Without
        a growing pause both engines would send them for ever.
        """
        for run_id in run_ids:
            if run_id in self._left or len(self._left) < MOST_LEFT:
                pause = 4 * self._left.get(run_id, (0.0, GRACE))[1]
                self._left[run_id] = (now + pause, pause)

    def leave_nothing(self) -> None:
        """Forget the pauses, because the engine that reached the broker may be gone."""
        self._left.clear()

    def look_later(self, now: float) -> None:
        self.next_look = now + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)


class _Loss(_Absence):
    """A broker that came back without its memory.

    Notes of what it had confirmed may still be on their way.
    """

    def __init__(self, now: float, at: float) -> None:
        super().__init__(now)
        self.at = at  # by the clock
        self.next_look = now
        self.looks_left = LOOKS_AFTER_A_LOSS


class BrokerWatch:
    """The loop that looks at all brokers. Engines send lost commands again; an API only logs how the brokers are."""

    def __init__(
        self,
        broker: Broker,
        store: Store,
        inbox: Inbox,
        peers: Peers,
        clock: Clock,
        telemetry: Telemetry,
        poll: float,
    ) -> None:
        self._acts = peers.is_engine
        self._broker = broker
        self._store = store
        self._inbox = inbox
        self._peers = peers
        self._clock = clock
        self._telemetry = telemetry
        self._poll = poll
        self._known: dict[str, BrokerStatus] = {}
        self._absences: dict[str, _Absence] = {}
        self._losses: dict[str, _Loss] = {}
        self.on_loss: Callable[[], object] = lambda: None
        self._departures: int | None = None  # of peers, when strangers were last looked for
        # The most that the clock ever was ahead of the loop's time (see `_new_loss`).
        self._ahead = float("-inf")

    async def run(self) -> None:
        while True:
            if self._acts and self._departures != self._peers.departures:
                await self._take_back_from_strangers()
            await self.look()
            await asyncio.sleep(self._poll)

    async def look(self) -> None:
        """Look at every broker once."""
        statuses = self._broker.statuses()
        some_read, some_work = any(map(_is_read, statuses)), any(one.trouble is None for one in statuses)
        self._mind_clock()
        for status in statuses:
            self._report_change(status)
            self._known[status.name] = status
            if self._acts:
                await self._look_at(status, some_read if status.trouble is None else some_work)

    def _mind_clock(self) -> None:
        self._ahead = max(self._ahead, self._clock.now() - asyncio.get_running_loop().time())

    async def _look_at(self, status: BrokerStatus, has_better: bool) -> None:
        await self._look_after_loss(status.name)
        if _is_read(status):
            self._absences.pop(status.name, None)
        elif has_better:
            await self._missed(status)

    def memory_was_lost(self) -> None:
        """Note that everything may be gone that the brokers took before now."""
        for status in self._broker.statuses():
            self.note_loss(status.name)

    def note_loss(self, name: str, at: float | None = None) -> None:
        """Note that everything is gone that this broker took before `at` (by the loop's time; now by default)."""
        self._losses[name] = self._new_loss(at)
        self.on_loss()

    def has_taken_back(self, name: str) -> bool:
        """Return whether everything lost counts as unsent."""
        return name not in self._losses

    async def gave_nothing_to(self, name: str) -> bool:
        """Return whether this broker surely has nothing of ours to lose."""
        try:
            held = [await self._store.held_by(name, 1, dead_letters=dead) for dead in (False, True)]
        except StoreError:
            return False
        return not any(held)

    def _new_loss(self, at: float | None) -> _Loss:
        """Return a loss, timed by a clock that was never set back.

        By a clock that was set back, commands sent before the loss would seem to be sent after it.
        """
        self._mind_clock()
        now = asyncio.get_running_loop().time()
        return _Loss(now, (now if at is None else at) + self._ahead)

    async def _look_after_loss(self, name: str) -> None:
        loss, now = self._losses.get(name), asyncio.get_running_loop().time()
        if loss is None or now < loss.next_look:
            return
        undecided = await self._take_back(name, before=loss.at, dead_letters=loss.looks_left == 1)
        loss.look_later(now)
        loss.looks_left -= not undecided
        if not loss.looks_left and self._losses.get(name) is loss:
            del self._losses[name]

    def _report_change(self, status: BrokerStatus) -> None:
        before = self._known.get(status.name)
        was_well, is_well = before is None or before.trouble is None, status.trouble is None
        if was_well is not is_well:
            self._telemetry.emit(BrokerChanged(status.name, status.trouble))

    async def _missed(self, status: BrokerStatus) -> None:
        now = asyncio.get_running_loop().time()
        absence = self._absences.setdefault(status.name, _Absence(now))
        if now >= absence.next_look:
            await self._take_back(status.name, absence)
            absence.look_later(now)

    async def _take_back_from_strangers(self) -> None:
        """Take back what was sent to brokers that are no longer configured.

        This happens at the start, and after an engine is gone that may have been the last to listen there.
        """
        departures = self._peers.departures
        for absence in self._absences.values():
            absence.leave_nothing()
        ours = {status.name for status in self._broker.statuses()}
        for broker in await self._store.brokers_in_use():
            if broker not in ours:
                await self._take_back(broker)
        self._departures = departures

    async def _take_back(
        self,
        broker: str | None,
        absence: _Absence | None = None,
        *,
        before: float | None = None,
        dead_letters: bool = False,
    ) -> int:
        """Have what a broker took sent again, and return how many runs could not be decided.

        `before`: the time of its loss. `dead_letters`: take those back too. Nobody knows when they were sent, so that
        happens once, after all sendings are noted.
        """
        count, undecided = await self._decide(BrokerLost(broker, before=before), absence)
        if dead_letters:
            more, more_undecided = await self._decide(BrokerLost(broker, dead_letters=True, before=before))
            count, undecided = count + more, undecided + more_undecided
        if count:
            self._telemetry.emit(CommandsTakenBack(broker or "unknown", count))
        return undecided

    async def _decide(self, event: BrokerLost, absence: _Absence | None = None) -> tuple[int, int]:
        """Have an event decided for every run that the broker took something of, one page at a time.

        Return how many runs have something to send again, and how many could not be decided.
        """
        count, undecided, after = 0, 0, ""
        loop = asyncio.get_running_loop()
        while page := await self._store.held_by(event.via, _PAGE, after, dead_letters=event.dead_letters):
            concerned = [run_id for run_id in page if absence is None or not absence.leaves(run_id, loop.time())]
            wishes = [Wish(run_id, event, loop.create_future()) for run_id in concerned]
            self._inbox.put(wishes)
            verdicts = await asyncio.gather(*(wish.done for wish in wishes), return_exceptions=True)
            taken = [run_id for run_id, verdict in zip(concerned, verdicts, strict=True) if verdict is Verdict.APPLIED]
            if absence is not None:
                absence.note_taken(taken, loop.time())
            count, after = count + len(taken), page[-1]
            undecided += sum(isinstance(verdict, BaseException) for verdict in verdicts)
        return count, undecided


def _is_read(status: BrokerStatus) -> bool:
    return status.trouble is None and not status.unread
