"""Splitting of many items into parts of a bounded size."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def slices(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield the items in order, in parts whose size just reaches `most`.

    Each part is yielded before the next item is taken, so `items` may be a generator.
    """
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
    """Return the items in parts of `size` items."""
    return (items[start : start + size] for start in range(0, len(items), size))
