"""Room in memory for large bodies that clients send and replies that they read: who is slow cannot take all of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import HTTPException

from oraculo.api.problems import RETRY_SECONDS

SMALL = 64 * 1024  # bytes; the server itself holds as many of each


class Room:
    """The bytes that all of them may have together. Small ones count for nothing, and always find some. One that is
    larger than the whole room finds some while it is alone."""

    def __init__(self, size: int, refusal: str) -> None:
        self._size = self._free = size
        self._refusal = refusal

    def has(self, size: int) -> bool:
        return size <= max(self._free, SMALL) or self._free >= self._size

    def expect(self, size: int) -> None:
        """Takes nothing yet: who promises much and sends nothing would keep out all others. Raises 503."""
        if not self.has(size):
            raise not_now(self._refusal)

    @contextmanager
    def share(self, *, is_owed: bool = False) -> Iterator[Callable[[int], None]]:
        """Gives the means to make it as large as a body. That raises 503 when others have the room, unless the room is
        owed."""
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
