"""The queues that known pipelines and routes send to: made before anything is sent, so that a worker that starts before
the first command finds its queue."""

from collections.abc import Collection

from oraculo.engine.pipelines import PipelineCatalogue
from oraculo.engine.queues.known import KnownQueues
from oraculo.errors import BrokerError, BrokerUnavailable, QueueUnavailable
from oraculo.ports.broker import Broker
from oraculo.ports.telemetry import LoopFailed, Telemetry
from oraculo.wire.naming import QueueNames


class Destinations:
    def __init__(
        self, broker: Broker, catalogue: PipelineCatalogue, names: QueueNames, telemetry: Telemetry, known: KnownQueues
    ) -> None:
        self._broker = broker
        self._known = known
        self._catalogue = catalogue
        self._names = names
        self._telemetry = telemetry
        self._declared: set[str] = set()
        self._working: set[tuple[str, int]] = set()  # the brokers, each with its losses, that have those queues

    async def declare_all(self) -> None:
        """With the queues that engines read themselves: nothing is known of the broker yet. Where one of these is
        refused, nothing works, and it raises; any other is a pipeline's, and keeps nobody from starting."""
        self._working = self._working_brokers()
        await self._broker.declare([self._names.requests, self._names.answers])
        queues = self._catalogue.destinations()
        try:
            await self.declare(queues)
        except QueueUnavailable:
            pass  # one that cannot be made now; the next look tries again
        except BrokerUnavailable:
            raise
        except BrokerError:
            await self._declare_singly(queues)

    async def declare(self, queues: Collection[str]) -> None:
        """Also those that were declared before: somebody may have deleted one."""
        physical = sorted(map(self._names.physical, queues))
        await self._broker.declare(physical)
        self._known.add(physical)
        self._declared |= set(queues)

    async def declare_missing(self) -> None:
        """Those that are new, or could not be declared because the broker was away. All of them, once a broker works
        that did not before, or lost its memory: it may be another now."""
        working, known = self._working_brokers(), self._catalogue.destinations()
        self._declared = set() if working - self._working else self._declared & known
        self._working = working
        if missing := known - self._declared:
            try:
                await self.declare(missing)
            except BrokerUnavailable:
                pass  # the next look tries again
            except BrokerError:
                await self._declare_singly(missing)

    async def _declare_singly(self, queues: Collection[str]) -> None:
        """One that is refused keeps no other from being declared, and is not asked for again at every look: who
        publishes to it declares it too."""
        for queue in sorted(queues):
            try:
                await self.declare([queue])
            except QueueUnavailable:
                pass  # the next look tries again
            except BrokerUnavailable:
                return
            except BrokerError as error:
                self._declared.add(queue)
                self._telemetry.emit(LoopFailed("pipelines", f"the queue '{queue}' is refused: {error}"))

    def _working_brokers(self) -> set[tuple[str, int]]:
        return {(link.name, link.losses) for link in self._broker.statuses() if link.trouble is None}
