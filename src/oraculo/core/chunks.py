"""Much in parts of a bounded size."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def slices(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """In their order, each part as large as `most` or a little larger. `items` may be made one by one: a part is given
    out before the next is asked for."""
    part: list[Item] = []
    size = 0
    for item in items:
        part.append(item)
        size += size_of(item)
        if size >= most:
            yield part
            part, size = [], 0
    if part:
        yield part


def pages(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """So many at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))
