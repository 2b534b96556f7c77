"""The bridges of this process: their start and stop, their health, and the queues that each reads."""

import asyncio
from collections.abc import Collection, Mapping, Sequence

from oraculo.core.explain import Audience
from oraculo.pipeline import bridges
from oraculo.pipeline.bridges import Bridge, ForeignQueue
from oraculo.ports.bridge import ForeignQueues, RunningBridge
from oraculo.ports.telemetry import LoopFailed, Telemetry

_SETTINGS = {bridges.CELERY: "ORACULO_CELERY_BROKER_URL", bridges.BULLMQ: "ORACULO_BULLMQ_URL"}  # that make each


class Bridges:
    """The bridges that run here, and the queues of other systems. BullMQ's bridge reads `bullmq_queues`."""

    def __init__(self, bullmq_queues: Collection[str], telemetry: Telemetry) -> None:
        self.running: Sequence[RunningBridge] = ()
        self.foreign_queues: Sequence[ForeignQueues] = ()  # for explanations
        self._telemetry = telemetry
        self._queues = {kind: {queue} for kind, queue in bridges.QUEUES.items()}
        self._queues[bridges.BULLMQ].update(bullmq_queues)

    async def start(self) -> None:
        for bridge in self.running:
            await bridge.start()

    async def stop(self) -> None:
        stops = (*(bridge.stop() for bridge in self.running), *(queues.stop() for queues in self.foreign_queues))
        for fault in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(fault, Exception):  # the rest must be stopped all the same
                self._telemetry.emit(LoopFailed("bridges", f"{type(fault).__name__}: {fault}"))

    @property
    def queues(self) -> set[str]:
        """The queues that bridges read, wherever they run."""
        return set[str]().union(*self._queues.values())

    def health(self) -> dict[str, str | None]:
        """Return what is wrong with each bridge. A broken one stops only its own steps."""
        return {f"ponte {bridge.name}": bridge.trouble or bridge.shortfall for bridge in self.running}

    def troubles(self, queues: Collection[str]) -> dict[str, str]:
        """Return what is wrong with the bridges that read one of these queues."""
        return {
            f"ponte {bridge.name}": bridge.trouble
            for bridge in self.running
            if bridge.trouble is not None and not self._queues[bridge.name].isdisjoint(queues)
        }

    def missing(self, audiences: Mapping[str, Audience], *, is_sole: bool) -> list[str]:
        """Return the kinds of bridges that these queues need and that no engine seems to run.

        Where consumers are not counted, another engine may run one.
        """
        here, unheard = {bridge.name for bridge in self.running}, (0, None) if is_sole else (0,)
        return [
            f"no bridge to {kind} runs here (is {_SETTINGS[kind]} set where engines run?)"
            for kind, queues in self._queues.items()
            if kind not in here and any(audiences[queue].consumers in unheard for queue in queues & audiences.keys())
        ]

    async def states(self, queue: str, destinations: Mapping[str, Bridge]) -> dict[str, ForeignQueue]:
        """Return the known queues behind a bridge, by the URL of their destination."""
        system = next((one for one in self.foreign_queues if queue in self._queues[one.name]), None)
        if system is None or self.troubles([queue]):
            return {}
        found = await asyncio.gather(*map(system.state_of, destinations.values()))
        return {url: each for url, each in zip(destinations, found, strict=True) if each is not None}
