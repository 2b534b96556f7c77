"""A pipeline whose queue the broker refuses: its own runs wait and say why, and nothing else is kept from working."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from oraculo.ports.telemetry import LoopFailed
from oraculo.settings import Settings
from oraculo.stores.sqlite import SqliteStore
from tests.brokers.nats_stage import api, plain_client
from tests.cli.test_rehearsal import rabbit_user
from tests.end_to_end.stage import Stage, settings_for
from tests.engine.broker_stage import Told
from tests.engine.workers import Journal, recording_app
from tests.servers.fleet import Fleet
from tests.waiting import until

WELL, PIPELINE = "escavador_a", "vendas"
Refuse = Callable[
    [Fleet, str], Awaitable[Settings]
]  # has the broker refuse that queue of an engine with these settings


async def by_its_name(fleet: Fleet, queue: str) -> Settings:
    return settings_for(fleet.url("nats"))


async def by_another_stream(fleet: Fleet, queue: str) -> Settings:
    settings = settings_for(fleet.url("nats"))
    async with plain_client(settings.broker.url) as client:
        subject = settings.broker.prefix + queue.partition(".")[0] + ".>"
        stream = f"of-another-team-{settings.broker.prefix[:-1]}"
        assert "error" not in await api(client, f"STREAM.CREATE.{stream}", {"name": stream, "subjects": [subject]})
    return settings


async def by_a_key_that_is_no_stream(fleet: Fleet, queue: str) -> Settings:
    settings = settings_for(fleet.url("redis"))
    async with Redis.from_url(settings.broker.url) as client:
        await client.set(settings.broker.prefix + queue, "somebody's own")
    return settings


async def by_rights(fleet: Fleet, queue: str) -> Settings:
    return settings_for(rabbit_user(fleet, f"^(?!.*{queue}).*$", ".*", ".*"))


@pytest.mark.parametrize(
    ("refuse", "queue", "words"),
    [
        pytest.param(by_its_name, "faturas.", "NATS cannot have the queue", id="nats: a name"),
        pytest.param(by_another_stream, "faturas.dia", "subjects overlap", id="nats: overlap"),
        pytest.param(by_a_key_that_is_no_stream, "faturas", "not a stream", id="redis"),
        pytest.param(by_rights, "faturas", "ACCESS_REFUSED", id="rabbitmq"),
    ],
)
async def test_a_refused_queue_keeps_no_engine_from_starting(
    refuse: Refuse, queue: str, words: str, fleet: Fleet, tmp_path: Path
) -> None:
    settings, file = await refuse(fleet, queue), str(tmp_path / "oraculo.db")
    text = json.dumps({"steps": [{"type": queue}]}).encode()
    async with Stage(settings, store=SqliteStore(file)) as oraculo:
        _, is_new = await oraculo.operations.put_pipeline(PIPELINE, text)
        assert is_new

    told = Told()
    again = Stage(settings, recording_app(Journal(), (WELL,)), store=SqliteStore(file), telemetry=told)
    async with again as oraculo:
        [failed] = told.of(LoopFailed)
        assert f"the queue '{queue}' is refused: " in msgspec.to_builtins(failed)["reason"]
        assert words in msgspec.to_builtins(failed)["reason"]
        waiting = await oraculo.submit({"pipeline": PIPELINE, "timeout": 60})
        assert (await oraculo.run({"destinos": [WELL], "timeout": 20}))["status"] == "concluida"

        async def says_why() -> bool:
            return words in await oraculo.operations.explain(waiting)

        await until(says_why, saying="the broker's words in the explanation")
        assert (await oraculo.operations.health()).is_ready
