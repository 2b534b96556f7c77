"""Those who wait inside this process for a run to change or to end: `Prefer: wait`, live events, the SDK's tests."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Watch:
    """One who waits. `ended` is given the aggregate; `changed` is set at each commit of the run."""

    __slots__ = ("changed", "ended", "run_id")

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.changed = asyncio.Event()


class Watchers:
    def __init__(self) -> None:
        self._watches: dict[str, list[Watch]] = {}

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._watches

    @contextmanager
    def watching(self, run_id: str) -> Iterator[Watch]:
        watch = Watch(run_id)
        self._watches.setdefault(run_id, []).append(watch)
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

    def changed(self, run_id: str) -> None:
        for watch in self._watches.get(run_id, ()):
            watch.changed.set()

    def ended(self, run_id: str, aggregate: bytes) -> None:
        for watch in self._watches.get(run_id, ()):
            if not watch.ended.done():
                watch.ended.set_result(aggregate)
