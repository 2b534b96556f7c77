"""A small run beside wide ones waits for a few of their commands, whatever is done to them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from oraculo.brokers.memory import MemoryBroker
from oraculo.core.run import Changes, Run
from oraculo.engine.decide import batches, intake
from oraculo.engine.inbox import Arrived, Inbox
from oraculo.engine.send import publisher
from oraculo.ports.broker import Consumer, Delivery, Outgoing, Receipt
from oraculo.ports.clock import SystemClock
from oraculo.ports.store import Committed, Creation
from oraculo.settings import EngineSettings, Settings
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.testing.harness import Harness
from tests.waiting import until

RUNS, WIDTH = 20, 200
BATCH, TOGETHER = 100, 50  # a tenth of what they are otherwise, as the runs are
SMALL = {"destinos": ["executador_pequeno"]}
WIDE = {"destinos": [{"fila": "executador_grande", "id": f"t{number}"} for number in range(WIDTH)]}


class Counting(MemoryBroker):
    def __init__(self) -> None:
        super().__init__(clock=SystemClock())
        self.sent = Counter[str]()
        self.takes = asyncio.Event()
        self.takes.set()
        self.before_small: list[int] = []  # how many of the wide runs' commands had been sent when a small one was

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        await self.takes.wait()
        for message in messages:
            if message.queue == "executador_pequeno":
                self.before_small.append(self.sent["executador_grande"])
            self.sent[message.queue] += 1
        return await super().publish(messages)


class Recording(SqliteStore):
    """Knows how many wide runs each commit wrote, as a whole."""

    def __init__(self) -> None:
        super().__init__(MEMORY)
        self.wide: list[int] = []
        self.commits = asyncio.Event()
        self.commits.set()
        self.delay = 0.0  # seconds of each commit

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        await self.commits.wait()
        await asyncio.sleep(self.delay)
        whole = [one for one in (*(each.changes for each in creations), *changes) if len(one.tasks) == WIDTH]
        self.wide.append(len(whole))
        return await super().commit(creations, changes)


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def recording() -> Recording:
    return Recording()


@pytest.fixture
async def oraculo(counting: Counting, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    for place in (batches, intake):
        monkeypatch.setattr(place, "MOST_TASKS", 2 * WIDTH)
    monkeypatch.setattr(publisher, "PUBLISHED_TOGETHER", TOGETHER)
    settings = Settings(engine=EngineSettings(batch=BATCH, stop_grace=0.1))
    async with Harness(broker=counting, store=recording, settings=settings) as harness:
        yield harness


async def test_a_small_run_waits_for_a_few_commands_of_wide_ones(oraculo: Harness, counting: Counting) -> None:
    counting.takes.clear()
    await asyncio.gather(*(oraculo.submit(WIDE) for _ in range(RUNS)))
    await oraculo.submit(SMALL)
    counting.takes.set()
    await until(lambda: counting.before_small)
    assert counting.before_small[0] <= 2 * TOGETHER
    await until(lambda: counting.sent["executador_grande"] == RUNS * WIDTH, saying="all to be sent, each once")


async def test_a_small_run_waits_for_a_few_commands_of_repeated_wide_ones(oraculo: Harness, counting: Counting) -> None:
    wide = [await oraculo.submit(WIDE) for _ in range(RUNS)]
    await asyncio.gather(*map(oraculo.operations.cancel, wide))
    await until(lambda: not len(oraculo.engine.parts.runs.inbox))
    counting.takes.clear()
    counting.sent.clear()
    await asyncio.gather(*map(oraculo.operations.repeat, wide))
    await oraculo.submit(SMALL)
    counting.takes.set()
    await until(lambda: counting.before_small)
    assert counting.before_small[0] <= 2 * TOGETHER
    await until(lambda: counting.sent["executador_grande"] == RUNS * WIDTH, saying="all to be sent again")


async def test_wide_runs_send_no_more_than_the_engine_notes(
    oraculo: Harness, counting: Counting, recording: Recording
) -> None:
    """Else a small run's answer would wait for all that is to be noted, and for all answers of the wide ones."""
    counting.takes.clear()
    await asyncio.gather(*(oraculo.submit(WIDE) for _ in range(RUNS)))
    recording.commits.clear()
    counting.takes.set()
    for _ in range(1000):  # in each turn of the loop the memory broker would take some
        await asyncio.sleep(0)
    assert BATCH <= counting.sent["executador_grande"] <= BATCH + 2 * TOGETHER
    recording.commits.set()
    await until(lambda: counting.sent["executador_grande"] == RUNS * WIDTH, saying="the others to be sent")


async def test_wide_runs_go_on_when_what_held_them_back_is_forgotten() -> None:
    inbox, lost, eased = Inbox(0.0, crowded_at=2), cast("Consumer", object()), list[bool]()
    inbox.on_eased = lambda: eased.append(True)
    inbox.put([Arrived(Delivery("resultados", b"", number), lost) for number in range(2)])
    assert inbox.holds_back()
    inbox.forget_arrived(lost)
    assert eased == [True]


async def test_small_runs_do_not_wait_for_all_wide_ones_to_be_written(oraculo: Harness, recording: Recording) -> None:
    wide = [asyncio.create_task(oraculo.submit(WIDE)) for _ in range(RUNS)]
    small = asyncio.create_task(oraculo.submit(SMALL))  # comes last
    await small
    assert sum(recording.wide) <= 4
    await asyncio.gather(*wide)
    assert sum(recording.wide) == RUNS
    assert max(recording.wide) == 2


@pytest.mark.parametrize("what", ["cancel", "repeat"])
async def test_small_runs_do_not_wait_for_all_wide_ones_to_be_cancelled_or_repeated(
    oraculo: Harness, recording: Recording, what: str
) -> None:
    wide = [await oraculo.submit(WIDE) for _ in range(RUNS)]
    operations = oraculo.operations
    if what == "repeat":
        await asyncio.gather(*map(operations.cancel, wide))
    recording.wide.clear()
    ask: Callable[[str], Awaitable[Run]] = operations.cancel if what == "cancel" else operations.repeat
    asked = [asyncio.ensure_future(ask(run_id)) for run_id in wide]
    await asyncio.sleep(0)  # they are in the inbox, before the small one
    await oraculo.submit(SMALL)
    assert sum(recording.wide) <= 4
    changed = await asyncio.gather(*asked)
    assert sum(recording.wide) == RUNS
    assert max(recording.wide) == 2
    assert {run.is_open for run in changed} == {what == "repeat"}


async def test_wide_runs_of_a_higher_priority_are_written_first(oraculo: Harness, recording: Recording) -> None:
    ended = list[int]()

    async def submit(priority: int) -> None:
        await oraculo.submit(WIDE | {"prioridade": priority})
        ended.append(priority)

    await asyncio.gather(*(submit(priority) for priority in (0, 0, 0, 9, 9)))
    assert ended == [9, 9, 0, 0, 0]


async def test_a_wide_run_ends_though_others_of_a_higher_priority_come_without_an_end(
    oraculo: Harness, recording: Recording
) -> None:
    async def submit_on() -> None:
        while True:
            await oraculo.submit(WIDE | {"prioridade": 9})

    run_id = await oraculo.submit(WIDE | {"timeout": 0.3})
    recording.delay = 0.02
    stream = [asyncio.create_task(submit_on()) for _ in range(RUNS)]
    try:
        assert (await oraculo.ended(run_id, wait=5))["status"] == "timeout"
    finally:
        for task in stream:
            task.cancel()


async def test_wide_requests_that_come_as_messages_are_settled(oraculo: Harness, counting: Counting) -> None:
    def message(number: int) -> dict[str, Any]:
        return {
            "correlation_id": f"r{number}",
            "tipo_evento": "iniciar_orquestracao",
            "timestamp": "2025-01-01T00:00:00Z",
            "payload": WIDE,
        }

    await asyncio.gather(*(oraculo.publish("orquestrador", message(number)) for number in range(5)))

    async def are_settled() -> bool:
        [state] = await counting.queues(["orquestrador"])
        return not state.ready and not state.unacked and not state.dead_letters

    await until(lambda: counting.sent["executador_grande"] == 5 * WIDTH)
    await until(are_settled)
