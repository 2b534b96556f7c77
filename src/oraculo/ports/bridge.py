"""Bridges: workers of another system take commands, answer them, and may start runs."""

from typing import Protocol

from oraculo.pipeline.bridges import Bridge, ForeignQueue


class ForeignQueues(Protocol):
    """A view of the queues of the system behind a bridge, for explanations."""

    @property
    def name(self) -> str:
        """The bridge's name in logs and lists: `celery`, `bullmq`."""
        ...

    async def state_of(self, destination: Bridge) -> ForeignQueue | None:
        """Return the state of the queue that gets the commands of this destination.

        Returns None when the other system does not say, or does not answer at once: a person is waiting.
        """
        ...

    async def stop(self) -> None:
        """Close the connections. Idempotent."""
        ...


class RunningBridge(Protocol):
    """A bridge as the engine runs it."""

    @property
    def name(self) -> str:
        """The bridge's name in logs and lists: `celery`, `bullmq`."""
        ...

    @property
    def trouble(self) -> str | None:
        """The reason why this bridge's steps have to wait now, within their deadlines.

        None means that nothing is wrong.
        """
        ...

    @property
    def shortfall(self) -> str | None:
        """The part of its work that the bridge cannot do while steps go on. None means that it can do everything."""
        ...

    async def start(self) -> None:
        """Start the bridge and return at once. It keeps trying while the other system is away."""
        ...

    async def stop(self) -> None:
        """Take no more work, finish or give back what is in hand, and close the connections. Idempotent."""
        ...


class RunStarter(Protocol):
    """The engine's operations that a bridge needs to start runs and to wait for them."""

    async def submit(self, body: bytes, *, idempotency_key: str | None = None) -> object:
        """Create a run, once for each key, and return when it is committed.

        Raises OraculoError when the request is refused or cannot be committed now.
        """
        ...

    async def wait(self, run_id: str, seconds: float) -> bytes | None:
        """Return the aggregate of a run that ends within `seconds`, or None. Raises OraculoError."""
        ...
