"""Attempts wait for their receiver in lines of their own."""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest

from oraculo.engine.deliver.receivers import Receivers
from tests.waiting import until


class Visits:
    """Those who are at a receiver, in the order in which they came to it."""

    def __init__(self, turns: Receivers) -> None:
        self._turns = turns
        self._over: dict[str, asyncio.Event] = {}
        self.order: list[str] = []

    async def visit(self, receiver: str, who: str) -> None:
        async with self._turns.turn(receiver):
            self.order.append(who)
            self._over[who] = asyncio.Event()
            await self._over[who].wait()

    def end(self, who: str) -> None:
        self._over[who].set()


async def test_lines_take_turns_and_none_has_more_than_its_share() -> None:
    turns = Receivers(places=2, each=1, most=100, most_bytes=1000)
    visits = Visits(turns)
    who = ["a1", "a2", "a3", "b1", "b2", "c1"]
    assert all(turns.enter(name[0], 1) for name in who)
    tasks = [asyncio.create_task(visits.visit(name[0], name)) for name in who]
    await until(lambda: visits.order == ["a1", "b1"])
    visits.end("a1")
    await until(lambda: visits.order == ["a1", "b1", "c1"], saying="c, which came last, and before a's second")
    visits.end("b1")
    await until(lambda: visits.order == ["a1", "b1", "c1", "a2"])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_however_many_wait_for_one_receiver_there_is_room_for_another() -> None:
    turns = Receivers(places=4, each=1, most=100, most_bytes=10**9)
    assert sum(turns.enter("a", 1) for _ in range(1000)) == 50
    assert sum(turns.enter("b", 1) for _ in range(1000)) == 25
    assert turns.enter("c", 1)


async def test_room_is_counted_in_bytes_too_and_the_first_of_a_line_may_be_of_any_size() -> None:
    turns = Receivers(places=4, each=1, most=100, most_bytes=1000)
    assert [turns.enter("a", 400) for _ in range(3)] == [True, False, False]
    assert turns.enter("b", 5000), "it is alone in its line"
    assert not turns.enter("c", 1), "now there is no room at all"
    turns.leave("b", 5000)
    assert turns.enter("c", 1)


async def test_how_long_a_receiver_takes_is_known_before_its_first_attempt_is_over() -> None:
    turns = Receivers(places=4, each=1, most=3, most_bytes=1000)
    assert turns.seconds_ahead("a") == 0.0
    assert [turns.enter("a", 1) for _ in range(3)] == [True, True, False]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(turns.turn("a"))
        began = asyncio.get_running_loop().time()
        await until(lambda: turns.seconds_ahead("a") > 0.05)
        passed = asyncio.get_running_loop().time() - began
        assert turns.seconds_ahead("a") >= 3 * passed, "two are in its line, and one was turned away"
    turns.leave("a", 1)
    assert turns.seconds_ahead("a") > 0
    turns.leave("a", 1)
    assert turns.seconds_ahead("a") == 0.0


class Clocked:
    """The moments at which a receiver that is never reached was tried."""

    def __init__(self, turns: Receivers) -> None:
        self._turns = turns
        self.tried: list[float] = []
        self.most_at_once = 0
        self._at_once = 0

    async def try_it(self, receiver: str) -> None:
        async with self._turns.turn(receiver):
            self.tried.append(asyncio.get_running_loop().time())
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            await asyncio.sleep(0)
            self._turns.missed(receiver, "refused")
            self._at_once -= 1


async def test_who_waits_for_a_receiver_that_is_away_tries_it_alone_and_after_pauses_that_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oraculo.engine.deliver.receivers._FIRST_PAUSE", 0.02)
    turns = Receivers(places=8, each=4, most=100, most_bytes=1000)
    tries = Clocked(turns)
    assert all(turns.enter("a", 1) for _ in range(8))
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(tries.try_it("a"))
        await until(lambda: len(tries.tried) == 4)
        tries.most_at_once = 0
        for _ in range(4):
            group.create_task(tries.try_it("a"))
    pauses = [later - earlier for earlier, later in pairwise(tries.tried[3:])]
    assert tries.most_at_once == 1
    assert all(pause > wanted for pause, wanted in zip(pauses, [0.018, 0.038, 0.078, 0.158], strict=True))


async def test_a_pause_between_two_tries_of_a_receiver_that_is_away_grows_to_some_seconds_only() -> None:
    turns = Receivers(places=8, each=4, most=100, most_bytes=1000)
    turns.enter("a", 1)
    for _ in range(20):
        turns.missed("a", "refused")
        absence = turns.absence("a")
        assert absence is not None
        absence.until = 0.0
    assert absence.pause == 5.0
    assert turns.seconds_ahead("a") == 5.0, "one at a time"


async def test_once_a_receiver_is_reached_again_all_places_of_its_line_are_free() -> None:
    turns = Receivers(places=8, each=2, most=100, most_bytes=1000)
    visits = Visits(turns)
    assert all(turns.enter("a", 1) for _ in range(3))
    turns.missed("a", "refused")
    tasks = [asyncio.create_task(visits.visit("a", who)) for who in ("a1", "a2", "a3")]
    await until(lambda: visits.order == ["a1"])
    turns.met("a")
    visits.end("a1")
    await until(lambda: visits.order == ["a1", "a2", "a3"], saying="both others, at once")
    for who in ("a2", "a3"):
        visits.end(who)
    await asyncio.gather(*tasks)
