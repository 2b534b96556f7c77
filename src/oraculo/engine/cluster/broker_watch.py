"""Watches over the brokers: what a lost one had taken is sent again, under the same identity, through another.

A broker that is away while another works is lost once that has lasted a moment: a connection that breaks and comes
back at once kept its messages. So it is with one that works and does not let us read: what it took may be answered, and
nobody would hear it. One that came back without its memory is lost too, its dead letters included, and so is one that
is no longer among those configured.
"""

import asyncio
from collections.abc import Iterable

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
LONGEST_PAUSE = 30.0  # between two looks for what a lost broker took: notes of it may still be on their way
LOOKS_AFTER_A_LOSS = 3  # some of what was sent before the loss is noted only later
MOST_LEFT = 10_000  # runs
_PAGE = 50


class _Absence:
    """When to look, and look again, for what a broker took that is away: by the loop's time, since clocks may be set
    back."""

    def __init__(self, now: float) -> None:
        self.next_look = now + GRACE
        self._pause = GRACE
        self._left: dict[str, tuple[float, float]] = {}  # runs: until when they are left alone, and for how long

    def leaves(self, run_id: str, now: float) -> bool:
        return now < self._left.get(run_id, (now, 0.0))[0]

    def note_taken(self, run_ids: Iterable[str], now: float) -> None:
        """One that is there again was sent there by an engine that reaches the broker, perhaps because it misses
        another: it is left to that engine for longer each time, or both would send it again and again."""
        for run_id in run_ids:
            if run_id in self._left or len(self._left) < MOST_LEFT:
                pause = 4 * self._left.get(run_id, (0.0, GRACE))[1]
                self._left[run_id] = (now + pause, pause)

    def leave_nothing(self) -> None:
        """The engine that reached the broker may be gone."""
        self._left.clear()

    def look_later(self, now: float) -> None:
        self.next_look = now + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)


class _Loss(_Absence):
    """A broker came back without its memory. Notes of what it had confirmed may still be on their way."""

    def __init__(self, now: float, at: float) -> None:
        super().__init__(now)
        self.at = at  # by the clock
        self.next_look = now
        self.looks_left = LOOKS_AFTER_A_LOSS


class BrokerWatch:
    """`acts`: it sends again what was lost. Otherwise it only tells how the brokers are doing."""

    def __init__(
        self,
        broker: Broker,
        store: Store,
        inbox: Inbox,
        peers: Peers,
        clock: Clock,
        telemetry: Telemetry,
        poll: float,
        *,
        acts: bool = True,
    ) -> None:
        self._acts = acts
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
        self._departures: int | None = None  # of peers, after which strangers were looked for
        # Of the loop's time, the most that the clock ever was: by a clock that was set back, commands sent before a
        # loss would seem to be sent since.
        self._ahead = float("-inf")

    async def run(self) -> None:
        while True:
            if self._acts and self._departures != self._peers.departures:
                await self._take_back_from_strangers()
            await self.look()
            await asyncio.sleep(self._poll)

    async def look(self) -> None:
        links = self._broker.statuses()
        some_read, some_work = any(map(_is_read, links)), any(link.trouble is None for link in links)
        self._mind_clock()
        for link in links:
            self._tell(link)
            if self._acts and link.losses > self._losses_of(link.name):
                self.note_loss(link.name)
            self._known[link.name] = link  # before anything can fail: a loss is counted once
            if self._acts:
                await self._look_at(link, some_read if link.trouble is None else some_work)

    def _mind_clock(self) -> None:
        self._ahead = max(self._ahead, self._clock.now() - asyncio.get_running_loop().time())

    async def _look_at(self, link: BrokerStatus, has_better: bool) -> None:
        await self._look_after_loss(link.name)
        if _is_read(link):
            self._absences.pop(link.name, None)
        elif has_better:
            await self._missed(link)

    def memory_was_lost(self) -> None:
        """Whatever the brokers took before now may be gone."""
        for link in self._broker.statuses():
            self.note_loss(link.name)

    def note_loss(self, name: str, at: float | None = None) -> None:
        """Whatever this broker took before now, or before `at` by the loop's time, is gone."""
        self._losses[name] = self._new_loss(at)

    def has_taken_back(self, name: str) -> bool:
        """Whether all that it had taken when it lost its memory counts as not sent: of losses that it told of too."""
        told = sum(link.losses for link in self._broker.statuses() if link.name == name)
        return name not in self._losses and told == self._losses_of(name)

    async def gave_nothing_to(self, name: str) -> bool:
        """Whether it is known that this broker has nothing of ours to lose."""
        try:
            held = [await self._store.held_by(name, 1, dead_letters=letters) for letters in (False, True)]
        except StoreError:
            return False
        return not any(held)

    def _new_loss(self, at: float | None) -> _Loss:
        """By a clock that was never set back: by one that was, what was sent before would seem to come later."""
        self._mind_clock()
        now = asyncio.get_running_loop().time()
        return _Loss(now, (now if at is None else at) + self._ahead)

    async def _look_after_loss(self, name: str) -> None:
        loss, now = self._losses.get(name), asyncio.get_running_loop().time()
        if loss is None or now < loss.next_look:
            return
        undecided = await self._take_back(name, before=loss.at, letters=loss.looks_left == 1)
        loss.look_later(now)
        loss.looks_left -= not undecided
        if not loss.looks_left and self._losses.get(name) is loss:
            del self._losses[name]

    def _losses_of(self, name: str) -> int:
        return self._known[name].losses if name in self._known else 0

    def _tell(self, link: BrokerStatus) -> None:
        before = self._known.get(link.name)
        was_well, is_well = before is None or before.trouble is None, link.trouble is None
        if was_well is not is_well:
            self._telemetry.emit(BrokerChanged(link.name, link.trouble))

    async def _missed(self, link: BrokerStatus) -> None:
        now = asyncio.get_running_loop().time()
        absence = self._absences.setdefault(link.name, _Absence(now))
        if now >= absence.next_look:
            await self._take_back(link.name, absence)
            absence.look_later(now)

    async def _take_back_from_strangers(self) -> None:
        """What an earlier configuration sent elsewhere: at the start, and when an engine has gone, which may have been
        the last that listened there."""
        departures = self._peers.departures
        for absence in self._absences.values():
            absence.leave_nothing()
        ours = {link.name for link in self._broker.statuses()}
        for via in await self._store.brokers_in_use():
            if via not in ours:
                await self._take_back(via)
        self._departures = departures

    async def _take_back(
        self, via: str | None, absence: _Absence | None = None, *, before: float | None = None, letters: bool = False
    ) -> int:
        """`before`: the memory was lost then. `letters`: the dead letters with it; of these nobody knows when they were
        sent, so they are taken back once, when all that was sent is noted. Returns how many runs could not be
        decided."""
        count, undecided = await self._decide(BrokerLost(via, before=before), absence)
        if letters:
            more, more_undecided = await self._decide(BrokerLost(via, dead_letters=True, before=before))
            count, undecided = count + more, undecided + more_undecided
        if count:
            self._telemetry.emit(CommandsTakenBack(via or "unknown", count))
        return undecided

    async def _decide(self, event: BrokerLost, absence: _Absence | None = None) -> tuple[int, int]:
        """A page of runs at a time, each decided and committed like anything else that happens to a run. Returns how
        many had something to send again, and how many could not be decided."""
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


def _is_read(link: BrokerStatus) -> bool:
    return link.trouble is None and not link.unread
