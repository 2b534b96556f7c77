"""Whoever waits at an API whose runs other processes go on with."""

import asyncio

from oraculo.engine.watchers import Watchers


async def test_whoever_begins_to_wait_between_two_looks_is_not_passed_over_at_the_next() -> None:
    watchers, loop = Watchers(), asyncio.get_running_loop()
    with watchers.watching("young"), watchers.watching("old") as old:
        now = loop.time() + 0.001
        old.since -= 100
        assert watchers.due_for_a_look(now, shortest=0.05, longest=1.0) == ["young"]
        old.looked_at -= 1
        assert watchers.due_for_a_look(now, shortest=0.05, longest=1.0) == ["young", "old"]
