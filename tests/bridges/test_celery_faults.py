"""What goes wrong between the bridge and Celery's broker: told to the run, set apart with a reason, or waited for.

No Celery worker is needed: the tests take the tasks out of their queue and report by hand.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import kombu
import msgspec
import pytest
from amqp.exceptions import PreconditionFailed

from oraculo.bridges.celery import connections
from oraculo.bridges.celery import replies as replies_module
from oraculo.bridges.celery.connections import Address, CeleryAway, Listener, TaskSender
from oraculo.bridges.celery.reports import read_report
from oraculo.bridges.celery.tasks import RETURNED, Task
from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.memory import MemoryConsumer
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings
from oraculo.pipeline import bridge_rules
from oraculo.pipeline import bridges as core_bridge
from oraculo.ports.broker import DeadLetter, Outgoing
from oraculo.ports.telemetry import DeadLettered, LoopFailed, Record
from tests.bridges.celery_stage import Bridged, replies_of
from tests.brokers.failover_stage import Named
from tests.servers.fleet import Fleet
from tests.waiting import until

pytestmark = pytest.mark.timeout(90)
JSON, YAML = "application/json", "application/x-yaml"
COMMAND = {"correlation_id": "r", "tipo_evento": "iniciar_execucao", "timestamp": "2026-01-01T00:00:00Z", "payload": {}}


class Heard:
    """A telemetry that remembers."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def emit(self, record: Record) -> None:
        self.records.append(record)

    def reasons(self, kind: type[DeadLettered] | type[LoopFailed]) -> list[str]:
        return [record.reason for record in self.records if isinstance(record, kind)]


class CelerySide:
    """What an app, its clients and its operators do on Celery's broker."""

    def __init__(self, url: str) -> None:
        self.queue = f"loja-{uuid.uuid4().hex[:10]}"
        self.connection = kombu.Connection(url, transport_options={"confirm_publish": True})
        self.channel: Any = self.connection.channel()
        self._made: list[str] = [self.queue]

    def declare(self, name: str, **options: Any) -> None:
        self.channel.queue_declare(name, durable=True, auto_delete=False, **options)
        self._made.append(name)

    def task(self, queue: str = "") -> dict[str, Any] | None:
        """The next task's keyword arguments of its success callback, where there is a task."""
        try:
            found = kombu.Queue(queue or self.queue, channel=self.channel).get(accept=["json"])
        except self.connection.channel_errors:
            self.channel = self.connection.channel()  # it is not there yet
            return None
        if found is None:
            return None
        found.ack()
        keywords: dict[str, Any] = found.payload[2]["callbacks"][0]["kwargs"]
        return keywords

    def report(self, exchange: str, body: Any, task: str = RETURNED, **options: Any) -> None:
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
        await made.is_heard()
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
    """A run whose task is reported on in the way that the options say."""
    run = await stage.submit({"destinos": [destination()], "timeout": 30})
    keywords = await until(celery.task, saying="the task")
    assert keywords is not None
    celery.report(replies(stage), [[{"soma": 5}], keywords, {}], **{"serializer": "json", **options})
    return await stage.ended(run)


# -- reports that cannot be read -------------------------------------------------------------------------------------


async def test_a_compressed_report_is_read(stage: Bridged, celery: CelerySide) -> None:
    found = await is_answered(stage, celery, compression="gzip")
    assert found["resultados"]["t"]["resultado"] == {"soma": 5}


@pytest.mark.parametrize(
    ("body", "options", "reason"),
    [
        (b"no gzip", {"headers": {"compression": "application/x-gzip"}, "content_type": JSON}, "decompressing"),
        (b"x", {"headers": {"compression": "application/x-unheard-of"}, "content_type": JSON}, "KeyError"),
        (b"- [5]\n- comando: {}\n- {}\n", {"content_type": YAML}, "cannot be read as application/x-yaml"),
        (b"\xff\xfe", {"content_type": JSON, "content_encoding": "utf-8"}, "cannot be read as application/json"),
    ],
    ids=["broken gzip", "unknown compression", "yaml", "not its encoding"],
)
async def test_an_unreadable_report_is_set_apart_and_the_next_one_read(
    stage: Bridged, celery: CelerySide, heard: Heard, body: bytes, options: dict[str, Any], reason: str
) -> None:
    celery.report(replies(stage), body, **{"content_encoding": "binary", **options})
    [letter] = await letters_of(stage)
    assert replies(stage) in letter.reason
    assert reason in letter.reason
    assert letter.body == body
    assert heard.reasons(DeadLettered) == [letter.reason]
    assert (await is_answered(stage, celery))["status"] == "concluida"
    await until(lambda: replies_of(stage)() == 0, saying="both reports to be acked")


async def test_a_report_that_breaks_the_reader_in_an_unforeseen_way_is_set_apart(
    stage: Bridged, celery: CelerySide, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:

    def break_once(body: Any, content_type: Any, task: Any) -> Any:
        if "poison" in str(body):
            raise ZeroDivisionError("unforeseen")
        return read_report(body, content_type, task)

    monkeypatch.setattr(replies_module, "read_report", break_once)
    celery.report(replies(stage), {"poison": 1}, serializer="json")
    [letter] = await letters_of(stage)
    assert "ZeroDivisionError: unforeseen" in letter.reason
    assert heard.reasons(DeadLettered) == [letter.reason]
    assert (await is_answered(stage, celery))["status"] == "concluida"


async def test_a_report_whose_answer_nobody_takes_rests_in_the_dead_letters(
    stage: Bridged, celery: CelerySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = stage.broker.publish

    async def refuse_answers(messages: Any) -> None:
        if any(b'"nowhere"' in message.body and message.reason is None for message in messages):
            raise BrokerError("no such place")
        await publish(messages)

    monkeypatch.setattr(stage.broker, "publish", refuse_answers)
    keywords = {"comando": {"correlation_id": "nowhere", "tipo_evento": "iniciar_execucao"}}
    celery.report(replies(stage), [[5], keywords, {}], serializer="json")
    [letter] = await letters_of(stage)
    assert "no such place" in letter.reason


@pytest.mark.parametrize(("value", "told"), [(5, b'"resultado":5'), ("x" * 9000, b"it is too large")])
async def test_an_answer_or_what_stands_in_for_it_goes_back_by_the_broker_that_brought_the_command(
    celery: CelerySide, url: str, monkeypatch: pytest.MonkeyPatch, value: object, told: bytes
) -> None:
    second = Named("segundo")
    both = FailoverBroker([Named("primeiro"), second])
    publish = both.publish

    async def refuse_large(messages: Sequence[Outgoing]) -> Sequence[str]:
        if any(len(message.body) > 5000 for message in messages):
            raise BrokerError("it is too large")
        return await publish(messages)

    monkeypatch.setattr(both, "publish", refuse_large)
    async with Bridged(url, celery.queue, broker=both, events=False) as stage:
        await stage.is_heard()
        ponte = {"tipo": "celery", "alvo": "loja.somar"}
        command = {**COMMAND, "ponte": ponte}
        queue = f"{stage.settings.broker.prefix}ponte-celery"
        await second.publish([Outgoing(queue, msgspec.json.encode(command | {"responder_em": "aqui"}))])
        keywords = await until(celery.task, saying="the task")
        celery.report(replies(stage), [[value], keywords, {}], serializer="json")
        [answer] = await asyncio.wait_for((await second.consume("aqui", prefetch=1)).take(1), 10)
        assert told in answer.body


async def test_a_dead_letter_that_is_refused_whole_is_cut(
    stage: Bridged, celery: CelerySide, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = stage.broker.publish

    async def refuse_large(messages: list[Outgoing]) -> None:
        if any(len(message.body) > replies_module.MOST_KEPT for message in messages):
            raise BrokerError("it is too large")
        await publish(messages)

    monkeypatch.setattr(stage.broker, "publish", refuse_large)
    celery.report(replies(stage), b"x" * 100_000, content_type=JSON, content_encoding="binary")
    [letter] = await letters_of(stage)
    assert letter.body == b"x" * replies_module.MOST_KEPT
    assert any("it is too large" in reason for reason in heard.reasons(LoopFailed))


async def test_a_trouble_of_the_listener_is_told(url: str, heard: Heard) -> None:
    async with Bridged("amqp://guest:s3cr3t@127.0.0.1:1//", "celery", telemetry=heard, events=False):
        await until(lambda: heard.reasons(LoopFailed), saying="the trouble to be told")
    assert "Connection refused" in heard.reasons(LoopFailed)[0]
    assert "s3cr3t" not in str(heard.records)


def test_each_trouble_of_a_list_of_brokers_is_told_once() -> None:
    told: list[str] = []
    listener = Listener("x", Address("amqp://a//;amqp://b//", "", "respostas"), lambda *_: None, told.append)
    for trouble in ("a is away", "b is away") * 3:
        listener._note(trouble)
    assert told == ["a is away", "b is away"]
    assert listener.trouble == "b is away"


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


# -- the queue of the reports ----------------------------------------------------------------------------------------


async def test_the_server_never_drops_a_report_that_came_often(stage: Bridged, celery: CelerySide) -> None:
    """RabbitMQ 4 has a limit of 20 where none is set."""
    with pytest.raises(PreconditionFailed, match=r"x-delivery-limit.*1000000000"):
        celery.declare(replies(stage), arguments={"x-queue-type": "quorum"})


@pytest.mark.parametrize(
    "arguments", [{"x-queue-type": "quorum"}, {"x-queue-type": "quorum", "x-delivery-limit": 5}, {}], ids=str
)
async def test_a_queue_of_replies_that_was_made_otherwise_is_used_as_it_is(
    celery: CelerySide, url: str, arguments: dict[str, Any]
) -> None:
    stage = Bridged(url, celery.queue, events=False)
    celery.declare(replies(stage), arguments=arguments)
    async with stage:
        assert (await is_answered(stage, celery))["status"] == "concluida"


def delete_exchange(celery: CelerySide, name: str) -> None:
    celery.channel.exchange_delete(name)


def delete_binding(celery: CelerySide, name: str) -> None:
    celery.channel.client.delete(f"_kombu.binding.{name}")


@pytest.mark.parametrize(("broker", "lose"), [("rabbitmq", delete_exchange), ("redis", delete_binding)])
async def test_a_broker_that_lost_the_way_to_the_replies_is_told_it_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, broker: str, lose: Any
) -> None:
    celery, bind, times = CelerySide(fleet.url(broker)), Address.bind_replies, []
    monkeypatch.setattr(replies_module, "BIND_EVERY", 0.0)
    monkeypatch.setattr(Address, "bind_replies", lambda *given: times.append(bind(*given)))
    async with Bridged(fleet.url(broker), celery.queue, events=False) as stage:
        await is_answered(stage, celery)  # all connections are there, and have told it once
        lose(celery, replies(stage))
        seen = len(times)  # the next may have begun before
        await until(lambda: len(times) > seen + 1, saying="the way to be told again")
        assert (await is_answered(stage, celery))["status"] == "concluida"
    celery.end()


async def test_an_exchange_of_somebodys_own_is_used_as_it_is_and_cuts_nobody_off(
    celery: CelerySide, url: str, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind, times = Address.bind_replies, []
    monkeypatch.setattr(replies_module, "BIND_EVERY", 0.0)
    monkeypatch.setattr(Address, "bind_replies", lambda *given: times.append(bind(*given)))
    stage = Bridged(url, celery.queue, events=False, telemetry=heard)
    name, other = replies(stage), {"alternate-exchange": "elsewhere"}
    celery.channel.exchange_declare(name, "direct", durable=True, auto_delete=False, arguments=other)
    celery.declare(name, arguments={"x-queue-type": "quorum"})
    async with stage:
        await until(lambda: len(times) > 1, saying="the way to be told again")
        assert (await is_answered(stage, celery))["status"] == "concluida"
    assert heard.reasons(LoopFailed) == []


def test_a_list_of_brokers_is_always_tried_from_its_first(fleet: Fleet) -> None:
    """Else whoever sends and whoever listens would come to different ones."""
    away, good = "redis://127.0.0.1:1/0", fleet.url("redis").removesuffix("/0")
    address = Address(f"{away};{away};{good}/1;{good}/2", "", "respostas")
    for _ in range(3):
        connection = address.connection()
        address.connect(connection)
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
    )  # to name one that the broker itself refuses
    if prepare is not None:
        prepare(celery, name)
    bad = [destination(f"ruim{number}", queue=name) for number in range(3)]
    run = await stage.submit({"destinos": [*bad, destination("bom")], "timeout": 30})
    keywords = await until(celery.task, saying="the task of the other queue")
    celery.report(replies(stage), [[5], keywords, {}], serializer="json")
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
    monkeypatch.setattr(core_bridge, "_MOST_NAME_BYTES", 400)  # as a plain publisher may do, who asks nobody
    destinations = [destination("bom"), destination("ruim", queue="é" * 200), destination("outro")]
    run = await stage.submit({"destinos": destinations, "timeout": 30})
    for _ in range(2):
        keywords = await until(celery.task, saying="a task of the other queue")
        celery.report(replies(stage), [[5], keywords, {}], serializer="json")
    found = await stage.ended(run)
    assert found["resultados"].keys() == {"bom", "outro"}
    assert "the task cannot be sent to Celery's queue éé" in found["falhas"]["ruim"]["motivo"]


async def test_what_was_sent_is_acked_though_the_next_command_cannot_be_set_apart(
    stage: Bridged, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [msgspec.json.encode(COMMAND | {"ponte": {"tipo": "celery", "alvo": "loja.somar"}}), b"no command"]
    handed_over: list[bytes] = []
    hand_over, set_apart = stage.bridge._handover._hand_over, MemoryConsumer.dead_letter

    async def note(batch: Any, delivery: Any) -> None:
        handed_over.append(delivery.body)
        await hand_over(batch, delivery)

    async def refuse_once(*given: Any) -> None:
        monkeypatch.setattr(MemoryConsumer, "dead_letter", set_apart)
        raise BrokerError("not now")

    monkeypatch.setattr(stage.bridge._handover, "_hand_over", note)
    monkeypatch.setattr(MemoryConsumer, "dead_letter", refuse_once)
    queue = f"{stage.settings.broker.prefix}ponte-celery"
    await stage.broker.publish([Outgoing(queue, body) for body in bodies])
    await letters_of(stage)
    assert handed_over == [*bodies, bodies[1]]


async def test_commands_whose_lease_is_lost_while_celery_is_away_are_not_sent_from_here(
    stage: Bridged, celery: CelerySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another bridge may have them by then. What is taken anew is this one's again."""
    handover, deliveries_before = stage.bridge._handover._hand_over, list[int]()

    async def celery_is_away_at_first(batch: Any, delivery: Any) -> None:
        deliveries_before.append(delivery.redeliveries)
        if len(deliveries_before) == 1:
            raise CeleryAway("not now")
        await handover(batch, delivery)

    async def lost(*given: Any) -> None:
        raise BrokerUnavailable("the connection broke")

    monkeypatch.setattr(stage.bridge._handover, "_hand_over", celery_is_away_at_first)
    monkeypatch.setattr(MemoryConsumer, "extend", lost)
    await stage.submit({"destinos": [destination()], "timeout": 30})
    await until(celery.task, saying="the task")
    assert deliveries_before == [0, 1]


async def test_a_redis_key_of_another_type_fails_its_step_and_holds_up_no_other(fleet: Fleet) -> None:
    celery = CelerySide(fleet.url("redis"))
    celery.channel.client.set("loja-torta", "no list")
    try:
        async with Bridged(fleet.url("redis"), celery.queue, events=False) as stage:
            run = await stage.submit(
                {"destinos": [destination("ruim", queue="loja-torta"), destination("bom")], "timeout": 30}
            )
            keywords = await until(celery.task, saying="the task of the other queue")
            celery.report(replies(stage), [[5], keywords, {}], serializer="json")
            found = await stage.ended(run)
            assert found["resultados"]["bom"]["resultado"] == 5
            assert "WRONGTYPE" in found["falhas"]["ruim"]["motivo"]
    finally:
        celery.channel.client.delete("loja-torta")
        celery.end()


async def test_a_task_that_the_broker_nacks_is_not_taken_for_sent(stage: Bridged, celery: CelerySide) -> None:
    celery.declare(celery.queue, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    kombu.Producer(celery.channel).publish("full", exchange="", routing_key=celery.queue, serializer="json")
    run = await stage.submit({"destinos": [destination()], "timeout": 60})
    await until(lambda: "MessageNacked" in str(stage.bridge.trouble), saying="the bridge to tell the nack")
    celery.channel.queue_purge(celery.queue)
    keywords = await until(celery.task, saying="the task, once there is room")
    celery.report(replies(stage), [[5], keywords, {}], serializer="json")
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
    connection = stage.bridge._handover._sender._connection
    assert connection is not None
    assert [number for number in connection.connection.channels if number] in ([], [1])


async def test_a_report_that_is_held_for_long_is_answered_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis' transport delivers it again and again meanwhile."""
    monkeypatch.setattr(connections, "_LEASE", 1)
    repeats: list[bool] = []
    is_held = replies_module._is_held
    monkeypatch.setattr(replies_module, "_is_held", lambda *given: repeats.append(is_held(*given)) or repeats[-1])
    celery = CelerySide(fleet.url("redis"))
    try:
        async with Bridged(fleet.url("redis"), celery.queue, events=False) as stage:
            run = await stage.submit({"destinos": [destination()], "timeout": 60})
            keywords = await until(celery.task, saying="the task")
            publish = stage.broker.publish
            monkeypatch.setattr(stage.broker, "publish", _away)
            celery.report(replies(stage), [[5], keywords, {}], serializer="json")
            await until(lambda: sum(repeats) >= 3, within=40, saying="it to come again some times")
            monkeypatch.setattr(stage.broker, "publish", publish)
            assert (await stage.ended(run))["status"] == "concluida"
            await until(lambda: replies_of(stage)() == 0, saying="the report to be acked")
            told = [entry.what.value for entry in await stage.operations.history(run)]
            assert "resposta_repetida" not in told
    finally:
        celery.end()


async def _away(_: object) -> str:
    raise BrokerUnavailable("not now")


async def test_a_task_that_finds_no_queue_is_not_taken_for_sent(stage: Bridged, celery: CelerySide) -> None:
    assert (await is_answered(stage, celery))["status"] == "concluida"  # the bridge knows the queue from now on
    celery.channel.queue_delete(celery.queue)
    assert (await is_answered(stage, celery))["status"] == "concluida"


# -- passwords -------------------------------------------------------------------------------------------------------

_ANY_TASK = Task("id", "celery", b"[]", {}, {})


def test_of_ever_new_queues_not_all_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(connections, "_MOST_KNOWN", 3)
    monkeypatch.setattr(connections, "_Fuse", contextlib.nullcontext)
    monkeypatch.setattr(connections, "ensure_queue", lambda _connection, name: asked.append(name))
    sender = TaskSender(Address("redis://127.0.0.1:1/0", "", "respostas"))
    for name in ("a", "a", "b", "c", "d", "d", "a"):
        sender._ensure_queue(None, name)
    assert asked == ["a", "b", "c", "d", "a"]


@pytest.mark.parametrize(
    "address",
    [
        "amqp://user:s3cr3t@127.0.0.1:1//",
        "amqp://user:s3cr3t@127.0.0.1:1//;amqp://user:s3cr3t@127.0.0.1:2//",
        "redis://:s3cr3t@127.0.0.1:1/0",
        "redis://user:s3cr3t@127.0.0.1:1/0",
    ],
)
def test_a_password_is_not_told_with_the_place_that_cannot_be_reached(address: str) -> None:
    with pytest.raises(CeleryAway, match=r"127\.0\.0\.1:") as told:
        TaskSender(Address(address, "", "respostas")).send(_ANY_TASK)
    assert "s3cr3t" not in str(told.value)


@pytest.mark.parametrize("address", ["amqp://user:s3cr3t@host:porta//", "amqp://user:s3/cr3t@h//", "no://u:s3cr3t@h"])
def test_a_password_is_not_told_with_an_address_that_cannot_be_one(address: str) -> None:
    with pytest.raises(InvalidSettings) as told:
        Address(address, "", "respostas")
    assert "cr3t" not in str(told.value)


async def test_a_password_that_is_refused_is_not_told(fleet: Fleet) -> None:
    address = fleet.url("rabbitmq").replace("guest:guest@", "guest:s3cr3t@")
    with pytest.raises(CeleryAway, match="ACCESS_REFUSED") as told:
        TaskSender(Address(address, "", "respostas")).send(_ANY_TASK)
    assert "s3cr3t" not in str(told.value)
