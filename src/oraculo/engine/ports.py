"""The ports of one engine, as they are handed to it."""

from dataclasses import dataclass

from oraculo.engine.deliver.webhooks import Post
from oraculo.ports.broker_admin import FullBroker
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.objects import Objects
from oraculo.ports.store import Storage
from oraculo.ports.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Ports:
    """The world outside an engine.

    `must_be_alone`: nobody else may use the store, because the queues live inside this process.
    """

    broker: FullBroker
    store: Storage
    clock: Clock
    entropy: Entropy
    telemetry: Telemetry
    objects: Objects | None = None
    post: Post | None = None  # for webhooks; None: by HTTP
    must_be_alone: bool = False
