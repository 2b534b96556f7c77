"""What the tests of the engine with its brokers share.

pytest looks for fixtures in the module of a test, so each of those names the one it uses:
`impatient = stage.impatient`.
"""

import pytest

from oraculo.engine.cluster import broker_marks, broker_watch
from oraculo.ports.broker import Capabilities
from oraculo.ports.clock import SystemClock
from oraculo.ports.telemetry import Record
from oraculo.settings import EngineSettings, RunSettings, Settings
from oraculo.testing.harness import Harness
from oraculo.wire import naming
from oraculo.worker import App, Worker
from tests.brokers.failover_stage import Named, Unreadable

QUICK = Settings(engine=EngineSettings(poll=0.02), runs=RunSettings(backoff=0.01))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_watch, "GRACE", 0.05)
    monkeypatch.setattr(broker_marks, "LOOK_EVERY", 0.02)
    for name in ("broker.PROBE_PAUSE", "broker.LONGEST_PROBE_PAUSE", "broker.PULSE", "consumer.FAILED_PAUSE"):
        monkeypatch.setattr(f"oraculo.brokers.failover.{name}", 0.02)
    monkeypatch.setattr("oraculo.core.queue_health._SHOWN_FOR", 0.5)


class Told:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def emit(self, record: Record) -> None:
        self.records.append(record)

    def of(self, kind: type[Record]) -> list[Record]:
        return [record for record in self.records if isinstance(record, kind)]


class Durable(Named):
    """As a real broker: the engine does not forget at its start what it has sent through it."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(durable=True, shared=True, priorities=True, counts_consumers=True)


class DurableUnreadable(Unreadable, Durable):
    pass


async def worker_on(broker: Durable, app: App) -> Worker:
    worker = Worker(app, broker, QUICK.worker, SystemClock())
    await broker.start()
    await worker.start()
    return worker


async def sent_by(oraculo: Harness, run_id: str, brokers: list[str]) -> bool:
    snapshot = (await oraculo.store.load([run_id]))[run_id]
    return [task.via for task in snapshot.tasks] == brokers


async def is_ready(oraculo: Harness) -> bool:
    return (await oraculo.operations.health()).is_ready


def forget(broker: Durable, *queues: str) -> None:
    """Let a broker lose its memory of these queues, and its mark."""
    assert broker._server is not None
    for queue in (*queues, naming.MEMORY):
        broker._server.queues.pop(queue, None)
