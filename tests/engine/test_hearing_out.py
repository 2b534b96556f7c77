"""An engine that starts hears out what waits in a queue: how long it looks, and when it has seen enough."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, repeat

import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.engine import consumers
from oraculo.engine.consumers import EngineConsumers
from oraculo.engine.inbox import Inbox
from oraculo.ports.broker_admin import QueueState
from oraculo.ports.clock import SystemClock
from oraculo.settings import EngineSettings


class Told(MemoryBroker):
    """What waits, and what of it waits for a delay, as each look is told."""

    def __init__(self, waiting: Iterable[tuple[int, int]]) -> None:
        super().__init__(SystemClock())
        self._waiting: Iterator[tuple[int, int]] = iter(waiting)
        self.looks = 0

    async def queues(self, names: Sequence[str] | None = None) -> list[QueueState]:
        self.looks += 1
        ready, delayed = next(self._waiting)
        return [QueueState("resultados", ready, 0, 0, delayed=delayed)]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "_GLANCE", 0.001)


async def looks_at(*waiting: tuple[int, int], then: Iterable[tuple[int, int]] = ()) -> int:
    broker = Told(chain(waiting, then))
    queues = EngineConsumers(broker, Inbox(0.0), ["resultados"], EngineSettings())
    await asyncio.wait_for(queues.heard_out("resultados"), 30)
    return broker.looks


async def test_nothing_must_be_seen_twice_in_a_row() -> None:
    assert await looks_at((0, 0), (0, 0)) == 2
    assert await looks_at((0, 0), (3, 0), (0, 0), (2, 0), (0, 0), (0, 0)) == 6


async def test_what_waits_for_a_delay_is_not_waited_for() -> None:
    assert await looks_at((4, 4), (4, 4)) == 2
    assert await looks_at((5, 4), (4, 4), (4, 4)) == 3


async def test_as_long_as_it_gets_less_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the whole takes; but not for ever."""
    monkeypatch.setattr(consumers, "HEARD_WITHIN", 1.0)
    falling = [(n, 0) for n in range(1200, 0, -1)]  # 1.2 s of looks at the least
    assert await looks_at(*falling, (0, 0), (0, 0)) == 1202
    monkeypatch.setattr(consumers, "HEARD_AT_LAST", 0.2)
    assert await looks_at(then=((n, 0) for n in count(10**9, -1))) > 2


async def test_what_does_not_get_less_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "HEARD_WITHIN", 0.05)
    assert await looks_at((7, 0), (6, 0), then=repeat((8, 0))) > 2
