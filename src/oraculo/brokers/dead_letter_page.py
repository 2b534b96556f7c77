"""One page of dead letters, bounded in bytes: long bodies are cut, and the page ends where it is full."""

from collections.abc import Iterable

import msgspec

from oraculo.ports.broker_admin import DEAD_LETTER_BODY_BYTES, DEAD_LETTER_PAGE_BYTES, DeadLetter


class DeadLetterPage:
    """The result of `dead_letters`: at most `limit`, and none after the one that fills the page."""

    def __init__(self, limit: int) -> None:
        self.letters: list[DeadLetter] = []
        self._limit = limit
        self._room = DEAD_LETTER_PAGE_BYTES

    @property
    def is_full(self) -> bool:
        return len(self.letters) >= self._limit or self._room < 0

    def fill(self, letters: Iterable[DeadLetter]) -> None:
        """Add dead letters in their order until the page is full."""
        for letter in letters:
            if self.is_full:
                return
            self.letters.append(cut(letter))
            self._room -= len(self.letters[-1].body)


def cut(letter: DeadLetter) -> DeadLetter:
    """Return the dead letter with as much of its body as a page may hold."""
    if len(letter.body) <= DEAD_LETTER_BODY_BYTES:
        return letter
    whole = letter.cut_from or len(letter.body)
    return msgspec.structs.replace(letter, body=letter.body[:DEAD_LETTER_BODY_BYTES], cut_from=whole)
