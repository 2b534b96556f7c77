"""The health of each part that an engine needs, in words for people and for `/health/ready`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from oraculo.engine.cluster.peers import Peers
from oraculo.engine.decide.intake import Intake
from oraculo.engine.queues.trouble import QueueTrouble
from oraculo.engine.results.get import ResultReader
from oraculo.engine.results.put import ResultWriter
from oraculo.errors import OraculoError, StoreError, StoreUnavailable
from oraculo.ports.objects import Objects
from oraculo.ports.store import Storage

_PATIENCE = 5.0


class Health(NamedTuple):
    """The faults of all parts."""

    parts: dict[str, str | None]  # what is wrong with each; None: nothing
    is_ready: bool  # able to take work; with several brokers one that works is enough


class Lifecycle:
    """The state of an engine between its start and its stop."""

    def __init__(self) -> None:
        self.accepting = False
        self.not_started: str | None = "the start has not begun"  # why nothing can be asked yet

    def expect_started(self) -> None:
        """Raise StoreUnavailable until the start has ended, because nothing can be read before."""
        if self.not_started is not None:
            raise StoreUnavailable(f"the server is starting: {self.not_started}")

    def expect_accepting(self) -> None:
        if not self.accepting:
            raise StoreUnavailable("the engine is starting or stopping; try again in a moment")


class LargeResults(NamedTuple):
    """The result store, with its reader and writer."""

    objects: Objects | None
    get: ResultReader
    put: ResultWriter

    async def health(self) -> dict[str, str | None]:
        if self.objects is None:
            return {} if self.get.trouble is None else {"objects": self.get.trouble}
        # A failing one leaves large results in the store.
        return {f"objects {self.objects.name}": self.put.trouble or await fault_of(self.objects.check)}


class EngineHealth:
    """The health of one engine. `others`: parts that it can do without, each with what is wrong."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        store: Storage,
        peers: Peers,
        intake: Intake,
        queues: QueueTrouble,
        results: LargeResults,
        others: Sequence[Callable[[], Mapping[str, str | None]]],
    ) -> None:
        self._lifecycle = lifecycle
        self._store = store
        self._peers = peers
        self._intake = intake
        self.queues = queues
        self._results = results
        self._others = others

    async def look(self) -> Health:
        """Return the health of all parts, which are asked at once."""
        if self._lifecycle.not_started is not None:
            return Health({"engine": self._lifecycle.not_started}, is_ready=False)
        is_taking = self._lifecycle.accepting
        own = {"engine": self._intake.trouble if is_taking else "not taking work: it is starting or stopping"}
        broken, store, results, engines = await asyncio.gather(
            fault_of(self.queues.broker.check), fault_of(self._store.check), self._results.health(), self._engines()
        )
        if self._peers.is_engine:
            own["consumers"] = self.queues.own_without_consumer
        own[f"store {self._store.name}"] = store
        others = {name: why for look in self._others for name, why in look().items()}
        is_ready = broken is None and not self.queues.hears_badly and not any(own.values())
        return Health(self.queues.of_brokers(broken) | own | results | engines | others, is_ready)

    async def engines(self) -> Sequence[str]:
        """Return the living engines that share the store."""
        return await self._peers.living()

    @property
    def is_sole(self) -> bool:
        """Return whether nobody else changes runs, as far as is known."""
        return self._peers.is_sole

    async def standstill(self) -> str | None:
        """Return why nothing is decided now. A front counts on the engines for timers and answers."""
        if self._peers.is_engine or self._intake.trouble is not None:
            return self._intake.trouble
        return await fault_of(self._expect_engines)

    async def _engines(self) -> dict[str, str | None]:
        if self._peers.is_engine:
            return {}
        return {"engines": await fault_of(self._expect_engines) or self.queues.unheard_answers}

    async def _expect_engines(self) -> None:
        if not await self.engines():
            raise StoreError(
                "no engine gives a sign of life: runs are accepted, and wait; start one, or see by its own "
                "/health/ready whether the store takes its writes"
            )


async def fault_of(check: Callable[[], Awaitable[object]]) -> str | None:
    """Return why a check fails, or None."""
    try:
        async with asyncio.timeout(_PATIENCE):
            await check()
    except OraculoError as error:
        return str(error) or type(error).__name__
    except TimeoutError:
        return f"no answer in {_PATIENCE:g} s"
    return None
