"""A full queue is offered a part of what waits for it at each look, in turns, and all once it has room."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.core.queue_health import QueueHealth
from oraculo.engine.send import sweep
from oraculo.errors import QueueFull
from oraculo.ports.broker import Capabilities, Outgoing, Receipt
from oraculo.ports.store import Unsent
from oraculo.settings import EngineSettings, Settings
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.testing.harness import Harness
from oraculo.testing.simulation.virtual_time import SeededEntropy, VirtualClock, VirtualLoop
from oraculo.wire import naming
from oraculo.wire.message import decode_message

MOST_RETRIED = 3
LOOK = 1.0  # seconds between two


@pytest.fixture(autouse=True)
def _few_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MOST_RETRIED", MOST_RETRIED)


def turned_away(count: int) -> tuple[sweep.RefusedCommands, list[Unsent]]:
    made, refusing = sweep.RefusedCommands(), QueueHealth(60.0)
    refusing.note(["executador_x"], "no room", 0.0)
    waiting = [Unsent(f"r{number}", 0, 1) for number in range(count)]
    for one in waiting:
        made.note(one, "executador_x", refusing)
    return made, waiting


def granted(made: sweep.RefusedCommands, waiting: Sequence[Unsent]) -> list[Unsent]:
    return [one for one in waiting if made.takes_turn(one)]


def test_commands_that_a_sweep_does_not_meet_are_last_in_the_next() -> None:
    made, waiting = turned_away(MOST_RETRIED + 1)
    made.choose(1.0)
    made.choose(1.0)
    assert granted(made, waiting) == [*waiting[:2], waiting[-1]]


def test_all_are_granted_once_the_queue_counts_as_full_no_more() -> None:
    made, waiting = turned_away(MOST_RETRIED + 1)
    made.choose(61.0)
    assert granted(made, waiting) == waiting


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_MOST_REFUSED", 2 * MOST_RETRIED)
    made, waiting = turned_away(3 * MOST_RETRIED)
    made.choose(1.0)
    # The last are treated like those that were never tried.
    assert granted(made, waiting) == waiting[:MOST_RETRIED] + waiting[2 * MOST_RETRIED :]


class Full(MemoryBroker):
    """Its queue takes what `fits`. To publish takes it some time, as it does a server; but all of it less than from the
    look of one engine to that of the next, or both would send what neither has noted yet."""

    capabilities = Capabilities(durable=True, shared=True, priorities=True, counts_consumers=True)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.clock = VirtualClock(loop)
        super().__init__(clock=self.clock)
        self.fits: Callable[[str], bool] = lambda run_id: False
        self.slow_for = 0.0  # seconds more, to publish
        self.offered: list[list[str]] = []  # at each try, the runs
        self.taken = Counter[str]()

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if messages[0].queue == naming.MEMORY:  # marks that engines leave
            return await super().publish(messages)
        await asyncio.sleep(0.001 * len(messages) + self.slow_for)
        runs = [decode_message(message.body).correlation_id for message in messages]
        self.offered.append(runs)
        self.taken.update(filter(self.fits, runs))
        return [Receipt(self.name) if self.fits(run_id) else Receipt(error=QueueFull("no room")) for run_id in runs]

    async def close(self) -> None:
        pass


Story = Callable[[Full, Sequence[Harness]], Awaitable[None]]
Play = Callable[[Story, int], None]


@pytest.fixture
def play() -> Iterator[Play]:
    loop = VirtualLoop()

    async def with_engines(story: Story, count: int) -> None:
        broker, store = Full(loop), SqliteStore(MEMORY, inline=True)
        engines = []
        for number in range(count):
            entropy = SeededEntropy(random.Random(number))
            settings = Settings(engine=EngineSettings(poll=LOOK))
            engines.append(Harness(settings=settings, broker=broker, store=store, clock=broker.clock, entropy=entropy))
            await engines[-1].__aenter__()
            await asyncio.sleep(LOOK / 3)  # they do not look at the same moment
        await asyncio.sleep(3 * LOOK)  # until they know of each other
        try:
            await story(broker, engines)
        finally:
            for engine in engines:
                await engine.stop()

    asyncio.set_event_loop(loop)
    yield lambda story, count: loop.run_until_complete(with_engines(story, count))
    asyncio.set_event_loop(None)
    loop.close()


async def submit(engines: Sequence[Harness], runs: Sequence[str]) -> None:
    for number, run_id in enumerate(runs):
        request = {"destinos": ["executador_x"], "correlation_id": run_id, "timeout": 600}
        await engines[number % len(engines)].submit(request)


def test_it_is_offered_a_ration_at_each_look_in_turns_and_all_once_it_has_room(
    play: Play,
) -> None:
    runs = [f"r{number}" for number in range(10)]

    async def story(broker: Full, engines: Sequence[Harness]) -> None:
        await submit(engines, runs)
        await asyncio.sleep(5 * LOOK)
        broker.offered.clear()
        await asyncio.sleep(4 * LOOK)
        assert [len(offered) for offered in broker.offered] == [MOST_RETRIED] * 4
        assert set().union(*broker.offered) == set(runs)
        ended = runs.pop(4)
        await engines[0].operations.cancel(ended)
        await asyncio.sleep(LOOK)
        broker.offered.clear()
        broker.fits = lambda run_id: True
        await asyncio.sleep(2 * LOOK)
        assert [len(offered) for offered in broker.offered] == [MOST_RETRIED, len(runs) - MOST_RETRIED]
        assert broker.taken == Counter(runs)

    play(story, 1)


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("full_for", [20.0, 20.3, 31.9])
def test_once_it_has_room_each_is_sent_once_by_however_many_engines(play: Play, engines: int, full_for: float) -> None:
    runs = [f"r{number}" for number in range(200)]

    async def story(broker: Full, engines: Sequence[Harness]) -> None:
        await submit(engines, runs)
        await asyncio.sleep(full_for)
        broker.fits = lambda run_id: True
        await asyncio.sleep(10 * LOOK)
        assert broker.taken == Counter(runs)

    play(story, engines)


def test_what_never_fits_does_not_keep_from_it_what_would(play: Play) -> None:
    large, small = [f"large-{number}" for number in range(2 * MOST_RETRIED)], ["small-1", "small-2"]

    async def story(broker: Full, engines: Sequence[Harness]) -> None:
        await submit(engines, [*large, *small])
        await asyncio.sleep(5 * LOOK)
        assert not broker.taken
        broker.fits = lambda run_id: run_id in small
        await asyncio.sleep(4 * LOOK)
        assert broker.taken == Counter(small)

    play(story, 1)


@pytest.fixture
def _short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_PAGE", 2)
    monkeypatch.setattr(sweep, "_MOST_SEEN", 4)


@pytest.mark.usefixtures("_short_memory")
@pytest.mark.parametrize("engines", [1, 2, 3])
def test_more_than_can_be_remembered_does_not_hide_what_comes_behind_it(play: Play, engines: int) -> None:
    stuck = [f"r{number}" for number in range(10)]

    async def story(broker: Full, engines: Sequence[Harness]) -> None:
        await submit(engines, [*stuck, "z"])
        await asyncio.sleep(20 * LOOK)
        broker.fits = lambda run_id: run_id == "z"
        await asyncio.sleep(120 * LOOK)
        assert broker.taken == Counter(["z"])
        broker.fits = lambda run_id: True
        await asyncio.sleep(120 * LOOK)
        assert broker.taken == Counter([*stuck, "z"])

    play(story, engines)


@pytest.mark.usefixtures("_short_memory")
@pytest.mark.parametrize("run_id", ["a", "r5", "z"])
def test_more_than_can_be_remembered_makes_no_engine_send_what_another_is_sending_now(play: Play, run_id: str) -> None:
    async def story(broker: Full, engines: Sequence[Harness]) -> None:
        await submit(engines, [f"r{number}" for number in range(0, 10, 2)])
        await asyncio.sleep(100 * LOOK)
        broker.fits = lambda run: run == run_id
        broker.slow_for = 3 * LOOK
        await submit(engines, [run_id])
        await asyncio.sleep(4 * LOOK)
        broker.slow_for = 0.0
        await asyncio.sleep(60 * LOOK)
        assert broker.taken == Counter([run_id])

    play(story, 2)
