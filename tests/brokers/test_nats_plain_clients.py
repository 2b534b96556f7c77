"""NATS JetStream: clients that know nothing of us, and the plain worker of the examples."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from nats.js.api import ConsumerConfig
from structlog.testing import capture_logs

from oraculo.brokers.nats.connection import Connection
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import NO_REASON, Outgoing, publish_all
from oraculo.wire.naming import dlq_of
from tests.brokers import nats_stage as stage
from tests.brokers.nats_stage import (
    PATIENCE,
    PROMPT,
    api,
    assert_fails_soon,
    bodies,
    eventually,
    have_letters,
    is_empty,
    numbered,
    plain_client,
    running,
    take,
)
from tests.servers.nats import Nats

url, queue = stage.url, stage.queue  # fixtures


# -- plain clients --------------------------------------------------------------------------------------------------


async def test_a_plain_client_takes_what_we_publish_and_we_what_it_publishes(url: str, queue: str) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue, f"{queue}.answers"])
        await publish_all(broker, [Outgoing(queue, b"question")])
        subscription = await client.jetstream().pull_subscribe(queue, durable=queue)
        (message,) = await subscription.fetch(1, timeout=5)
        assert message.data == b"question"
        await message.ack()
        await eventually(lambda: is_empty(broker, queue))
        await client.jetstream().publish(f"{queue}.answers", b"answer")
        (delivery,) = await take(await broker.consume(f"{queue}.answers", prefetch=1), 1)
        assert (delivery.body, delivery.redeliveries) == (b"answer", 0)


async def test_a_plain_message_goes_every_way(url: str, queue: str) -> None:
    async with running(url, delivery_limit=2) as broker, plain_client(url) as client:
        consumer = await broker.consume(queue, prefetch=1)
        await client.publish(queue, b"plain")  # not even JetStream's publish
        await consumer.retry((await take(consumer, 1))[0], 0.0, "once")
        await consumer.retry((await take(consumer, 1))[0], 0.0, "twice")
        (letter,) = await broker.dead_letters(queue, limit=2)
        assert (letter.body, letter.reason, letter.redeliveries) == (b"plain", "twice", 1)
        assert await broker.redrive(queue) == 1
        assert bodies(await take(consumer, 1)) == [b"plain"]


async def test_whatever_a_plain_client_puts_into_the_dlq_is_shown(url: str, queue: str) -> None:
    odd = {"Oraculo-Redeliveries": "²", "Oraculo-Reason": "%ff%zz", "Status": "503"}
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue])
        await client.publish(dlq_of(queue), b"\xff\x00 no text")
        await client.publish(dlq_of(queue), b"", headers=odd)
        await client.publish(dlq_of(queue), b"blank", headers={"Oraculo-Reason": " "})
        await client.flush()
        letters = await eventually(lambda: have_letters(broker, queue, 3))
        assert [letter.body for letter in letters] == [b"\xff\x00 no text", b"", b"blank"]
        assert [letter.redeliveries for letter in letters] == [0, 0, 0]
        assert letters[0].reason == letters[2].reason == NO_REASON
        consumer = await broker.consume(dlq_of(queue), prefetch=3)
        assert len(await take(consumer, 3)) == 3
        await consumer.close()
        assert await broker.redrive(queue) == 3


async def test_a_plain_durable_consumer_is_shared_and_its_traps_are_taken_out(url: str, queue: str) -> None:
    """Made first by the plain client, with a limit at which JetStream would keep messages and tell nobody."""
    async with running(url) as broker, plain_client(url) as client:
        jetstream = client.jetstream()
        await jetstream.add_stream(name=queue, subjects=[queue], retention="workqueue")
        plain = await jetstream.pull_subscribe(queue, durable=queue, config=ConsumerConfig(max_deliver=2, ack_wait=1))
        consumer = await broker.consume(queue, prefetch=1)
        config = (await api(client, f"CONSUMER.INFO.{queue}.{queue}"))["config"]
        assert (config["max_deliver"], config["max_ack_pending"], config["ack_wait"]) == (-1, -1, 60 * 10**9)
        await publish_all(broker, numbered(queue, 2))
        (ours,) = await take(consumer, 1)
        (theirs,) = await plain.fetch(1, timeout=5)
        assert {ours.body, theirs.data} == {b"0", b"1"}


@pytest.mark.parametrize(
    ("theirs", "left"),
    [
        ({"ack_wait": 120 * 10**9}, {"ack_wait": 120 * 10**9}),
        ({"backoff": [10**9, 120 * 10**9], "max_deliver": 3}, {"ack_wait": 60 * 10**9}),
        ({"max_bytes": 1000}, {}),
        ({"max_batch": 10, "max_expires": 10**9}, {}),
    ],
    ids=["longer lease", "backoff", "size", "pulls"],
)
async def test_of_a_plain_consumer_only_what_does_harm_is_changed(
    url: str, queue: str, theirs: dict[str, Any], left: dict[str, Any]
) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue])
        await api(client, f"CONSUMER.DELETE.{queue}.{queue}")
        config = {"durable_name": queue, "name": queue, "ack_policy": "explicit"} | theirs
        assert "error" not in await api(
            client, f"CONSUMER.CREATE.{queue}.{queue}", {"stream_name": queue, "config": config}
        )
        await publish_all(broker, [Outgoing(queue, bytes(2000))])
        assert len(await take(await broker.consume(queue, prefetch=5), 1, PROMPT)) == 1
        config = (await api(client, f"CONSUMER.INFO.{queue}.{queue}"))["config"]
        assert left.items() <= config.items()
        assert not {"backoff", "max_bytes", "max_batch", "max_expires"} & config.keys()


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({"headers_only": True}, "headers only"),
        ({"priority_groups": ["g"], "priority_policy": "overflow"}, "priority groups"),
    ],
)
async def test_a_plain_consumer_that_cannot_serve_is_told(
    url: str, queue: str, theirs: dict[str, Any], why: str
) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue])
        await api(client, f"CONSUMER.DELETE.{queue}.{queue}")
        config = {"durable_name": queue, "name": queue, "ack_policy": "explicit"} | theirs
        await api(client, f"CONSUMER.CREATE.{queue}.{queue}", {"stream_name": queue, "config": config})
        with pytest.raises(BrokerError, match=why):
            await broker.consume(queue, prefetch=1)


@pytest.mark.parametrize("is_filtered", [False, True])
async def test_a_plain_consumer_in_the_way_is_told(url: str, queue: str, is_filtered: bool) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue])
        await api(client, f"CONSUMER.DELETE.{queue}.{queue}")
        theirs = {"filter_subject": queue} if is_filtered else {}
        config = {"durable_name": "other", "ack_policy": "explicit"} | theirs
        await api(client, f"CONSUMER.DURABLE.CREATE.{queue}.other", {"stream_name": queue, "config": config})
        needed = f"one durable consumer, with the name {queue} and no filter: delete the others of its stream"
        with pytest.raises(BrokerError, match=rf"\(10099\); the queue {queue} needs {needed}"):
            await broker.consume(queue, prefetch=1)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({"retention": "limits"}, "retention 'limits'"),
        ({"retention": "workqueue", "subjects": ["{queue}", "{queue}.more"]}, "has the subjects"),
        ({"retention": "workqueue", "name": "other-{queue}"}, "overlap.*with that one subject.*delete the other"),
        ({"retention": "workqueue", "max_msgs_per_subject": 1}, "push out an old one"),
    ],
)
async def test_a_foreign_stream_in_the_way_is_told(url: str, queue: str, theirs: dict[str, Any], why: str) -> None:
    config = {"name": queue, "subjects": [queue]} | json.loads(json.dumps(theirs).replace("{queue}", queue))
    async with running(url) as broker, plain_client(url) as client:
        assert "error" not in await api(client, f"STREAM.CREATE.{config['name']}", config)
        for call in (broker.declare([queue]), publish_all(broker, [Outgoing(queue, b"x")])):
            with pytest.raises(BrokerError, match=why) as caught:
                await call
            assert not isinstance(caught.value, BrokerUnavailable)
        await api(client, f"STREAM.DELETE.{config['name']}")


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({"max_age": 86_400_000_000_000}, "what waits longer is dropped"),
        ({"max_msgs": 1000}, "max_msgs and not discard 'new'"),
        ({"storage": "memory"}, "gone after a restart"),
        ({"max_bytes": 1_000_000, "discard": "old"}, "max_bytes and not discard 'new'"),
        ({"max_msgs": 1000, "max_bytes": 1_000_000, "discard": "new"}, None),
        ({}, None),
    ],
)
async def test_a_foreign_stream_that_drops_messages_is_used_and_told_once(
    url: str, queue: str, theirs: dict[str, Any], why: str | None
) -> None:
    config = {"name": queue, "subjects": [queue], "retention": "workqueue"} | theirs
    async with running(url) as broker, plain_client(url) as client:
        assert "error" not in await api(client, f"STREAM.CREATE.{queue}", config)
        with capture_logs() as logs:
            for _ in range(2):
                await broker.declare([queue])
            await publish_all(broker, [Outgoing(queue, b"x")])
        assert len(await take(await broker.consume(queue, prefetch=1), 1)) == 1
        told = [(log["log_level"], log["queue"]) for log in logs]
        assert told == ([("warning", queue)] if why else [])
        assert why is None or why in logs[0]["reason"]


async def test_a_stream_that_a_client_made_for_its_replies_may_drop_them(url: str, queue: str) -> None:
    config = {"name": queue, "subjects": [queue], "retention": "workqueue", "max_age": 86_400_000_000_000}
    async with running(url) as broker, plain_client(url) as client:
        await api(client, f"STREAM.CREATE.{queue}", config)
        with capture_logs() as logs:
            await publish_all(broker, [Outgoing(queue, b"x", is_reply=True)])
        assert logs == []


async def test_a_foreign_stream_that_was_made_a_moment_sooner_is_told(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Connection.streams
    async with running(url) as broker, plain_client(url) as client:

        async def look_too_early(connection: Connection, names: Sequence[str]) -> Any:
            seen = await look(connection, names)
            await api(client, f"STREAM.CREATE.{queue}", {"name": queue, "subjects": [queue], "retention": "limits"})
            return seen

        monkeypatch.setattr(Connection, "streams", look_too_early)
        with pytest.raises(BrokerError, match="retention 'limits'"):
            await broker.declare([queue])
        await api(client, f"STREAM.DELETE.{queue}")


async def test_foreign_consumers_and_streams(url: str, queue: str) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await api(client, f"STREAM.CREATE.foreign-{queue}", {"name": f"foreign-{queue}", "subjects": [f"f.{queue}.>"]})
        await api(client, f"STREAM.CREATE.{queue}", {"name": queue, "subjects": [queue], "retention": "workqueue"})
        pushing = {"durable_name": queue, "name": queue, "ack_policy": "explicit", "deliver_subject": f"x.{queue}"}
        await api(client, f"CONSUMER.CREATE.{queue}.{queue}", {"stream_name": queue, "config": pushing})
        with pytest.raises(BrokerError, match="must be a pull consumer"):
            await broker.consume(queue, prefetch=1)
        names = [state.queue for state in await broker.queues()]
        assert queue in names
        assert not [name for name in names if "foreign" in name]


async def test_somebody_who_answers_on_the_subject_confirms_nothing(url: str, queue: str) -> None:
    async with running(url, publish_timeout=0.5) as broker, plain_client(url) as client:

        async def meddle(message: Any) -> None:
            if message.reply:
                await client.publish(message.reply, b"me too")
                await client.publish(message.reply, b'{"answer": 42}')

        await broker.declare([queue])
        await client.subscribe(queue, cb=meddle)
        await client.flush()
        await api(client, f"STREAM.DELETE.{queue}")
        await assert_fails_soon(publish_all(broker, [Outgoing(queue, b"nowhere")]), 2.0)
        await publish_all(broker, numbered(queue, 50))
        assert len(await take(await broker.consume(queue, prefetch=50), 50)) == 50


# -- the plain worker of the examples -------------------------------------------------------------------------------


async def test_the_plain_worker_of_the_examples_answers(url: str, queue: str) -> None:
    """It knows nothing of ORÁCULO, and makes the queue itself when it comes first."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "examples/plain_workers/nats_worker.py", url, queue, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        async with asyncio.timeout(PATIENCE):
            assert queue.encode() in await worker.stdout.readline()
        async with running(url) as broker:
            answers = await broker.consume("resultados", prefetch=1)
            command = {
                "correlation_id": queue,
                "tipo_evento": "iniciar_execucao",
                "payload": {"x": 1},
                "timestamp": "2026-11-15T05:00:00Z",
                "tarefa": "a-task",
                "tentativa": 1,
            }
            await publish_all(broker, [Outgoing(queue, b"no JSON"), Outgoing(queue, json.dumps(command).encode())])
            (delivery,) = await take(answers, 1)
            answer = json.loads(delivery.body)
            await answers.ack([delivery])
            assert (answer["correlation_id"], answer["tarefa"], answer["tentativa"]) == (queue, "a-task", 1)
            assert (answer["tipo_evento"], answer["payload"]["status"]) == ("resultado_execucao", "ok")
            await eventually(lambda: is_empty(broker, queue))
            (letter,) = await broker.dead_letters(queue, limit=2)
            assert letter.body == b"no JSON"
            assert "JSON" in letter.reason
    finally:
        worker.kill()
        await worker.wait()


async def test_the_plain_worker_makes_no_queue_that_nobody_asked_for_and_survives_odd_commands() -> None:
    command = {"correlation_id": "c", "tipo_evento": "iniciar_execucao", "payload": {}}
    odd = [json.dumps(command | {"responder_em": bad}).encode() for bad in (7, "a b", "*", ["x"])]
    with Nats() as server:
        script = "examples/plain_workers/nats_worker.py"
        worker = await asyncio.create_subprocess_exec(sys.executable, script, server.url, "p.q")
        try:
            async with running(server.url) as broker, plain_client(server.url) as client:
                await publish_all(
                    broker, [Outgoing("p.q", json.dumps(command | {"responder_em": "p.answers"}).encode())]
                )
                assert len(await take(await broker.consume("p.answers", prefetch=1), 1)) == 1
                assert (await api(client, "STREAM.INFO.resultados"))["error"]["code"] == 404
                last = json.dumps(command | {"responder_em": None}).encode()
                await publish_all(broker, [Outgoing("p.q", body) for body in (*odd, last)])
                assert len(await take(await broker.consume("resultados", prefetch=1), 1)) == 1
                assert [letter.body for letter in await broker.dead_letters("p.q", limit=9)] == odd
            assert worker.returncode is None
        finally:
            worker.kill()
            await worker.wait()
