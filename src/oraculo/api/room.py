"""The memory that large request bodies and replies may take together, so that slow clients cannot fill it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import HTTPException

from oraculo.api.problems import RETRY_SECONDS

SMALL = 64 * 1024  # bytes; uvicorn buffers as many of each connection


class Room:
    """A budget of bytes. Small bodies are free. A body larger than the whole budget is admitted while it is alone."""

    def __init__(self, size: int, refusal: str) -> None:
        self._size = self._free = size
        self._refusal = refusal

    def has(self, size: int) -> bool:
        return size <= max(self._free, SMALL) or self._free >= self._size

    def expect(self, size: int) -> None:
        """Raise 503 when the size has no room. Nothing is taken yet: a client may promise much and send nothing."""
        if not self.has(size):
            raise not_now(self._refusal)

    @contextmanager
    def share(self, *, is_owed: bool = False) -> Iterator[Callable[[int], None]]:
        """Give the function that takes room for a body as it grows. It raises 503 without room, unless `is_owed`."""
        held = 0

        def grow(size: int) -> None:
            nonlocal held
            if size <= max(held, SMALL):
                return
            is_alone = self._free + held >= self._size
            if size - held > self._free and not is_alone and not is_owed:
                raise not_now(self._refusal)
            self._free -= size - held
            held = size

        try:
            yield grow
        finally:
            self._free += held


def not_now(detail: str) -> HTTPException:
    return HTTPException(503, detail, {"Retry-After": RETRY_SECONDS})
