"""An engine that dies after it sent a command and before it noted so: the next cannot know, and sends it again."""

from pathlib import Path

import pytest

from oraculo.engine.inputs import Inbox
from oraculo.stores.sqlite import SqliteStore
from tests.end_to_end.stage import Stage, settings_for
from tests.servers.fleet import BROKERS, Fleet
from tests.waiting import until

QUEUE = "escavador_a"


@pytest.mark.parametrize("name", BROKERS)
async def test_a_command_that_is_sent_again_comes_once_where_the_broker_can_tell(
    name: str, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, path = settings_for(fleet.url(name)), str(tmp_path / "oraculo.db")
    with monkeypatch.context() as dying:
        dying.setattr(Inbox, "note", lambda self, notes: None)
        async with Stage(settings, store=SqliteStore(path)) as before:
            request = {"correlation_id": "ação 1%", "destinos": [QUEUE], "timeout": 60}
            await before.submit(request)
            await until(lambda: waiting(before, 1))
    store = SqliteStore(path)
    async with Stage(settings, store=store) as after:
        await until(lambda: nothing_unsent(store))
        expected = 1 if name == "nats" else 2  # a worker tells the second by its identity
        await until(lambda: waiting(after, expected))


async def test_a_run_with_the_id_of_one_that_is_gone_gets_its_commands(fleet: Fleet) -> None:
    settings = settings_for(fleet.url("nats"))
    for count in (1, 2):
        async with Stage(settings) as oraculo:  # with an empty store
            await oraculo.submit({"correlation_id": "the same", "destinos": [QUEUE], "timeout": 60})
            await until(lambda count=count, oraculo=oraculo: waiting(oraculo, count))


async def waiting(stage: Stage, count: int) -> bool:
    states = await stage.broker.queues([stage.engine.names.physical(QUEUE)])
    return [state.ready for state in states] == [count]


async def nothing_unsent(store: SqliteStore) -> bool:
    return not await store.unsent(1)
