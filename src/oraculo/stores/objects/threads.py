"""File systems block: they are called in threads of their own, so that a slow one keeps nobody else waiting."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from oraculo.errors import ObjectsUnavailable

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE = 8


class Threads:
    """Made when they are first needed: most processes never have a large result."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise ObjectsUnavailable("it is closed")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="oraculo-objects")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
