"""Pipelines, engines, facts and the installation's id: all that the store keeps beside runs.

Every call may raise StoreUnavailable (cannot be reached now, try again) or another StoreError (refused).
"""

from collections.abc import Sequence
from typing import Protocol


class Registry(Protocol):
    """Pipelines, living engines, noted facts and the id of the installation."""

    @property
    def name(self) -> str:
        """The kind of store, in logs and lists: `sqlite`, `postgresql`, …"""
        ...

    async def pipelines(self) -> dict[str, bytes]:
        """Return the encoded definitions that users put, by name."""
        ...

    async def pipelines_mark(self) -> str:
        """Return a text that changes whenever a pipeline is put or deleted. Cheap, however many there are."""
        ...

    async def put_pipeline(self, name: str, definition: bytes, now: float) -> None:
        """Write a definition over any other of that name."""
        ...

    async def delete_pipeline(self, name: str) -> bool:
        """Delete a definition. Returns False when there was none."""
        ...

    async def attend(self, engine: str, now: float, ttl: float) -> Sequence[str]:
        """Record that this engine lives. Return the names, sorted, of all engines recorded in the last `ttl` seconds.

        Engines that were not are forgotten.
        """
        ...

    async def depart(self, engine: str) -> None:
        """Forget an engine that stops."""
        ...

    async def engines(self, since: float) -> Sequence[str]:
        """Return the names, sorted, of the engines recorded since then. For processes that are no engine themselves."""
        ...

    async def installation(self) -> str:
        """Return the id of this store. It never changes, and no other store has it."""
        ...

    async def note(self, fact: str) -> None:
        """Record a fact about the world outside, for good."""
        ...

    async def noted(self, fact: str) -> bool:
        """Return True when the fact was ever recorded."""
        ...

    async def clock(self) -> float | None:
        """Return the time of the store's own clock, in seconds since the epoch. None: it has none that can be read."""
        ...
