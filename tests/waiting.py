"""Waiting in tests: for a condition, with a deadline, and with words for what did not come."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(what: Callable[[], Awaitable[T]] | Callable[[], T], *, within: float = 10.0, saying: str = "") -> T:
    """Asks again and again until the answer is true; fails with the last answer when it never is."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within
    while True:
        answer = what()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return answer  # type: ignore[return-value]
        assert loop.time() < deadline, f"{saying or 'the condition'} did not come true in {within} s: {answer!r}"
        await asyncio.sleep(0.005)
