"""The timers that the store keeps: deadlines, retries, deliveries. No message is needed for one to ring."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from math import inf

from oraculo.core.events import Event
from oraculo.core.machine import Verdict
from oraculo.core.run import Changes
from oraculo.engine.cluster.peers import Peers
from oraculo.engine.inbox import Inbox, Wish
from oraculo.ports.clock import Clock
from oraculo.ports.store import Due, Store

_PAGE = 500
_SET_APART_FOR = 30.0
_MOST_SET_APART = 50_000  # more would fill every page, and no other timer would ring
_COURTESY = 2.0  # seconds that each engine of a better rank has to ring a timer
_MOST_LEFT = 2_000
_MOST_UNDER_WAY = 2_000
_GLANCE = 0.1  # seconds between two looks while some are left to others, or are under way


class Timers:
    """A loop that sleeps until the next timer it knows, and looks for other engines' timers now and then.

    `event_maker` makes the event of each timer, with what is known now about queues and brokers.
    """

    def __init__(
        self,
        store: Store,
        inbox: Inbox,
        clock: Clock,
        peers: Peers,
        poll: float,
        event_maker: Callable[[], Callable[[Due], Event]],
    ) -> None:
        self._store = store
        self._inbox = inbox
        self._clock = clock
        self._peers = peers
        self._poll = poll
        self._event_maker = event_maker
        self._next: float | None = None
        self._set_apart: dict[Due, float] = {}  # timers that break the engine, and when they are tried again
        self._left: dict[Due, float] = {}  # timers left to other engines, and since when; both by the loop's time
        self._under_way: dict[Due, Wish] = {}  # timers that were rung and are not decided yet
        self._wake = asyncio.Event()
        self._wakes_at = -inf  # by the loop's time; -inf while it is awake

    def expect(self, changes: Changes) -> None:
        """Look at the timers that a commit set: one of them may be the next."""
        due = changes.run.head.due_at
        if due is not None:
            self._expect_at(due)
        for task in changes.tasks.values():
            if task.due_at is not None:
                self._expect_at(task.due_at)

    def _expect_at(self, due: float) -> None:
        if self._next is None or due < self._next:
            self._next = due
            if due - self._clock.now() < self._wakes_at - asyncio.get_running_loop().time():
                self._wake.set()  # only for an earlier timer, because a look into the store for every new run is slow

    async def run(self) -> None:
        """Ring timers for ever."""
        while True:
            await self._ring_due()
            self._wake.clear()
            now = self._clock.now()
            pause = self._poll if self._next is None else min(self._poll, max(0.0, self._next - now))
            self._wakes_at = asyncio.get_running_loop().time() + pause
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):  # `wait_for` may swallow a cancellation
                    await self._wake.wait()
            self._wakes_at = -inf

    async def _ring_due(self) -> None:
        while True:
            self._next = None
            self._take_outcomes()
            # Timers that are set apart, left to others or under way come first again, and must not fill the page.
            skipped = len(self._set_apart) + len(self._left) + len(self._under_way)
            found = await self._store.due(self._clock.now(), _PAGE + skipped)
            now = asyncio.get_running_loop().time()
            self._set_apart = {one: self._set_apart[one] for one in found if one in self._set_apart}
            new = [one for one in found if one not in self._under_way and self._set_apart.get(one, now) <= now]
            due = self._leave_to_others(new, now)[: _MOST_UNDER_WAY - len(self._under_way)]
            if not due or not await self._ring(due):
                break
        if waiting := len(self._left) + len(self._under_way):
            self._expect_at(self._clock.now() + (_GLANCE if waiting <= _PAGE else max(_GLANCE, self._poll)))
            return
        ahead = await self._store.next_due()
        if ahead is not None and not self._set_apart:
            self._expect_at(ahead)

    def _leave_to_others(self, due: Sequence[Due], now: float) -> Sequence[Due]:
        """Return the timers that this engine rings: its own, and those that others had enough time for."""
        if self._peers.is_alone:
            self._left = {}
            return due
        ranked = [(one, self._peers.rank(one.run_id)) for one in due]
        since = {one: self._left.get(one, now) for one, rank in ranked if rank}
        ours = [one for one, rank in ranked if not rank or now - since[one] >= rank * _COURTESY]
        left = since.keys() - set(ours)
        self._left = {one: since[one] for one in islice(left, _MOST_LEFT)}
        return ours

    async def _ring(self, due: Sequence[Due]) -> bool:
        """Wait until each timer is decided or set aside for its turn. Return whether any was."""
        loop, event_of = asyncio.get_running_loop(), self._event_maker()
        wishes = {one: Wish(one.run_id, event_of(one), loop.create_future()) for one in due}
        self._under_way |= wishes
        self._inbox.put(wishes.values())
        while waited_for := [each.done for each in wishes.values() if not (each.done.done() or each.is_set_aside)]:
            await asyncio.wait(waited_for, timeout=_GLANCE)
        return not self._take_outcomes().issuperset(due)

    def _take_outcomes(self) -> set[Due]:
        """Forget decided timers. Set those apart that never will be decided, and return them."""
        decided = {one: wish.done for one, wish in self._under_way.items() if wish.done.done()}
        stuck = [one for one, done in decided.items() if _is_stuck(done)]
        for one in decided:
            del self._under_way[one]
            self._set_apart.pop(one, None)
        for one in stuck[: _MOST_SET_APART - len(self._set_apart)]:
            self._set_apart[one] = asyncio.get_running_loop().time() + _SET_APART_FOR
        return set(stuck)


def _is_stuck(done: "asyncio.Future[Verdict | None]") -> bool:
    if done.cancelled():
        return False
    return done.exception() is not None or done.result() is None  # None: there is no such run
