"""A bridge to workers of another system: it reads commands like a worker, answers like one, and may start runs."""

from typing import Protocol

from oraculo.pipeline.bridges import Beyond, Bridge


class Outlook(Protocol):
    """Sees the queues of the system behind a bridge: the bridge itself, or what stands for it in other processes."""

    @property
    def name(self) -> str:
        """The bridge's name for people: `celery`, `bullmq`."""
        ...

    async def beyond(self, destination: Bridge) -> Beyond | None:
        """Return the state of the queue where commands for this destination go on.

        None: the other system does not say, or not within a moment; a person waits for it.
        """
        ...

    async def stop(self) -> None:
        """Close the connections. Idempotent."""
        ...


class RunningBridge(Outlook, Protocol):
    """A bridge as the engine runs it."""

    @property
    def trouble(self) -> str | None:
        """The reason for which steps wait now, within their deadlines; None: nothing is wrong."""
        ...

    @property
    def shortfall(self) -> str | None:
        """The part of its work that the bridge cannot do while steps go on; None: it can do all."""
        ...

    async def start(self) -> None:
        """Begin, and keep trying while the other system is away. Returns at once."""
        ...

    async def stop(self) -> None:
        """Take no more, finish or give back what is held, and close. Idempotent."""
        ...


class RunStarter(Protocol):
    """The engine's operations that a bridge needs to start runs and to wait for them."""

    async def submit(self, body: bytes, *, idempotency_key: str | None = None) -> object:
        """Create a run, once for each key, and return when it is committed. Raises OraculoError."""
        ...

    async def wait(self, run_id: str, seconds: float) -> bytes | None:
        """Return the aggregate when the run has ended or ends in time. Raises OraculoError."""
        ...
