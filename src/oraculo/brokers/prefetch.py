"""The number of messages that a consumer asks for, so that the bytes it holds are bounded.

A broker counts messages, and nobody knows their sizes beforehand. So a consumer begins with a few, and asks for more as
long as those that came are small.
"""

MOST_BYTES = 64 * 1024 * 1024  # held by one consumer
FIRST = 16  # messages asked for while no size is known
_GROWTH = 8  # largest factor of one increase: the next messages may be larger
_FADING = 0.98  # a large message counts this much less with each later one


class Prefetch:
    """The messages that a consumer holds, and how many it should ask for: at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sizes: dict[int | str, int] = {}
        self._usual = 0.0  # bytes of the largest recent message
        self.bytes = 0
        self.asked = min(most, FIRST)

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def is_over(self) -> bool:
        """Return True when it holds twice the bytes that it should, because large messages came after small ones."""
        return self.bytes > 2 * MOST_BYTES

    def add(self, token: int | str, size: int) -> None:
        self._sizes[token] = size
        self.bytes += size
        self.note(size)

    def note(self, size: int) -> None:
        """Record the size of a message, for a consumer that counts what it holds itself."""
        self._usual = max(size, self._usual * _FADING, 1)

    def remove(self, token: int | str) -> None:
        self.bytes -= self._sizes.pop(token, 0)

    def clear(self) -> None:
        self._sizes.clear()
        self.bytes = 0

    def adapt(self) -> bool:
        """Choose how many to ask for. Return True when the broker should be asked for another number."""
        if len(self._sizes) * 2 < self.asked and self.fitting * 2 > self.asked:
            return False  # it holds all that the queue has
        wanted = min(self.fitting, self.asked * _GROWTH)
        if self.asked < wanted * 2 and wanted < min(self.asked * 2, self._most):
            return False
        self.asked, before = wanted, self.asked
        return wanted != before

    def begin_anew(self) -> bool:
        """Ask for few, as at the beginning. Return True when it asked for more before."""
        self.asked, before = min(self.asked, FIRST), self.asked
        return self.asked < before

    @property
    def fitting(self) -> int:
        """Return how many messages of the recent size it may hold together."""
        return max(1, min(self._most, int(MOST_BYTES / self._usual))) if self._usual else min(self._most, FIRST)
