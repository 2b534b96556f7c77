"""The bridge to BullMQ: jobs of `orchestrator-queue` start pipelines, and steps run as jobs of BullMQ queues."""

from oraculo.bridges.bullmq.bridge import BullmqBridge
from oraculo.bridges.bullmq.looking import BullmqOutlook

__all__ = ["BullmqBridge", "BullmqOutlook"]
