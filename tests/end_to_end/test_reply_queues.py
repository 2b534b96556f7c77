"""A client of RabbitMQ that lets the server name its reply queue, as in RabbitMQ's own tutorial on RPC, and an engine
whose queues have a prefix."""

import json
import shlex
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from oraculo.core.run import DeliveryStatus
from oraculo.settings import Settings
from oraculo.wire.naming import dlq_of
from oraculo.wire.timestamps import to_iso
from tests.brokers.rabbitmq_stage import plain_channel
from tests.cli.test_rehearsal import rabbit_user
from tests.end_to_end.stage import Stage, settings_for
from tests.servers.fleet import Fleet
from tests.waiting import until

DOC = (Path(__file__).parents[2] / "docs" / "reference" / "limits-brokers.md").read_text("utf-8")


def documented_rights(user: str) -> list[str]:
    line = next(line for line in DOC.splitlines() if line.startswith(f"rabbitmqctl set_permissions -p vhost {user} "))
    return shlex.split(line)[-3:]


@pytest.fixture(scope="module")
def client_url(fleet: Fleet) -> str:
    """Of a user with the rights that docs/reference/limits-brokers.md lists for such a client."""
    return rabbit_user(fleet, *documented_rights("cliente"))


@pytest.fixture
def settings(fleet: Fleet) -> Settings:
    """Of an engine whose user has the rights that docs/reference/limits-brokers.md lists for a prefix, and no more."""
    url = rabbit_user(fleet, *documented_rights("oraculo"))
    return settings_for(url, prefix=f"loja.t{uuid.uuid4().hex[:10]}.")


@contextmanager
def asking(url: str, settings: Settings, *, in_envelope: bool = False) -> Iterator[tuple[BlockingChannel, str]]:
    """A client that has asked for the run `r`, which ends by its deadline, and the queue that it listens on."""
    with plain_channel(url) as channel:
        queue = channel.queue_declare("", exclusive=True).method.queue
        payload: dict[str, Any] = {"destinos": ["escavador_ninguem"], "timeout": 1}
        request = {"correlation_id": "r", "tipo_evento": "iniciar_orquestracao", "timestamp": to_iso(0.0)}
        (request if in_envelope else payload)["responder_em"] = queue
        body = json.dumps(request | {"payload": payload}).encode()
        channel.basic_publish("", f"{settings.broker.prefix}orquestrador", body)
        yield channel, queue


def is_there(url: str, queue: str) -> bool:
    with plain_channel(url) as channel:
        try:
            channel.queue_declare(queue, passive=True)
        except ChannelClosedByBroker as error:
            return error.reply_code != 404
    return True


@pytest.mark.parametrize("in_envelope", [True, False], ids=["envelope", "payload"])
async def test_a_queue_that_the_server_named_gets_its_reply_in_spite_of_a_prefix(
    fleet: Fleet, client_url: str, settings: Settings, in_envelope: bool
) -> None:
    prefix = settings.broker.prefix
    async with Stage(settings) as oraculo:
        with asking(client_url, settings, in_envelope=in_envelope) as (channel, queue):
            assert queue.startswith("amq.gen-")
            message = await until(lambda: channel.basic_get(queue, auto_ack=True)[2], saying="the reply")
            assert json.loads(message)["payload"]["status"] == "timeout"
            for other in (dlq_of(queue), prefix + queue, dlq_of(prefix + queue)):
                assert not is_there(fleet.server("rabbitmq").url, other), other
            assert all(state.queue.startswith(prefix) for state in await oraculo.operations.queues())


async def test_a_client_that_has_gone_is_told_of_and_no_queue_is_made_for_it(
    fleet: Fleet, client_url: str, settings: Settings
) -> None:
    async with Stage(settings) as oraculo:
        with asking(client_url, settings) as (_, queue):
            await until(lambda: oraculo.store.heads(["r"]), saying="the request to be taken")
        await until(lambda: is_told(oraculo), saying="the failure to be told")
        [delivery] = (await oraculo.operations.run("r")).head.deliveries
        assert f" no queue {queue}" in str(delivery.error)  # more is told where RabbitMQ lets us look
        for other in (queue, settings.broker.prefix + queue):
            assert not is_there(fleet.server("rabbitmq").url, other), other


async def is_told(oraculo: Stage) -> bool:
    [delivery] = (await oraculo.operations.run("r")).head.deliveries
    return delivery.status is DeliveryStatus.PENDING and delivery.attempts == 1
