"""Faults between the bridge and Celery's broker: the run gets a reason, a message is dead-lettered, or all wait.

No Celery worker is needed: the tests take the tasks from their queue and reply by hand.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import kombu
import msgspec
import pytest
from amqp.exceptions import PreconditionFailed

from oraculo.bridges.celery import connections, reply_consumer
from oraculo.bridges.celery.connections import CeleryBroker, CeleryUnavailable
from oraculo.bridges.celery.recent import RecentDict
from oraculo.bridges.celery.sender import TaskSender
from oraculo.bridges.celery.tasks import RETURNED, CeleryTask
from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.memory_consumer import MemoryConsumer
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings
from oraculo.pipeline import bridge_rules, bridges
from oraculo.ports.broker import Outgoing, Receipt, publish_all
from oraculo.ports.broker_admin import DeadLetter
from oraculo.ports.telemetry import DeadLettered, LoopFailed, Record
from tests.bridges.celery_stage import Bridged, replies_of
from tests.brokers.failover_stage import Named
from tests.servers.fleet import Fleet
from tests.waiting import until

pytestmark = pytest.mark.timeout(90)
JSON, YAML = "application/json", "application/x-yaml"
COMMAND = {"correlation_id": "r", "tipo_evento": "iniciar_execucao", "timestamp": "2026-01-01T00:00:00Z", "payload": {}}


class Heard:
    """A telemetry that keeps its records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def emit(self, record: Record) -> None:
        self.records.append(record)

    def reasons(self, kind: type[DeadLettered] | type[LoopFailed]) -> list[str]:
        return [record.reason for record in self.records if isinstance(record, kind)]


class CelerySide:
    """Acts on Celery's broker as an app, its clients and its operators do."""

    def __init__(self, url: str) -> None:
        self.queue = f"loja-{uuid.uuid4().hex[:10]}"
        self.connection = kombu.Connection(url, transport_options={"confirm_publish": True})
        self.channel: Any = self.connection.channel()
        self._made: list[str] = [self.queue]

    def declare(self, name: str, **options: Any) -> None:
        self.channel.queue_declare(name, durable=True, auto_delete=False, **options)
        self._made.append(name)

    def task(self, queue: str = "") -> dict[str, Any] | None:
        """Take the next task, and return the keyword arguments of its success callback. None: no task waits."""
        try:
            found = kombu.Queue(queue or self.queue, channel=self.channel).get(accept=["json"])
        except self.connection.channel_errors:
            self.channel = self.connection.channel()  # the queue does not exist yet
            return None
        if found is None:
            return None
        found.ack()
        keywords: dict[str, Any] = found.payload[2]["callbacks"][0]["kwargs"]
        return keywords

    def reply(self, exchange: str, body: Any, task: str = RETURNED, **options: Any) -> None:
        headers = {"task": task} | options.pop("headers", {})
        producer = kombu.Producer(self.channel)
        producer.publish(body, exchange=exchange, routing_key=exchange, headers=headers, **options)

    def end(self) -> None:
        for name in self._made:
            with self.connection.channel() as channel:  # type: ignore[attr-defined, unused-ignore]
                channel.queue_delete(name)
        self.connection.release()


@pytest.fixture
def url(fleet: Fleet) -> str:
    return fleet.url("rabbitmq")


@pytest.fixture
def celery(url: str) -> Iterator[CelerySide]:
    side = CelerySide(url)
    yield side
    side.end()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
async def stage(celery: CelerySide, url: str, heard: Heard) -> AsyncIterator[Bridged]:
    async with Bridged(url, celery.queue, telemetry=heard, events=False) as made:
        await made.is_connected()
        yield made


def replies(stage: Bridged) -> str:
    return f"{stage.settings.broker.prefix}oraculo-respostas"


def destination(name: str = "t", queue: str | None = None) -> dict[str, Any]:
    return {"id": name, "fila": "celery://loja.somar" + (f"?queue={queue}" if queue else ""), "payload": {}}


async def letters_of(stage: Bridged) -> list[DeadLetter]:
    async def found() -> Any:
        return await stage.broker.dead_letters(f"{stage.settings.broker.prefix}ponte-celery", limit=10)

    return list(await until(found, saying="the dead letter"))


async def is_answered(stage: Bridged, celery: CelerySide, **options: Any) -> dict[str, Any]:
    """Run a task and reply to it, with these options of kombu's publish. Return the aggregate."""
    run = await stage.submit({"destinos": [destination()], "timeout": 30})
    keywords = await until(celery.task, saying="the task")
    assert keywords is not None
    celery.reply(replies(stage), [[{"soma": 5}], keywords, {}], **{"serializer": "json", **options})
    return await stage.ended(run)


# -- replies that cannot be read -------------------------------------------------------------------------------------


async def test_a_compressed_reply_is_read(stage: Bridged, celery: CelerySide) -> None:
    found = await is_answered(stage, celery, compression="gzip")
    assert found["resultados"]["t"]["resultado"] == {"soma": 5}


@pytest.mark.parametrize(
    ("body", "options", "reason"),
    [
        (b"no gzip", {"headers": {"compression": "application/x-gzip"}, "content_type": JSON}, "decompressing"),
        (b"x", {"headers": {"compression": "application/x-unheard-of"}, "content_type": JSON}, "KeyError"),
        (b"- [5]\n- comando: {}\n- {}\n", {"content_type": YAML}, "cannot be read as JSON (application/x-yaml)"),
        (b"\xff\xfe", {"content_type": JSON, "content_encoding": "utf-8"}, "cannot be read as JSON"),
    ],
    ids=["broken gzip", "unknown compression", "yaml", "not its encoding"],
)
async def test_an_unreadable_reply_is_dead_lettered_and_the_next_one_read(
    stage: Bridged, celery: CelerySide, heard: Heard, body: bytes, options: dict[str, Any], reason: str
) -> None:
    celery.reply(replies(stage), body, **{"content_encoding": "binary", **options})
    [letter] = await letters_of(stage)
    assert replies(stage) in letter.reason
    assert reason in letter.reason
    assert letter.body == body
    assert heard.reasons(DeadLettered) == [letter.reason]
    assert (await is_answered(stage, celery))["status"] == "concluida"
    await until(lambda: replies_of(stage)() == 0, saying="both replies to be acked")


async def test_a_reply_whose_answer_the_broker_refuses_is_dead_lettered(
    stage: Bridged, celery: CelerySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = stage.broker.publish

    async def refuse_answers(messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if any(b'"nowhere"' in message.body and message.reason is None for message in messages):
            raise BrokerError("no such place")
        return await publish(messages)

    monkeypatch.setattr(stage.broker, "publish", refuse_answers)
    keywords = {"comando": {"correlation_id": "nowhere", "tipo_evento": "iniciar_execucao"}}
    celery.reply(replies(stage), [[5], keywords, {}], serializer="json")
    [letter] = await letters_of(stage)
    assert "no such place" in letter.reason


@pytest.mark.parametrize(("value", "answered"), [(5, b'"resultado":5'), ("x" * 9000, b"it is too large")])
async def test_an_answer_or_what_stands_in_for_it_goes_back_by_the_broker_that_brought_the_command(
    celery: CelerySide, url: str, monkeypatch: pytest.MonkeyPatch, value: object, answered: bytes
) -> None:
    second = Named("segundo")
    both = FailoverBroker([Named("primeiro"), second])
    publish = both.publish

    async def refuse_large(messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if any(len(message.body) > 5000 for message in messages):
            raise BrokerError("it is too large")
        return await publish(messages)

    monkeypatch.setattr(both, "publish", refuse_large)
    async with Bridged(url, celery.queue, broker=both, events=False) as stage:
        await stage.is_connected()
        ponte = {"tipo": "celery", "alvo": "loja.somar"}
        command = {**COMMAND, "ponte": ponte}
        queue = f"{stage.settings.broker.prefix}ponte-celery"
        await publish_all(second, [Outgoing(queue, msgspec.json.encode(command | {"responder_em": "aqui"}))])
        keywords = await until(celery.task, saying="the task")
        celery.reply(replies(stage), [[value], keywords, {}], serializer="json")
        [answer] = await asyncio.wait_for((await second.consume("aqui", prefetch=1)).take(1), 10)
        assert answered in answer.body


async def test_an_unreadable_reply_is_kept_up_to_a_limit(stage: Bridged, celery: CelerySide) -> None:
    celery.reply(replies(stage), b"x" * 100_000, content_type=JSON, content_encoding="binary")
    [letter] = await letters_of(stage)
    assert letter.body == b"x" * 64 * 1024


async def test_a_broker_that_cannot_be_reached_is_reported(url: str, heard: Heard) -> None:
    async with Bridged("amqp://guest:s3cr3t@127.0.0.1:1//", "celery", telemetry=heard, events=False):
        await until(lambda: heard.reasons(LoopFailed), saying="the trouble to be reported")
    assert "Connection refused" in heard.reasons(LoopFailed)[0]
    assert "s3cr3t" not in str(heard.records)


async def test_the_last_of_many_brokers_is_reached(celery: CelerySide, url: str) -> None:
    away = "amqp://guest:guest@127.0.0.1:1//"
    async with Bridged(f"{away};{away};{away};{url}", celery.queue, events=False) as stage:
        assert (await is_answered(stage, celery))["status"] == "concluida"


async def test_workers_are_asked_for_events_under_the_apps_prefix(fleet: Fleet) -> None:
    celery, prefix = CelerySide(fleet.url("redis")), f"loja{uuid.uuid4().hex[:10]}:"
    with celery.channel.client.pubsub() as published:
        published.psubscribe(f"{prefix}*")
        await until(published.get_message, saying="the subscription")
        async with Bridged(fleet.url("redis"), celery.queue, key_prefix=prefix):
            message = await until(published.get_message, saying="the request for events")
        assert message["channel"].endswith(b".celery.pidbox")
    celery.end()


# -- the queue of the replies ----------------------------------------------------------------------------------------


async def test_rabbitmq_never_drops_a_reply_that_was_delivered_often(stage: Bridged, celery: CelerySide) -> None:
    """RabbitMQ 4 drops a message after 20 deliveries unless its queue sets a limit."""
    with pytest.raises(PreconditionFailed, match=r"x-delivery-limit.*1000000000"):
        celery.declare(replies(stage), arguments={"x-queue-type": "quorum"})


async def test_a_queue_of_replies_with_other_arguments_is_reported(celery: CelerySide, url: str) -> None:
    stage = Bridged(url, celery.queue, events=False)
    celery.declare(replies(stage))
    async with stage:
        await until(lambda: "PRECONDITION_FAILED" in str(stage.bridge.trouble), saying="the trouble")


def delete_exchange(celery: CelerySide, name: str) -> None:
    celery.channel.exchange_delete(name)


def delete_binding(celery: CelerySide, name: str) -> None:
    celery.channel.client.delete(f"_kombu.binding.{name}")


@pytest.mark.parametrize(("broker", "lose"), [("rabbitmq", delete_exchange), ("redis", delete_binding)])
async def test_the_way_to_the_replies_is_declared_again_when_the_broker_lost_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, broker: str, lose: Any
) -> None:
    celery, declare, times = CelerySide(fleet.url(broker)), CeleryBroker.declare_replies, []
    monkeypatch.setattr(reply_consumer, "_DECLARE_EVERY", 0.0)
    monkeypatch.setattr(CeleryBroker, "declare_replies", lambda *given: times.append(declare(*given)))
    async with Bridged(fleet.url(broker), celery.queue, events=False) as stage:
        await is_answered(stage, celery)  # all connections are open, and have declared it once
        lose(celery, replies(stage))
        seen = len(times)  # the next declaration may have begun before
        await until(lambda: len(times) > seen + 1, saying="the way to be declared again")
        assert (await is_answered(stage, celery))["status"] == "concluida"
    celery.end()


def test_a_list_of_brokers_is_always_tried_from_its_first(fleet: Fleet) -> None:
    """Tasks and replies must use the same broker."""
    away, good = "redis://127.0.0.1:1/0", fleet.url("redis").removesuffix("/0")
    broker = CeleryBroker(f"{away};{away};{good}/1;{good}/2")
    for _ in range(3):
        connection = broker.connection()
        broker.connect(connection)
        assert connection.as_uri().endswith("/1")
        connection.release()


# -- tasks that are not taken ----------------------------------------------------------------------------------------


def lock(celery: CelerySide, name: str) -> None:
    celery.channel.queue_declare(name, exclusive=True, auto_delete=False)


def misdeclare(celery: CelerySide, name: str) -> None:
    celery.channel.exchange_declare(name, "fanout", durable=False, auto_delete=False)


@pytest.mark.parametrize(
    ("name", "prepare", "reason"),
    [
        ("loja-presa", lock, "RESOURCE_LOCKED"),
        ("loja-torta", misdeclare, "PRECONDITION_FAILED"),
        ("amq.loja", None, "ACCESS_REFUSED"),
    ],
)
async def test_a_queue_that_refuses_fails_its_step_and_holds_up_no_other(
    stage: Bridged, celery: CelerySide, monkeypatch: pytest.MonkeyPatch, name: str, prepare: Any, reason: str
) -> None:
    monkeypatch.setattr(
        bridge_rules, "is_transports_own", lambda _: False
    )  # so that a run can name a queue that the broker itself refuses
    if prepare is not None:
        prepare(celery, name)
    bad = [destination(f"ruim{number}", queue=name) for number in range(3)]
    run = await stage.submit({"destinos": [*bad, destination("bom")], "timeout": 30})
    keywords = await until(celery.task, saying="the task of the other queue")
    celery.reply(replies(stage), [[5], keywords, {}], serializer="json")
    found = await stage.ended(run)
    assert found["status"] == "parcial", found
    assert found["resultados"]["bom"]["resultado"] == 5
    for number in range(3):
        assert "Celery's broker refused the task" in found["falhas"][f"ruim{number}"]["motivo"]
        assert reason in found["falhas"][f"ruim{number}"]["motivo"]
    assert stage.bridge.trouble is None


async def test_a_task_that_cannot_even_be_sent_fails_its_step_and_holds_up_no_other(
    stage: Bridged, celery: CelerySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridges, "_MAX_NAME_BYTES", 400)  # nobody checks what a plain publisher sends
    destinations = [destination("bom"), destination("ruim", queue="é" * 200), destination("outro")]
    run = await stage.submit({"destinos": destinations, "timeout": 30})
    for _ in range(2):
        keywords = await until(celery.task, saying="a task of the other queue")
        celery.reply(replies(stage), [[5], keywords, {}], serializer="json")
    found = await stage.ended(run)
    assert found["resultados"].keys() == {"bom", "outro"}
    assert "the task cannot be sent to Celery's queue éé" in found["falhas"]["ruim"]["motivo"]


async def test_commands_whose_lease_is_lost_while_celery_is_away_are_given_back(
    stage: Bridged, celery: CelerySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another bridge may have taken them."""
    send, close, closed = TaskSender.send, MemoryConsumer.close, list[MemoryConsumer]()

    def fail_once(*_: Any) -> None:
        monkeypatch.setattr(TaskSender, "send", send)
        raise CeleryUnavailable("not now")

    async def lose_lease(*_: Any) -> None:
        raise BrokerUnavailable("the connection broke")

    async def note_close(consumer: MemoryConsumer) -> None:
        closed.append(consumer)
        await close(consumer)

    monkeypatch.setattr(TaskSender, "send", fail_once)
    monkeypatch.setattr(MemoryConsumer, "extend", lose_lease)
    monkeypatch.setattr(MemoryConsumer, "close", note_close)
    await stage.submit({"destinos": [destination()], "timeout": 30})
    await until(celery.task, saying="the task")
    assert len(closed) == 1


async def test_a_redis_key_of_another_type_fails_its_step_and_holds_up_no_other(fleet: Fleet) -> None:
    celery = CelerySide(fleet.url("redis"))
    celery.channel.client.set("loja-torta", "no list")
    try:
        async with Bridged(fleet.url("redis"), celery.queue, events=False) as stage:
            run = await stage.submit(
                {"destinos": [destination("ruim", queue="loja-torta"), destination("bom")], "timeout": 30}
            )
            keywords = await until(celery.task, saying="the task of the other queue")
            celery.reply(replies(stage), [[5], keywords, {}], serializer="json")
            found = await stage.ended(run)
            assert found["resultados"]["bom"]["resultado"] == 5
            assert "WRONGTYPE" in found["falhas"]["ruim"]["motivo"]
    finally:
        celery.channel.client.delete("loja-torta")
        celery.end()


async def test_a_task_that_the_broker_nacks_does_not_count_as_sent(stage: Bridged, celery: CelerySide) -> None:
    celery.declare(celery.queue, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    kombu.Producer(celery.channel).publish("full", exchange="", routing_key=celery.queue, serializer="json")
    run = await stage.submit({"destinos": [destination()], "timeout": 60})
    await until(lambda: "MessageNacked" in str(stage.bridge.trouble), saying="the bridge to report the nack")
    celery.channel.queue_purge(celery.queue)
    keywords = await until(celery.task, saying="the task, once there is room")
    celery.reply(replies(stage), [[5], keywords, {}], serializer="json")
    assert (await stage.ended(run))["status"] == "concluida"
    assert stage.bridge.trouble is None


async def test_a_queue_that_is_full_holds_up_no_other(stage: Bridged, celery: CelerySide) -> None:
    full = f"{celery.queue}-cheia"
    celery.declare(full, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    kombu.Producer(celery.channel).publish("full", exchange="", routing_key=full, serializer="json")
    stuck = [destination(f"espera{number}", queue=full) for number in range(3)]
    await stage.submit({"destinos": [*stuck, destination("passa"), destination("tambem")], "timeout": 60})
    for _ in range(2):
        await until(celery.task, saying="a task of the other queue")
    await until(lambda: f"the queue {full} takes nothing now" in str(stage.bridge.trouble), saying="the trouble")
    celery.channel.queue_purge(full)
    for _ in stuck:  # each that is taken makes room for the next
        await until(lambda: celery.task(full), saying="a task that waited")
    await until(lambda: stage.bridge.trouble is None, saying="the bridge to be well again")


async def test_a_refusal_leaves_no_channel_open(stage: Bridged, celery: CelerySide) -> None:
    lock(celery, name := f"{celery.queue}-trancada")
    for _ in range(3):
        run = await stage.submit({"destinos": [destination("ruim", queue=name)], "timeout": 30})
        assert "RESOURCE_LOCKED" in (await stage.ended(run))["falhas"]["ruim"]["motivo"]
    connection = stage.bridge._dispatcher._sender._connection
    assert connection is not None
    assert [number for number in connection.connection.channels if number] in ([], [1])


async def test_a_reply_that_is_held_for_long_is_answered_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis' transport delivers it again and again meanwhile, each time with a newer score."""
    monkeypatch.setattr(connections, "_VISIBILITY_TIMEOUT", 1)
    celery, scores = CelerySide(fleet.url("redis")), set[float]()
    try:
        async with Bridged(fleet.url("redis"), celery.queue, events=False) as stage:

            def is_delivered_again() -> bool:
                key = f"{replies(stage)}.unacked_index"
                scores.update(score for _, score in celery.channel.client.zrange(key, 0, -1, withscores=True))
                return len(scores) > 2

            run = await stage.submit({"destinos": [destination()], "timeout": 60})
            keywords = await until(celery.task, saying="the task")
            publish = stage.broker.publish
            monkeypatch.setattr(stage.broker, "publish", _away)
            celery.reply(replies(stage), [[5], keywords, {}], serializer="json")
            await until(is_delivered_again, within=40, saying="more deliveries of the reply")
            monkeypatch.setattr(stage.broker, "publish", publish)
            assert (await stage.ended(run))["status"] == "concluida"
            await until(lambda: replies_of(stage)() == 0, saying="the reply to be acked")
            history = [entry.what.value for entry in await stage.operations.history(run)]
            assert "resposta_repetida" not in history
    finally:
        celery.end()


async def _away(_: object) -> str:
    raise BrokerUnavailable("not now")


async def test_a_task_that_finds_no_queue_does_not_count_as_sent(stage: Bridged, celery: CelerySide) -> None:
    assert (await is_answered(stage, celery))["status"] == "concluida"  # the bridge knows the queue from now on
    celery.channel.queue_delete(celery.queue)
    assert (await is_answered(stage, celery))["status"] == "concluida"


# -- passwords -------------------------------------------------------------------------------------------------------

_ANY_TASK = CeleryTask("id", "celery", b"[]", {}, {})


def test_only_the_latest_entries_are_kept() -> None:
    kept = RecentDict[str, None](3)
    for name in ("a", "b", "c", "a", "d", "e"):
        kept[name] = None
    assert list(kept) == ["c", "d", "e"]


@pytest.mark.parametrize(
    "address",
    [
        "amqp://user:s3cr3t@127.0.0.1:1//",
        "amqp://user:s3cr3t@127.0.0.1:1//;amqp://user:s3cr3t@127.0.0.1:2//",
        "redis://:s3cr3t@127.0.0.1:1/0",
        "redis://user:s3cr3t@127.0.0.1:1/0",
    ],
)
def test_no_password_is_in_the_error_of_a_broker_that_cannot_be_reached(address: str) -> None:
    with pytest.raises(CeleryUnavailable, match=r"127\.0\.0\.1:") as caught:
        TaskSender(CeleryBroker(address, reply_queue="respostas")).send(_ANY_TASK)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("address", ["amqp://user:s3cr3t@host:porta//", "amqp://user:s3/cr3t@h//", "no://u:s3cr3t@h"])
def test_no_password_is_in_the_fault_of_a_url(address: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        CeleryBroker(address)
    assert "cr3t" not in str(caught.value)


async def test_no_password_is_in_the_error_of_a_login(fleet: Fleet) -> None:
    address = fleet.url("rabbitmq").replace("guest:guest@", "guest:s3cr3t@")
    with pytest.raises(CeleryUnavailable, match="ACCESS_REFUSED") as caught:
        TaskSender(CeleryBroker(address, reply_queue="respostas")).send(_ANY_TASK)
    assert "s3cr3t" not in str(caught.value)
