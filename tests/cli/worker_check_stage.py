"""A check of a worker, in the test's own process."""

from typing import Any

from oraculo.ports.broker import Broker
from oraculo.ports.clock import SystemClock, SystemEntropy
from oraculo.testing.worker_cases import CaseReport, WorkerCheck
from oraculo.wire.naming import QueueNames

QUEUE = "executador_x"


def check_of(broker: Broker, prefix: str = "", **options: Any) -> WorkerCheck:
    return WorkerCheck(broker, QueueNames(prefix), QUEUE, clock=SystemClock(), entropy=SystemEntropy(), **options)


async def play(broker: Broker, prefix: str = "", **options: Any) -> CaseReport:
    return await check_of(broker, prefix, **options).play()
