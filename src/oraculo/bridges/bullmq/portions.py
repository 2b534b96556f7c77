"""How much is in hand at once: what jobs return may be large, so it is read and told by the megabyte."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from oraculo.core.chunks import Item, slices

TOLD_BYTES = 1024 * 1024  # a broker has seconds to confirm it, and a link may be slow
READ_BYTES = 4 * 1024 * 1024
FIRST, MOST = 10, 500  # entries of a stream that are asked for at once; with fewer, BullMQ trims them unread


def by_the_megabyte(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    return slices(items, size_of, TOLD_BYTES)


class Portion:
    """How many entries of each stream to ask for. How large they are shows only when they are here, so it goes by the
    last ones: it grows slowly, and only while there are as many as were asked for."""

    def __init__(self) -> None:
        self.count = FIRST

    def learn(self, entries: Sequence[Mapping[str, str]], streams: int = 1) -> None:
        if entries:
            size = sum(len(value) for fields in entries for value in fields.values())
            fitting = READ_BYTES * len(entries) // (streams * max(1, size))
            most = 2 * self.count if len(entries) >= self.count else self.count
            self.count = max(1, min(MOST, most, fitting))
