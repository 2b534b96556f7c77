"""A queue that its owner gave a limit, and that is full: what is meant for it waits, and holds up nothing else."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial

import nats
import pika
import pytest
from nats.js.api import DiscardPolicy

from oraculo.brokers.nats.layout import stream_of
from oraculo.core.run import Run, TaskStatus
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.broker_admin import QueueState
from tests.end_to_end.stage import Stage, settings_for
from tests.engine.workers import Journal, recording_app
from tests.servers.fleet import Fleet
from tests.waiting import until

FULL, IDLE, WELL = "executador_cheio", "executador_parado", "escavador_a"
Limit = Callable[[str, str], Awaitable[None]]


async def limit_rabbitmq(url: str, queue: str, limit: int = 1) -> None:
    def declare() -> None:
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            arguments = {"x-max-length": limit, "x-overflow": "reject-publish"}
            connection.channel().queue_declare(queue, durable=True, arguments=arguments)

    await asyncio.to_thread(declare)


async def limit_nats(url: str, queue: str) -> None:
    client = await nats.connect(url)
    stream = client.jetstream()
    config = (await stream.stream_info(stream_of(queue))).config
    config.max_msgs, config.discard = 1, DiscardPolicy.NEW
    await stream.update_stream(config)
    await client.close()


async def all_but_idle_answered(oraculo: Stage, run_id: str) -> Run | None:
    run = await oraculo.operations.run(run_id)
    statuses = {run.plan.steps[task.number].queue: task.status for task in run.tasks}
    done = TaskStatus.SUCCEEDED
    return run if statuses == {WELL: done, FULL: done, IDLE: TaskStatus.RUNNING} else None


async def state(oraculo: Stage, queue: str) -> QueueState:
    [found] = await oraculo.broker.queues([oraculo.engine.parts.queues.names.physical(queue)])
    return found


@pytest.mark.parametrize(
    ("name", "limit"), [("rabbitmq", limit_rabbitmq), pytest.param("nats", limit_nats, marks=pytest.mark.long)]
)
async def test_a_full_queue_holds_up_no_other(name: str, limit: Limit, fleet: Fleet) -> None:
    settings = settings_for(fleet.url(name))
    async with Stage(settings, recording_app(Journal(), (WELL,))) as oraculo:
        full = oraculo.engine.parts.queues.names.physical(FULL)
        if limit is limit_rabbitmq:  # there it cannot be set later
            await limit(settings.broker.url, full)
        await publish_all(oraculo.broker, [Outgoing(full, b"the one that it has room for")])
        if limit is limit_nats:
            await limit(settings.broker.url, full)

        waiting = await oraculo.submit({"destinos": [FULL, IDLE], "payload": {}, "timeout": 60})
        for _ in range(2):  # behind it, or with it
            aggregate = await oraculo.run({"destinos": [WELL, IDLE], "payload": {}, "timeout": 2})
            assert aggregate["resultados"].keys() == {WELL}
        assert (await state(oraculo, IDLE)).ready == 3  # each command once, however often the other was tried
        assert [link.trouble for link in oraculo.broker.statuses()] == [None]
        explained = await oraculo.operations.explain(waiting)
        assert f"'{FULL}' (attempt 1 of 3, not yet confirmed by the broker" in explained
        assert f"; queue {FULL} does not take the command (" in explained
        assert f"'{IDLE}' (attempt 1 of 3, sent " in explained

        assert (await oraculo.next_on(FULL)).body == b"the one that it has room for"
        command = await asyncio.wait_for(oraculo.next_on(FULL), 10)
        assert json.loads(command.body)["correlation_id"] == waiting
        await until(lambda: not oraculo.engine.parts.health.queues.refusing, saying="that it is told of no more")


async def test_a_queue_that_refuses_while_it_is_empty_holds_up_no_other(fleet: Fleet) -> None:
    """RabbitMQ does not say why it refuses; it looks like a queue that is down."""
    settings = settings_for(fleet.url("rabbitmq"))
    async with Stage(settings, recording_app(Journal(), (WELL,))) as oraculo:
        await limit_rabbitmq(settings.broker.url, oraculo.engine.parts.queues.names.physical(FULL), 0)
        waiting = await oraculo.submit({"destinos": [FULL, IDLE], "payload": {}, "timeout": 60})
        for _ in range(2):
            aggregate = await oraculo.run({"destinos": [WELL, FULL, IDLE], "payload": {}, "timeout": 2})
            assert aggregate["resultados"].keys() == {WELL}
            assert aggregate["falhas"][FULL]["motivo"].startswith("not sent in 2 s")
        assert (await state(oraculo, IDLE)).ready == 3
        assert [link.trouble for link in oraculo.broker.statuses()] == [None]
        assert (await oraculo.operations.health()).is_ready
        assert f"queue {FULL} does not take the command (" in await oraculo.operations.explain(waiting)


async def test_with_another_broker_what_such_a_queue_refuses_goes_there_and_nothing_else_does(fleet: Fleet) -> None:
    url = fleet.url("rabbitmq")
    settings = settings_for(f"{url},{fleet.url('redis')}")
    await limit_rabbitmq(url, f"{settings.broker.prefix}{FULL}", 0)
    async with Stage(settings, recording_app(Journal(), (WELL, FULL))) as oraculo:
        for _ in range(3):
            run_id = await oraculo.submit({"destinos": [WELL, FULL, IDLE], "payload": {}, "timeout": 60})
            run = await until(partial(all_but_idle_answered, oraculo, run_id), saying="all that can be to be answered")
            vias = {run.plan.steps[task.number].queue: task.via for task in run.tasks}
            assert vias[FULL] in ("redis", None)  # it may be answered before it is noted
            assert vias[IDLE] == "rabbitmq"
        assert (await state(oraculo, IDLE)).ready == 3
        assert [link.trouble for link in oraculo.broker.statuses()] == [None, None]
