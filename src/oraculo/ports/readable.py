"""Reading many runs at once where a newer version may have written some of them."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from oraculo.errors import WrittenByNewer

Found = TypeVar("Found")


async def readable(
    ask: Callable[[Sequence[str]], Awaitable[dict[str, Found]]], run_ids: Sequence[str]
) -> tuple[dict[str, Found], dict[str, WrittenByNewer]]:
    """Return the runs that exist, and the errors of those that only a newer version can read.

    Unreadable runs are found by halving the list, because they are few and callers ask again and again.
    """
    try:
        return await ask(run_ids), {}
    except WrittenByNewer as error:
        if len(run_ids) == 1:
            return {}, {run_ids[0]: error}
    half = len(run_ids) // 2
    found, unreadable = await readable(ask, run_ids[:half])
    more, more_unreadable = await readable(ask, run_ids[half:])
    return found | more, unreadable | more_unreadable
