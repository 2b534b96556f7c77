"""Running a function in a thread, so that it does not block the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

WIDE = 1_000  # tasks: to look at so many takes some milliseconds

P = ParamSpec("P")
T = TypeVar("T")


def handed_over(
    threads: Executor | None, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> "asyncio.Future[T]":
    """Run a function in one of `threads`, or in the event loop's own pool.

    Raises RuntimeError with the text NO_THREAD when the system has no room for another thread. The executor keeps the
    job in its line even then, so the job is emptied first: it holds nothing and does nothing later.
    """
    work = [partial(function, *args, **kwargs)]
    try:
        return asyncio.get_running_loop().run_in_executor(threads, lambda: work.pop()())
    except (RuntimeError, MemoryError):
        work.clear()
        raise


async def handed_over_if_wide(threads: Executor, tasks: int, work: Callable[[], T]) -> T:
    """Do work on a run of so many tasks: in a thread when the run is wide, here when that is quicker.

    Nobody else may change what the work reads.
    """
    if tasks < WIDE:
        return work()
    return await handed_over(threads, work)
