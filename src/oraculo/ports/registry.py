"""What is kept in the store beside runs: pipelines, engines, facts, and the installation.

Every call may raise StoreUnavailable (cannot be reached now: try again) or StoreError (refused).
"""

from collections.abc import Sequence
from typing import Protocol


class Registry(Protocol):
    """Pipelines, living engines, facts of the world outside, and the name of the installation."""

    @property
    def name(self) -> str:
        """The store's name for people: `sqlite`, `postgresql`, …"""
        ...

    async def pipelines(self) -> dict[str, bytes]:
        """Encoded definitions that were put by users, by name."""
        ...

    async def pipelines_mark(self) -> str:
        """Another text whenever a pipeline was put or deleted since: cheap to ask for, whatever their number."""
        ...

    async def put_pipeline(self, name: str, definition: bytes, now: float) -> None: ...

    async def delete_pipeline(self, name: str) -> bool:
        """False when there was none."""
        ...

    async def attend(self, engine: str, now: float, ttl: float) -> Sequence[str]:
        """Notes that this engine lives, and returns the names, sorted, of all engines noted in the last `ttl` seconds.
        Those that were not are forgotten."""
        ...

    async def depart(self, engine: str) -> None:
        """The engine stops: it is forgotten at once."""
        ...

    async def engines(self, since: float) -> Sequence[str]:
        """The names, sorted, of the engines that were noted since then; for whoever is none of them."""
        ...

    async def installation(self) -> str:
        """A text that is this store's alone, and stays: by it two installations are told apart that share something."""
        ...

    async def note(self, fact: str) -> None:
        """Remembers something of the world outside, for good."""
        ...

    async def noted(self, fact: str) -> bool:
        """Whether anybody did, at any time."""
        ...

    async def clock(self) -> float | None:
        """What its own clock says, in seconds since 1970. None: it has none but this machine's, or hides it."""
        ...
