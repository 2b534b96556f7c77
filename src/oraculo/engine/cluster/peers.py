"""The engines that share a store, and their order in the care of each run.

The order is a courtesy, so that no two engines do the same work at once. Correctness does not need it: every decision
is compared and set by version, and a later engine takes up what the first leaves.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b

from oraculo.engine.cluster.store_clock import read_clock
from oraculo.errors import OraculoError, StoreError, StoreUnavailable
from oraculo.ports.clock import Clock
from oraculo.ports.registry import Registry
from oraculo.ports.telemetry import EnginesChanged, LoopFailed, StoreBack, Telemetry

TTL = 5.0  # seconds, or so many polls, after which an engine that was not seen counts as gone
_LOOK_AGAIN = 1.0


class Peers:
    """The engines that are alive, this one among them unless it is only an API.

    `is_well` returns whether this engine decides now. One that does not gives no sign of life, and others do its work.
    """

    def __init__(
        self,
        store: Registry,
        clock: Clock,
        telemetry: Telemetry,
        name: str,
        poll: float,
        *,
        is_engine: bool = True,
    ) -> None:
        self.name = name
        self.is_engine = is_engine
        self.is_well: Callable[[], bool] = lambda: True
        self.engines: Sequence[str] = (name,)
        self.has_apis_beside = False  # they decide and send too, and are not counted among the engines
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._poll = poll
        self.ttl = max(TTL, TTL * poll)
        self.departures = 0  # how often others were found to have gone
        self.clock_fault: str | None = None
        self._is_store_away = False

    @property
    def is_alone(self) -> bool:
        return len(self.engines) == 1

    @property
    def is_sole(self) -> bool:
        """Return whether nobody else changes runs, as far as is known."""
        return self.is_engine and self.is_alone

    @property
    def decides_alone(self) -> bool:
        """Return whether no other process decides, not even an API that was started beside this engine."""
        return self.is_sole and not self.has_apis_beside

    def rank(self, run_id: str) -> int:
        """Return how many engines come before this one in the care of a run.

        Each run has an order of its own, so that all engines have as much to do. All engines see the same order, and
        one that leaves does not change it for the others.
        """
        if self.is_alone:
            return 0
        mine = _weight(self.name, run_id)
        return sum(_weight(engine, run_id) > mine for engine in self.engines if engine != self.name)

    async def join(self, alone_for: str | None = None) -> None:
        """Give the first sign of life.

        `alone_for`: a broker that lives inside one process. Raise StoreError when other engines use the store then,
        because they would not share its queues. An API joins no engines.
        """
        if not self.is_engine:
            return
        await self.attend()
        if alone_for is None:
            return
        waited = 0.0
        while not self.is_alone:  # a killed engine counts as alive for a while
            if waited > self.ttl + 1:
                await self.depart()
                raise StoreError(
                    f"another engine uses this {self._store.name} store, and {alone_for}:// lives inside one process: "
                    "set ORACULO_BROKER_URL to a broker that both can reach, or give each its own store"
                )
            await asyncio.sleep(_LOOK_AGAIN)
            waited += _LOOK_AGAIN
            await self.attend()

    async def living(self) -> Sequence[str]:
        """Return the living engines, for an API that is none of them."""
        return await self._store.engines(await self._now() - self.ttl)

    async def attend(self) -> None:
        """Give a sign of life, and see who else does."""
        seen = await self._store.attend(self.name, await self._now(), self.ttl)
        if list(seen) != list(self.engines):
            self.departures += not set(self.engines) <= set(seen)
            self.engines = seen
            self._telemetry.emit(EnginesChanged(self.name, tuple(seen)))

    async def _now(self) -> float:
        """Return the time by the store's clock.

        An engine whose own clock is off by seconds would count the others as gone.
        """
        now, fault = await read_clock(self._store, self._clock)
        if fault is not None and self.clock_fault is None:
            self._telemetry.emit(LoopFailed("clock", fault))
        self.clock_fault = fault
        return now

    async def run(self) -> None:
        while True:
            if self.is_well():
                await self._attend_and_report()
            else:  # only the store keeps an engine from deciding
                self._is_store_away = True
            await asyncio.sleep(self._poll)

    async def _attend_and_report(self) -> None:
        try:
            await self.attend()
        except StoreUnavailable:
            self._is_store_away = True
            raise
        if self._is_store_away:
            self._is_store_away = False
            self._telemetry.emit(StoreBack(self._store.name))

    async def depart(self) -> None:
        if self.is_engine:
            with suppress(OraculoError):  # the others notice in time
                await self._store.depart(self.name)

    def health(self) -> dict[str, str | None]:
        return {"clock": self.clock_fault} if self.clock_fault else {}


def _weight(engine: str, run_id: str) -> bytes:
    return blake2b(f"{engine} {run_id}".encode(errors="surrogatepass"), digest_size=8).digest()
