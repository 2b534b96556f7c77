"""Running a function in a thread, so that it does not block the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

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
