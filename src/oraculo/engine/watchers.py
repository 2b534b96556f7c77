"""The callers inside this process who wait for a run to change or to end: `Prefer: wait`, live events, tests."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from oraculo.core.chunks import pages
from oraculo.core.run import RunStatus
from oraculo.engine.decide.cache import Plans
from oraculo.engine.results.get import ResultReader
from oraculo.errors import WrittenByNewer
from oraculo.ports.readable import readable
from oraculo.ports.store import Store

_PAGE = 500
_GLANCE = 0.05  # seconds between two looks, at the least


class Watch:
    """One caller who waits.

    `ended` gets the aggregate, or None when the caller is let go. `changed` is set at each commit of the run.
    """

    __slots__ = ("changed", "ended", "entries", "looked_at", "run_id", "run_is_there", "since")

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.run_is_there = False  # False: it is about to be created
        self.entries = 0  # the history's length when it was last looked at
        loop = asyncio.get_running_loop()
        self.since = self.looked_at = loop.time()
        self.ended: asyncio.Future[bytes | None] = loop.create_future()
        self.changed = asyncio.Event()

    async def aggregate(self, seconds: float) -> bytes | None:
        """Return the aggregate if the run ends within so many seconds. The run is there already."""
        self.run_is_there = True
        timer = asyncio.get_running_loop().call_later(seconds, self.let_go)
        try:
            return await self.ended
        finally:
            timer.cancel()

    def let_go(self) -> None:
        """End the wait without an aggregate."""
        self.changed.set()
        if not self.ended.done():
            self.ended.set_result(None)


class Watchers:
    """The callers who wait, by run."""

    def __init__(self) -> None:
        self._watches: dict[str, list[Watch]] = {}
        self.any_here = asyncio.Event()
        self.closed = False

    def close(self) -> None:
        """Let everybody go, because the engine stops. They ask again where it goes on."""
        self.closed = True
        for watch in [watch for watches in self._watches.values() for watch in watches]:
            watch.let_go()

    def due_for_a_look(self, now: float, shortest: float, longest: float) -> list[str]:
        """Return the runs whose watchers have waited long enough for another look.

        The pause between looks is a twentieth of the time since the wait began. A pause below `shortest`, the time
        between two rounds, means every round: a watch that began between two rounds would otherwise wait for nearly
        two.
        """
        return [
            run_id
            for run_id, watches in self._watches.items()
            if any(
                (pause := min(longest, (now - one.since) / 20)) <= shortest or now - one.looked_at >= pause
                for one in watches
            )
        ]

    def __len__(self) -> int:
        return len(self._watches)

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._watches

    @contextmanager
    def watching(self, run_id: str) -> Iterator[Watch]:
        watch = Watch(run_id)
        self._watches.setdefault(run_id, []).append(watch)
        self.any_here.set()
        if self.closed:
            watch.let_go()
        try:
            yield watch
        finally:
            self._forget(watch)

    def _forget(self, watch: Watch) -> None:
        watches = self._watches.get(watch.run_id, [])
        if watch in watches:
            watches.remove(watch)
        if not watches:
            self._watches.pop(watch.run_id, None)
        if not self._watches:
            self.any_here.clear()

    def changed(self, run_id: str) -> None:
        for watch in self._watches.get(run_id, ()):
            watch.changed.set()

    def of_runs_there(self, run_ids: Sequence[str]) -> list[Watch]:
        return [watch for run_id in run_ids for watch in self._watches.get(run_id, ()) if watch.run_is_there]

    def ended(self, run_id: str, aggregate: bytes) -> None:
        for watch in self._watches.get(run_id, ()):
            if not watch.ended.done():
                watch.ended.set_result(aggregate)

    def awaits_end(self, run_id: str) -> bool:
        return any(not watch.ended.done() for watch in self._watches.get(run_id, ()))

    def looked_at(self, run_id: str, entries: int) -> None:
        """Note that somebody saw the run in the store with a history of this length."""
        now = asyncio.get_running_loop().time()
        for watch in self._watches.get(run_id, ()):
            watch.looked_at = now
            if watch.entries != entries:
                watch.entries = entries
                watch.changed.set()


class Lookout:
    """A loop that looks at watched runs in the store.

    Another engine may have changed one, or this engine may have missed that its own commit succeeded. Where others
    change runs, a young wait is looked at often and an old one seldom, so that long waits cost little.
    """

    def __init__(
        self,
        watchers: Watchers,
        store: Store,
        plans: Plans,
        results: ResultReader,
        is_sole: Callable[[], bool],
        poll: float,
    ) -> None:
        self._results = results
        self._watchers = watchers
        self._store = store
        self._plans = plans
        self._is_sole = is_sole
        self._poll = poll

    async def run(self) -> None:
        while True:
            await self._watchers.any_here.wait()
            pause = self._poll if self._is_sole() else min(self._poll, _GLANCE * (1 + len(self._watchers) // _PAGE))
            await asyncio.sleep(pause)
            now = asyncio.get_running_loop().time()
            watched = self._watchers.due_for_a_look(now, pause, self._poll)
            for some in pages(watched, _PAGE):
                await self._look_at(some)

    async def _look_at(self, run_ids: Sequence[str]) -> None:
        # Before the store is asked, because one may be created meanwhile.
        were_there = self._watchers.of_runs_there(run_ids)
        heads, _ = await readable(self._store.heads, run_ids)  # an unreadable run counts as gone
        for watch in were_there:
            if watch.run_id not in heads:  # nothing will ever end this wait
                watch.let_go()
        for run_id in run_ids:
            if (head := heads.get(run_id)) is None:  # gone, or not there yet: its followers look for themselves
                self._watchers.changed(run_id)
                continue
            self._watchers.looked_at(run_id, head.entries)
            if head.status is not RunStatus.RUNNING and self._watchers.awaits_end(run_id):
                await self._report_end(run_id)

    async def _report_end(self, run_id: str) -> None:
        try:
            snapshot = (await self._store.load([run_id])).get(run_id)
            run = None if snapshot is None else self._plans.restore(snapshot)
        except WrittenByNewer:
            for watch in self._watchers.of_runs_there([run_id]):
                watch.let_go()
            return
        if run is not None and not run.is_open:
            self._watchers.ended(run_id, await self._results.aggregate(run))
