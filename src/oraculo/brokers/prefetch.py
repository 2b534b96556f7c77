"""How many messages a consumer asks its broker for, so that what it holds is bounded in bytes as well as in number.

A broker is asked for a number of messages, and nobody knows their sizes beforehand. So a consumer begins with a few,
and asks for more as long as those that came are small.
"""

MOST_BYTES = 64 * 1024 * 1024  # that a consumer holds at a time
FIRST = 16  # messages that it asks for while it does not know their sizes
_GROWTH = 8  # times as many as it asked for before: the next ones may be larger
_FADING = 0.98  # what one message leaves of the size of a larger one before it


class Prefetch:
    """The messages that a consumer holds, and how many it should ask for at a time. `most`: never more than so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sizes: dict[int | str, int] = {}
        self._usual = 0.0  # bytes: the largest message, fading with each that comes after it
        self.bytes = 0
        self.asked = min(most, FIRST)

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def is_over(self) -> bool:
        """Return whether it holds twice as much as it should, because large messages came after small ones."""
        return self.bytes > 2 * MOST_BYTES

    def add(self, token: int | str, size: int) -> None:
        self._sizes[token] = size
        self.bytes += size
        self.note(size)

    def note(self, size: int) -> None:
        """Learn the size of a message, for a consumer that counts itself what it holds."""
        self._usual = max(size, self._usual * _FADING, 1)

    def remove(self, token: int | str) -> None:
        self.bytes -= self._sizes.pop(token, 0)

    def clear(self) -> None:
        self._sizes.clear()
        self.bytes = 0

    def adapt(self) -> bool:
        """Choose anew how many to ask for, and return whether that is so different that it should be told."""
        if len(self._sizes) * 2 < self.asked and self.fitting * 2 > self.asked:
            return False  # it has all that there is
        wanted = min(self.fitting, self.asked * _GROWTH)
        if self.asked < wanted * 2 and wanted < min(self.asked * 2, self._most):
            return False
        self.asked, before = wanted, self.asked
        return wanted != before

    def begin_anew(self) -> bool:
        """Ask for few, as at the beginning. Return whether it asked for more before."""
        self.asked, before = min(self.asked, FIRST), self.asked
        return self.asked < before

    @property
    def fitting(self) -> int:
        """How many messages like those of late it may hold together."""
        return max(1, min(self._most, int(MOST_BYTES / self._usual))) if self._usual else min(self._most, FIRST)
