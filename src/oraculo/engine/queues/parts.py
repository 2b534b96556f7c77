"""The parts of an engine that know about queues, as operations and explanations use them."""

from dataclasses import dataclass

from oraculo.engine.pipelines import PipelineQueues
from oraculo.engine.queues.known import KnownQueues
from oraculo.engine.queues.limits import NewQueueLimits
from oraculo.engine.queues.looks import QueueLooks
from oraculo.engine.queues.remembered import RememberedQueues
from oraculo.engine.queues.served import ServedQueues
from oraculo.pipeline.queue_rules import QueueRules
from oraculo.wire.naming import QueueNames


@dataclass(frozen=True, slots=True)
class QueueParts:
    names: QueueNames
    rules: QueueRules  # which queues callers may name
    known: KnownQueues
    limits: NewQueueLimits
    looks: QueueLooks
    remembered: RememberedQueues
    served: ServedQueues
    of_pipelines: PipelineQueues
