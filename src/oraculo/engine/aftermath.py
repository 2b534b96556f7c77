"""What follows a commit: commands go out, timers are set, aggregates are delivered, watchers are woken."""

from oraculo.core.aggregate import encode_aggregate
from oraculo.core.events import Event, Sent
from oraculo.core.run import Changes
from oraculo.engine.delivery import Courier
from oraculo.engine.outbox import Outbox
from oraculo.engine.timers import Timers
from oraculo.engine.watchers import Watchers
from oraculo.ports.telemetry import RunFinished, Telemetry


class Consequences:
    def __init__(
        self, outbox: Outbox, timers: Timers, courier: Courier, watchers: Watchers, telemetry: Telemetry
    ) -> None:
        self._outbox = outbox
        self._timers = timers
        self._courier = courier
        self._watchers = watchers
        self._telemetry = telemetry

    def committed(self, changes: Changes) -> None:
        self._outbox.send(changes)
        if not changes.dirty:
            return
        self._timers.expect(changes)
        if changes.ended or changes.deliver:
            self._ended(changes)
        self._watchers.changed(changes.run.id)

    def noted(self, run_id: str, event: Event) -> None:
        if isinstance(event, Sent):
            self._outbox.noted(run_id, event)

    def _ended(self, changes: Changes) -> None:
        run = changes.run
        watched = run.id in self._watchers
        # The aggregate of a wide run is large: it is made only for those who take it.
        aggregate = encode_aggregate(run) if watched or changes.deliver else b""
        if changes.deliver:
            self._courier.deliver(run, aggregate)
        if changes.ended:
            if watched:
                self._watchers.ended(run.id, aggregate)
            self._tell(changes)

    def _tell(self, changes: Changes) -> None:
        head = changes.run.head
        seconds = (head.ended_at or head.created_at) - head.created_at
        self._telemetry.emit(RunFinished(head.id, head.name, head.status, head.edition, head.total, seconds))
