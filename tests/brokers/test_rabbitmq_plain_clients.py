"""RabbitMQ: clients that know nothing of us, what they send, however odd, and the quarantines they made."""

import asyncio
import gc
import json
import struct
import sys
import time
from contextlib import suppress
from typing import Any

import kombu
import pika
import pytest
from structlog.testing import capture_logs

from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.brokers.rabbitmq import connection as connection_module
from oraculo.brokers.rabbitmq import dead_letters as letters_module
from oraculo.brokers.rabbitmq.frames import Parcel
from oraculo.brokers.rabbitmq.properties import carried, encoded, redeliveries_of
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.wire.naming import dlq_of
from tests.brokers import rabbitmq_stage as stage
from tests.brokers.rabbitmq_stage import (
    already,
    bodies,
    eventually,
    forget,
    letters,
    messages,
    plain_channel,
    running,
    state,
    take,
)

url, queue, broker, nothing_goes_unheard = stage.url, stage.queue, stage.broker, stage.nothing_goes_unheard  # fixtures

NO_REASON = "published to the dead-letter queue without a reason"


# -- plain clients --------------------------------------------------------------------------------------------------


class TestPlainClients:
    @pytest.mark.parametrize("priority", [0, 5])
    async def test_a_plain_worker_takes_what_we_publish(
        self, broker: RabbitMQBroker, url: str, queue: str, priority: int
    ) -> None:
        """Each tells its priority: a message without any overtakes those of 0 to 3 on RabbitMQ 4.3."""
        await publish_all(broker, [Outgoing(queue, b"{}", priority=priority)])
        with plain_channel(url) as channel:
            assert channel.queue_declare(queue, passive=True).method.message_count == 1
            method, properties, body = channel.basic_get(queue)
            assert body == b"{}"
            assert (properties.delivery_mode, properties.priority) == (2, priority)
            assert (properties.content_type, properties.content_encoding) == ("application/json", None)
            channel.basic_ack(method.delivery_tag)

    async def test_a_worker_with_kombu_that_accepts_json_alone_gets_it_read(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        command = {"texto": "ação 🧭"}
        await publish_all(broker, [Outgoing(queue, json.dumps(command, ensure_ascii=False).encode())])
        with kombu.Connection(url) as connection:
            own = kombu.Queue(queue, channel=connection.channel(), no_declare=True)
            message = own.get(accept=["json"])
            assert message.payload == command
            message.ack()

    async def test_what_others_hold_is_not_known_and_not_said_to_be_nothing(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        """AMQP does not tell it."""
        await publish_all(broker, messages(queue, 3))
        consumer = await broker.consume(queue, prefetch=1)
        await take(consumer, 1)
        assert (await state(broker, queue)).unacked == 1
        with plain_channel(url) as channel:
            channel.basic_qos(prefetch_count=1)
            channel.basic_consume(queue, lambda *_: None)
            channel.connection.process_data_events(time_limit=0)
            held = await eventually(lambda: state(broker, queue), lambda now: now.ready == 1)
            assert (held.unacked, held.consumers) == (None, 2)
        await eventually(lambda: state(broker, queue), lambda now: (now.ready, now.unacked) == (2, 1))
        await consumer.close()
        await eventually(lambda: state(broker, queue), lambda now: (now.ready, now.unacked) == (3, 0))

    async def test_a_plain_message_goes_every_way_and_keeps_what_it_carries(self, url: str, queue: str) -> None:
        async with running(url, delivery_limit=3) as broker:
            await broker.declare([queue])
            with plain_channel(url) as channel:
                channel.queue_declare(f"{queue}-copy")
                channel.basic_publish("", queue, b"plain", _odd_properties(copy_to=f"{queue}-copy"))
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry((await take(consumer, 1))[0], 0.0, "first")
            await consumer.retry((await take(consumer, 1))[0], 0.1, "second")
            (delivery,) = await take(consumer, 1)
            assert delivery.redeliveries == 2
            await consumer.dead_letter(delivery, "bad")
            (letter,) = await letters(broker, queue, 1)
            assert (letter.body, letter.reason, letter.redeliveries) == (b"plain", "bad", 2)
            assert time.time() - 60 < letter.at <= time.time()
            await consumer.close()
            assert await broker.redrive(queue) == 1
            with plain_channel(url) as channel:
                _, properties, body = await eventually(
                    lambda: already(channel.basic_get(queue)), lambda got: got[0] is not None
                )
                assert body == b"plain"
                assert (properties.message_id, properties.correlation_id) == ("m-1", "c-1")
                assert properties.content_type == "application/octet-stream"
                assert properties.expiration is None
                assert {**properties.headers, "x-delivery-count": 0} == {
                    "mine": [1, {"deep": "é"}],
                    "x-delivery-count": 0,
                }
                assert channel.queue_declare(f"{queue}-copy", passive=True).method.message_count == 1
                channel.queue_delete(f"{queue}-copy")

    def test_a_message_that_moves_takes_no_others_name_and_does_not_expire(self) -> None:
        """The server refuses, with the whole channel, a message that names another user than ours."""
        properties = pika.BasicProperties(user_id="somebody", expiration="1000", app_id="mine", delivery_mode=1)
        moved = pika.BasicProperties().decode(carried(encoded(properties)))
        assert (moved.user_id, moved.expiration, moved.app_id, moved.delivery_mode) == (None, None, "mine", 2)

    @pytest.mark.parametrize(
        ("headers", "is_redelivered", "expected"),
        [
            (None, False, 0),
            (None, True, 1),  # a classic queue says no more
            ({"x-delivery-count": 4}, True, 4),
            ({"x-delivery-count": 1, "x-acquired-count": 4}, True, 4),  # RabbitMQ 4.3 and later
            ({"x-delivery-count": 2, "x-oraculo-redeliveries": 3}, True, 5),
            ({"x-delivery-count": "garbage", "x-oraculo-redeliveries": None}, False, 0),
        ],
    )
    def test_deliveries_are_counted_from_what_the_message_carries(
        self, headers: dict[str, Any] | None, is_redelivered: bool, expected: int
    ) -> None:
        assert redeliveries_of(encoded(pika.BasicProperties(headers=headers)), is_redelivered) == expected

    @pytest.mark.parametrize(
        ("large", "told"), [({"large": "x" * 8000}, "kept"), ({"x-oraculo-reason": "é" * 8000}, "é" * 1000)]
    )
    async def test_what_does_not_fit_a_frame_is_left_behind(
        self, url: str, queue: str, large: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server chooses how large a frame may be, and ends a connection that sends a larger one."""
        parameters = connection_module._parameters

        def small(*about: Any) -> Any:
            chosen = parameters(*about)
            chosen.frame_max = 8192  # the least that RabbitMQ 4.1 and later accept
            return chosen

        monkeypatch.setattr(connection_module, "_parameters", small)
        properties = pika.BasicProperties(headers={"x-oraculo-reason": "kept", **large}, message_id="m" * 255)
        async with running(url) as broker:
            await broker.declare([queue])
            await broker._publisher.publish([Parcel(dlq_of(queue), encoded(properties), b"0")])
            (letter,) = await letters(broker, queue, 1)
            assert letter.reason.startswith(told)
            with plain_channel(url) as channel:
                _, found, _ = channel.basic_get(dlq_of(queue))
        assert found.message_id == "m" * 255
        assert "large" not in found.headers

    async def test_what_a_plain_worker_rejects_is_in_quarantine(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        await publish_all(broker, messages(queue, 1))
        with plain_channel(url) as channel:
            method, _, _ = channel.basic_get(queue)
            channel.basic_reject(method.delivery_tag, requeue=False)
            (letter,) = await letters(broker, queue, 1)
        assert (letter.body, letter.reason) == (b"0", "moved by RabbitMQ: rejected by its consumer")
        assert time.time() - 60 < letter.at < time.time() + 60
        assert await broker.redrive(queue, [letter.id]) == 1
        assert (await take(await broker.consume(queue, prefetch=1), 1))[0].redeliveries == 0

    async def test_what_plain_workers_give_back_too_often_is_in_quarantine(self, url: str, queue: str) -> None:
        async with running(url, delivery_limit=3) as broker:
            await publish_all(broker, messages(queue, 1))
            with plain_channel(url) as channel:
                delivered = 0

                async def dead_after_one_more_try() -> int:
                    nonlocal delivered
                    method, _, _ = channel.basic_get(queue)
                    if method is not None:
                        delivered += 1
                        channel.basic_reject(method.delivery_tag, requeue=True)
                    return (await state(broker, queue)).dead_letters

                await eventually(dead_after_one_more_try, bool)
            (letter,) = await letters(broker, queue, 1)
            assert delivered == 3
            assert "delivered too often" in letter.reason

    async def test_letters_of_plain_clients_are_shown_told_apart_and_moved(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        await broker.declare([queue])
        odd = [
            pika.BasicProperties(),
            pika.BasicProperties(headers={"x-death": "nonsense", "x-oraculo-reason": 7, "x-oraculo-died-at": "never"}),
            pika.BasicProperties(headers={"x-oraculo-letter": "../../etc", "x-oraculo-redeliveries": "many"}),
            pika.BasicProperties(headers={"x-death": [{"reason": b"\xff", "time": 3}]}, timestamp=1_700_000_000),
        ]
        with plain_channel(url) as channel:
            for properties in odd * 2:
                channel.basic_publish("", dlq_of(queue), b"\xff\x00", properties)
        found = await letters(broker, queue, 8)
        assert {letter.reason for letter in found} == {NO_REASON}
        assert len({letter.id for letter in found}) == 8
        assert sorted({letter.at for letter in found}) == [0.0, 1_700_000_000.0]
        assert await broker.dead_letters(queue, limit=10) == found
        pages = list(await broker.dead_letters(queue, limit=3))
        pages += await broker.dead_letters(queue, limit=10, after=pages[-1].id)
        assert pages == found
        assert await broker.discard(queue, [found[0].id]) == 1
        assert await broker.redrive(queue, [letter.id for letter in found[:3]]) >= 2
        assert await broker.redrive(queue) >= 4
        assert (await state(broker, queue)).dead_letters == 0

    @pytest.mark.parametrize("durable", [True, False])
    async def test_a_queue_that_a_user_made_is_used_as_it_is(self, url: str, queue: str, durable: bool) -> None:
        with plain_channel(url) as channel:
            channel.queue_declare(queue, durable=durable)
        async with running(url, delivery_limit=3) as broker:
            await broker.declare([queue])
            await publish_all(broker, messages(queue, 2))
            consumer = await broker.consume(queue, prefetch=2)
            poison, good = await take(consumer, 2)
            await consumer.ack([good])
            for redeliveries in range(3):
                assert poison.redeliveries == redeliveries
                await consumer.retry(poison, 0.0, f"failure {redeliveries}")
                if redeliveries < 2:
                    (poison,) = await take(consumer, 1)
            assert [letter.reason for letter in await letters(broker, queue, 1)] == ["failure 2"]
            with plain_channel(url) as channel:
                channel.queue_declare(queue, durable=durable)  # the user's own way to name it still works

    @pytest.mark.parametrize(
        ("theirs", "why"),
        [
            ({"x-message-ttl": 60_000}, "what waits longer"),
            ({"x-expires": 600_000}, "it is deleted"),
            ({"x-max-length": 5}, "a new message pushes out the oldest"),
            ({"x-max-length-bytes": 5000}, "a new message pushes out the oldest"),
            ({"x-queue-type": "quorum", "x-message-ttl": 60_000}, "what waits longer"),
            ({"x-queue-type": "quorum", "x-max-length": 5}, "a new message pushes out the oldest"),
        ],
    )
    async def test_one_that_drops_messages_is_used_and_told_once(
        self, url: str, queue: str, theirs: dict[str, Any], why: str
    ) -> None:
        assert f"{[*theirs][-1]}: {why}" in await self.told_once(url, queue, theirs)

    @pytest.mark.parametrize("theirs", [{}, {"x-queue-type": "quorum"}, {"x-max-priority": 5}])
    async def test_one_without_dead_letters_is_used_and_told_once(
        self, url: str, queue: str, theirs: dict[str, Any]
    ) -> None:
        """As the first line of every tutorial makes it."""
        assert "without dead letters: what a worker rejects is dropped" in await self.told_once(url, queue, theirs)

    @pytest.mark.parametrize("kind", ["classic", "quorum"])
    async def test_one_with_dead_letters_of_its_own_is_used_as_it_is(self, url: str, queue: str, kind: str) -> None:
        theirs = {"x-queue-type": kind, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{queue}.mine"}
        assert await self.told_once(url, queue, theirs) == ""

    async def told_once(self, url: str, queue: str, theirs: dict[str, Any]) -> str:
        """The reason of the only warning, if there is any."""
        with plain_channel(url) as channel:
            channel.queue_declare(queue, durable=True, arguments=theirs)
        async with running(url) as broker:
            with capture_logs() as logs:
                await publish_all(broker, messages(queue, 1))
                for _ in range(2):
                    await broker.declare([queue])
            assert len(await take(await broker.consume(queue, prefetch=1), 1)) == 1
        assert [(log["log_level"], log["queue"]) for log in logs] in ([("warning", queue)], [])
        return "".join(log["reason"] for log in logs)

    @pytest.mark.parametrize(
        ("theirs", "why"),
        [({"durable": False}, "it is not durable"), ({"durable": True, "auto_delete": True}, "with auto_delete")],
    )
    async def test_one_that_does_not_last_is_used_and_told(
        self, url: str, queue: str, theirs: dict[str, bool], why: str
    ) -> None:
        with plain_channel(url) as channel:
            channel.queue_declare(queue, **theirs)
        async with running(url) as broker:
            with capture_logs() as logs:
                await publish_all(broker, messages(queue, 1))
        assert [log["queue"] for log in logs] == [queue]
        assert why in logs[0]["reason"]


class TestOthersNames:
    @pytest.mark.parametrize("owner", ["ours", "the user's"])
    async def test_a_queue_that_has_the_name_of_a_delay_swallows_nothing(
        self, broker: RabbitMQBroker, url: str, queue: str, owner: str
    ) -> None:
        with plain_channel(url) as channel:
            channel.queue_declare(f"{queue}.retry.100", durable=True)
            if owner == "the user's":
                channel.queue_declare(queue, durable=True)
        await publish_all(broker, messages(queue, 1))
        consumer = await broker.consume(queue, prefetch=1)
        (delivery,) = await take(consumer, 1)
        for redeliveries in range(1, 3):
            began = time.monotonic()
            await consumer.retry(delivery, 0.1, "later")
            await consumer.ack([delivery])  # it is not settled twice
            (delivery,) = await take(consumer, 1)
            assert (delivery.body, delivery.redeliveries) == (b"0", redeliveries)
            assert time.monotonic() - began >= 0.1
        depth = await broker._queues.depth(f"{queue}.retry.100")
        assert depth is not None
        assert depth.messages == 0


def _odd_properties(copy_to: str) -> pika.BasicProperties:
    """What must not come along when a message moves: the copy, the expiry, the user's name, the server's notes."""
    return pika.BasicProperties(
        content_type="application/octet-stream",
        message_id="m-1",
        correlation_id="c-1",
        expiration="3600000",
        user_id="guest",
        headers={"mine": [1, {"deep": "é"}], "x-death": "mine too", "CC": [copy_to]},
    )


class TestThePlainWorkerOfTheExamples:
    async def test_what_it_cannot_read_is_kept_though_its_queue_has_no_dead_letters(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        with plain_channel(url) as channel:
            channel.queue_declare(queue, durable=True)
        await broker.declare(["resultados"])
        command = {"correlation_id": queue, "tipo_evento": "iniciar_coleta", "payload": {}}
        sent = [b"no JSON", *[json.dumps(command | {"responder_em": name}).encode() for name in (7, "", None)]]
        with plain_channel(url) as channel:
            for body in sent:
                channel.basic_publish("", queue, body)
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "examples/plain_workers/pika_worker.py", url, queue, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            # The worker makes that queue now; in the midst of it RabbitMQ fails to get anything from it.
            await eventually(
                lambda: broker._queues.depth(dlq_of(queue)), lambda now: now is not None and now.messages == 3
            )
            found = await letters(broker, queue, 3)
            assert sorted(bodies(found)) == sorted(sent[:3])
            assert all(letter.reason.startswith("not a command: ") and letter.at for letter in found)
            answers = await broker.consume("resultados", prefetch=1)
            (answer,) = await take(answers, 1)
            assert json.loads(answer.body)["correlation_id"] == queue
            await answers.ack([answer])
            await broker.declare([queue])
            assert broker._queues.is_ours(dlq_of(queue))
        finally:
            with suppress(ProcessLookupError):  # it ended by itself, which the test tells better
                worker.kill()
            await worker.wait()
            forget(url, ["resultados"])


# -- headers that nobody can read -----------------------------------------------------------------------------------


def _headers(name: bytes, value: bytes) -> bytes:
    """Properties with one header, as no client of ours would write it."""
    field = bytes([len(name)]) + name + value
    kind = b"\x04json"
    flags = pika.BasicProperties.FLAG_CONTENT_TYPE | pika.BasicProperties.FLAG_HEADERS
    return struct.pack(">H", flags) + kind + struct.pack(">I", len(field)) + field


IN_MILLISECONDS = _headers(b"sent_at", b"T" + struct.pack(">Q", 1_700_000_000_000))


UNREADABLE = [
    IN_MILLISECONDS,
    _headers(b"mine", b"?nobody knows"),
    _headers(b"mine", b"S" + struct.pack(">I", 1000)),
    _headers(b"\xff\xfe", b"t\x01"),  # pika reads this one, with a name of bytes
]


class TestUnreadable:
    @pytest.mark.parametrize("properties", UNREADABLE)
    def test_headers_that_pika_cannot_read_are_left_behind(self, properties: bytes) -> None:
        assert redeliveries_of(properties, True) == 1
        moved = pika.BasicProperties().decode(carried(properties, reason="kept"))
        assert (moved.headers["reason"], moved.content_type) == ("kept", "json")

    def test_properties_that_are_cut_off_are_read_as_none(self) -> None:
        assert redeliveries_of(IN_MILLISECONDS[:5], False) == 0

    async def test_one_such_message_disturbs_no_other(self, broker: RabbitMQBroker, queue: str) -> None:
        await broker.declare([queue])
        await broker._publisher.publish(
            [
                Parcel(queue, b"\x00\x00", b"0"),
                Parcel(queue, IN_MILLISECONDS, b"odd"),
                Parcel(queue, b"\x00\x00", b"1"),
            ]
        )
        consumer = await broker.consume(queue, prefetch=10)
        taken = await take(consumer, 3)
        assert bodies(taken) == [b"0", b"odd", b"1"]
        await consumer.dead_letter(taken[1], "odd")
        await consumer.ack([taken[0], taken[2]])
        assert [letter.reason for letter in await letters(broker, queue, 1)] == ["odd"]

    async def test_such_a_letter_is_shown_and_moved(self, broker: RabbitMQBroker, queue: str) -> None:
        await broker.declare([queue])
        odd = [Parcel(dlq_of(queue), properties, b"%d" % n) for n, properties in enumerate(UNREADABLE[::3])]
        await broker._publisher.publish(odd)
        found = await letters(broker, queue, 2)
        assert sorted(bodies(found)) == [b"0", b"1"]
        assert await broker.discard(queue, [found[0].id]) == 1
        assert await broker.redrive(queue) == 1
        assert len(await take(await broker.consume(queue, prefetch=2), 1)) == 1

    @pytest.mark.parametrize("died_at", ["inf", "nan", "1e300"])
    async def test_a_time_that_is_none_is_shown(self, broker: RabbitMQBroker, queue: str, died_at: str) -> None:
        await broker.declare([queue])
        properties = encoded(pika.BasicProperties(headers={"x-oraculo-died-at": died_at}))
        await broker._publisher.publish([Parcel(dlq_of(queue), properties, b"")])
        (letter,) = await letters(broker, queue, 1)
        assert await broker.dead_letters(queue, limit=1, after=letter.id) == []

    async def test_half_a_surrogate_pair_in_a_reason_is_replaced(self, broker: RabbitMQBroker, queue: str) -> None:
        await publish_all(broker, [Outgoing(queue, b"", reason="bad \udc80")])
        assert [letter.reason for letter in await letters(broker, queue, 1)] == ["bad ?"]


# -- quarantines that others made, or filled ------------------------------------------------------------------------


class TestOthersQuarantines:
    async def test_more_letters_than_one_consumer_can_hold_are_all_shown(
        self, broker: RabbitMQBroker, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With no bound at all a quorum queue hands over 2,000 at a time."""
        monkeypatch.setattr("oraculo.brokers.rabbitmq.dead_letters._MAX_PREFETCH", 1000)
        await publish_all(broker, [Outgoing(queue, b"%d" % n, reason="r") for n in range(2500)])
        assert len(await broker.dead_letters(queue, limit=3000)) == 2500
        await eventually(lambda: state(broker, queue), lambda now: now.dead_letters == 2500)

    async def test_two_processes_that_look_at_once_see_each_letter_once(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        await publish_all(broker, [Outgoing(queue, b"%d" % n, reason="r") for n in range(1000)])
        async with running(url) as other:
            for _ in range(3):  # the later ones publish anew what was given back
                both = await asyncio.gather(*(each.dead_letters(queue, limit=2000) for each in (broker, other)))
                assert [len({letter.id for letter in seen}) for seen in both] == [1000, 1000]
                assert [len(seen) for seen in both] == [1000, 1000]

    async def test_large_letters_are_asked_for_a_few_at_a_time(
        self, broker: RabbitMQBroker, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A quorum queue reads what is asked for into its memory before it hands over the first: of 2,500 letters of a
        megabyte none came in time."""
        monkeypatch.setattr(letters_module, "ASKED_BYTES", 10_000)
        monkeypatch.setattr(letters_module, "CHUNK_BYTES", 3_000)
        consume, asked = letters_module._Look._ask_for, list[int]()

        async def consume_and_note(visit: letters_module._Look, more: int) -> None:
            asked.append(more)
            await consume(visit, more)

        monkeypatch.setattr(letters_module._Look, "_ask_for", consume_and_note)
        await publish_all(broker, [Outgoing(queue, b"%d" % n + bytes(1000), reason="r") for n in range(95)])
        found = await letters(broker, queue, 95)
        assert max(asked) < 10
        assert sum(asked) == 94, "one is asked for alone, before"
        asked.clear()
        assert await broker.discard(queue, [letter.id for letter in found[5:]]) == 90
        assert sum(asked) < 20, "what leaves makes room for others"
        assert bodies(await letters(broker, queue, 5)) == bodies(found[:5])

    async def test_those_behind_a_small_one_may_be_large(
        self, broker: RabbitMQBroker, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(letters_module, "_ASKED", 2)
        monkeypatch.setattr(letters_module, "ASKED_BYTES", 5_000)
        sizes = [1] + 40 * [1000]
        await publish_all(broker, [Outgoing(queue, bytes(size), reason="r") for size in sizes])
        most = 0
        async with broker._dead_letters._look(queue) as found:
            async for _ in found:
                most = max(most, len(found._arrived))
        assert most < 8

    @pytest.mark.parametrize("limit", [1, 3])
    @pytest.mark.parametrize("other", [{}, {"x-overflow": "drop-head"}, {"x-max-length": 1000}])
    async def test_looking_at_letters_does_not_wear_them_out(
        self, broker: RabbitMQBroker, url: str, queue: str, limit: int, other: dict[str, Any]
    ) -> None:
        with plain_channel(url) as channel:
            arguments = {"x-queue-type": "quorum", "x-delivery-limit": limit, **other}
            channel.queue_declare(dlq_of(queue), durable=True, arguments=arguments)
            for _ in range(2):
                channel.basic_publish("", dlq_of(queue), b"plain", pika.BasicProperties(message_id="m"))
            properties = pika.BasicProperties(headers={"x-death": [{"reason": "rejected"}]}, timestamp=1_700_000_000)
            channel.basic_publish("", dlq_of(queue), b"moved", properties)
        await publish_all(broker, [Outgoing(queue, b"ours", reason="kept")])
        await broker._publisher.publish([Parcel(dlq_of(queue), IN_MILLISECONDS, b"odd")])
        first = await letters(broker, queue, 5)
        for _ in range(4 * limit):
            assert await letters(broker, queue, 5) == first
            assert await broker.discard(queue, ["0" * 14 + "-" + "0" * 14]) == 0
        assert await broker.redrive(queue, [first[0].id]) == 1

    async def test_a_stream_is_not_read_as_if_it_were_a_queue(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        with plain_channel(url) as channel:
            channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "stream"})
            await publish_all(broker, messages(queue, 1))
            with pytest.raises(BrokerError, match=f"{queue} is a stream of RabbitMQ, which cannot be read") as refusal:
                await broker.consume(queue, prefetch=1)
            assert not isinstance(refusal.value, BrokerUnavailable)
            channel.queue_delete(queue)
        consumer = await broker.consume(queue, prefetch=1)
        await publish_all(broker, messages(queue, 1))
        assert len(await take(consumer, 1)) == 1

    async def test_looking_makes_no_queue(self, broker: RabbitMQBroker, queue: str) -> None:
        assert await broker.dead_letters(queue, limit=1) == []
        assert await broker.queues([queue]) == []
        assert await broker.queues() == []

    async def test_who_looked_once_leaves_nothing_in_memory(self, broker: RabbitMQBroker) -> None:
        for n in range(3):
            await broker.dead_letters(f"nobody-{n}", limit=1)
        gc.collect()
        assert len(broker._dead_letters._turns) == 0
