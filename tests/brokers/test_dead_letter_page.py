"""A page of dead letters is bounded in bytes, also where all letters must be read to find the oldest."""

import random

from oraculo.brokers.dead_letter_page import DeadLetterPage
from oraculo.brokers.rabbitmq.dead_letters import Oldest
from oraculo.ports.broker_admin import DEAD_LETTER_BODY_BYTES, DEAD_LETTER_PAGE_BYTES, DeadLetter

MOST = DEAD_LETTER_PAGE_BYTES // DEAD_LETTER_BODY_BYTES + 1  # the letter that passes the bound is the last


def _letter(number: int, size: int) -> DeadLetter:
    return DeadLetter(f"{number:04}", "q", bytes(size), "r", 0.0)


def test_a_page_has_no_more_than_it_may() -> None:
    small, large = DeadLetterPage(3), DeadLetterPage(100)
    small.fill(_letter(number, 1) for number in range(5))
    large.fill(_letter(number, 10 * DEAD_LETTER_BODY_BYTES) for number in range(50))
    assert [letter.id for letter in small.letters] == ["0000", "0001", "0002"]
    assert len(large.letters) == MOST
    assert {(len(letter.body), letter.cut_from) for letter in large.letters} == {
        (DEAD_LETTER_BODY_BYTES, 10 * DEAD_LETTER_BODY_BYTES)
    }
    assert small.is_full
    assert large.is_full


def test_the_oldest_of_many_are_found_without_keeping_the_others() -> None:
    chance = random.Random(1)
    letters = [_letter(number, chance.choice([1, DEAD_LETTER_BODY_BYTES])) for number in range(300)]
    expected = DeadLetterPage(200)
    expected.fill(letters)
    chance.shuffle(letters)
    oldest = Oldest(200)
    for letter in letters:
        oldest.put(letter)
        assert oldest.held <= 3 * DEAD_LETTER_PAGE_BYTES
    assert oldest.letters() == expected.letters
