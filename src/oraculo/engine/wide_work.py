"""Work that is long only for a wide run: then a thread does it, and the event loop goes on with everybody else's. For
all other runs a thread would take longer than the work."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from oraculo.ports.threads import handed_over

WIDE = 1_000  # tasks: some milliseconds

Result = TypeVar("Result")


async def beside(threads: Executor, tasks: int, work: Callable[[], Result]) -> Result:
    """Of what nobody else changes: so many tasks are looked at."""
    if tasks < WIDE:
        return work()
    return await handed_over(threads, work)
