"""Threads for blocking file systems, so that a slow one blocks nothing else."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from oraculo.errors import ObjectsUnavailable
from oraculo.ports.objects import in_thread

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE = 8


class Threads:
    """A pool that is created at its first use: most processes never have a large result."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise ObjectsUnavailable("it is closed")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="oraculo-objects")
        return await in_thread(self._executor, function, *args, **kwargs)

    def close(self) -> None:
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
