"""A bridge to workers of another system: it reads commands like a worker and answers like one, and may start runs."""

from typing import Protocol

from oraculo.pipeline.bridges import Beyond, Bridge


class Outlook(Protocol):
    """Sees how it is beyond a bridge: the bridge itself, or what stands for it where others run it."""

    @property
    def name(self) -> str:
        """For people: `celery`, `bullmq`."""
        ...

    async def beyond(self, destination: Bridge) -> Beyond | None:
        """How the place is where commands for this destination go on; None: the other system does not tell, or not in
        a moment: a person waits for it."""
        ...

    async def stop(self) -> None:
        """Closes. Idempotent."""
        ...


class RunningBridge(Outlook, Protocol):
    @property
    def trouble(self) -> str | None:
        """Why it cannot do its work now; commands wait meanwhile, and their deadlines hold. None: it can."""
        ...

    @property
    def shortfall(self) -> str | None:
        """What it cannot do besides, while steps go on. None: it can do all."""
        ...

    async def start(self) -> None:
        """Begins, and goes on trying while the other system is away. Returns at once."""
        ...

    async def stop(self) -> None:
        """Takes no more, finishes or gives back what it holds, and closes. Idempotent."""
        ...
