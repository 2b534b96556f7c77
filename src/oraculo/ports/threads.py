"""Work for a thread, so that the event loop goes on with everybody else's."""

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
    """To one of `threads`, or of the event loop's own. Raises RuntimeError, with the text NO_THREAD, when the system
    has no room for one more: the work stays in the line of `threads` all the same, so what it holds is let go, and it
    is not done later."""
    work = [partial(function, *args, **kwargs)]
    try:
        return asyncio.get_running_loop().run_in_executor(threads, lambda: work.pop()())
    except (RuntimeError, MemoryError):
        work.clear()
        raise
