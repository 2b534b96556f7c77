"""The small parts of the bridge to BullMQ, without a server."""

import json
import re
from collections.abc import Sequence
from typing import cast

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import ResponseError

from oraculo.bridges.bullmq.job import decode_record, encode_record, job_id_of, record_of
from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.results import Results, decode_progress, is_unrecoverable, read_progress
from oraculo.bridges.bullmq.server import BullmqRedis, is_passing
from oraculo.brokers.memory import MemoryBroker
from oraculo.errors import BrokerError, InvalidSettings, QueueFull
from oraculo.ports.broker import Outgoing, Receipt
from oraculo.ports.clock import SystemClock, SystemEntropy
from oraculo.wire.answers import AnswerWriter
from oraculo.wire.message import Message, decode_message
from oraculo.wire.naming import QueueNames
from tests.receipts import publish_but


def command(**given: object) -> Message:
    fields = {
        "correlation_id": "c",
        "tipo_evento": "iniciar_execucao",
        "payload": {"n": 1},
        "timestamp": "2025-10-14T12:00:00Z",
        "tarefa": "t",
        "tentativa": 1,
        **given,
    }
    return decode_message(json.dumps({key: value for key, value in fields.items() if value is not None}).encode())


def test_a_repeat_of_a_command_has_the_same_job_and_no_other_command_has() -> None:
    first = job_id_of("p.", command(), b"body")
    assert job_id_of("p.", command(timestamp="2026-01-01T00:00:00Z"), b"another body") == first
    others = [
        job_id_of("p.", command(tentativa=2), b"body"),
        job_id_of("p.", command(tarefa="u"), b"body"),
        job_id_of("q.", command(), b"body"),
        job_id_of("p.", command(correlation_id="c.t", tarefa="1"), b"body"),
        job_id_of("p.", command(correlation_id="c", tarefa="t.1"), b"body"),
    ]
    assert len({first, *others}) == len(others) + 1


def test_the_body_identifies_a_command_that_names_no_task() -> None:
    plain = command(tarefa=None, tentativa=None)
    assert job_id_of("", plain, b"one") == job_id_of("", plain, b"one") != job_id_of("", plain, b"two")


@pytest.mark.parametrize("correlation_id", ["1", "a:b", "coração", "x" * 128])
def test_bullmq_takes_the_id(correlation_id: str) -> None:
    made = job_id_of("", command(correlation_id=correlation_id), b"")
    assert re.fullmatch(r"[A-Za-z0-9_.-]{20,110}", made)
    assert not made.isdecimal()


def test_a_record_keeps_what_an_answer_needs_and_no_payload() -> None:
    sent = command(responder_em="r", prazo="2026-01-01T00:00:00Z", traceparent="tp")
    record = decode_record(encode_record(record_of("fila", sent)).decode())
    kept = record.command
    assert (record.queue, kept.correlation_id, kept.tarefa, kept.tentativa) == ("fila", "c", "t", 1)
    assert (kept.responder_em, kept.prazo, kept.traceparent) == ("r", "2026-01-01T00:00:00Z", "tp")
    assert bytes(kept.payload) == b"{}"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (0, (0.0, "")),
        (140, (100.0, "")),
        (-3, (0.0, "")),
        (True, (None, "")),
        (None, (None, "")),
        ("quase", (None, "quase")),
        ("x" * 900, (None, "x" * 500)),
        ([1, 2], (None, "[1,2]")),
        ({"progress": 30}, (30.0, "")),
        ({"percent": "?", "value": 5, "stage": "corte"}, (5.0, "corte")),
        ({"message": "só texto"}, (None, "só texto")),
        ({"passo": 1}, (None, '{"passo":1}')),
    ],
)
def test_progress_may_be_anything(data: object, expected: tuple[float | None, str]) -> None:
    assert read_progress(data) == expected


@pytest.mark.parametrize(
    ("stacktrace", "expected"),
    [
        (None, False),
        ("[]", False),
        ("not json", False),
        ('["Error: UnrecoverableErro"]', False),
        ('["UnrecoverableError: nunca\\n at x"]', True),
        ('["UnrecoverableError: nunca", "Error: outra"]', False),
        ('["Error: because of\\nUnrecoverableError"]', False),
    ],
)
def test_only_the_last_attempt_counts_as_unrecoverable(stacktrace: str | None, expected: bool) -> None:
    assert is_unrecoverable(stacktrace) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (LostConnection("gone"), True),
        (TimeoutError(), True),
        (OSError(111, "refused"), True),
        (ResponseError("OOM command not allowed when used memory > 'maxmemory'"), True),
        (ResponseError("LOADING Redis is loading the dataset in memory"), True),
        (ResponseError("WRONGTYPE Operation against a key"), False),
        (ValueError("no number"), False),
    ],
)
def test_what_is_worth_another_try(error: Exception, expected: bool) -> None:
    assert is_passing(error) is expected


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", True),
        ("READONLY You can't write against a read only replica.", True),
        ("TRYAGAIN Multiple keys request during rehashing of slot", True),
        ("CLUSTERDOWN The cluster is down", True),
        ("MASTERDOWN Link with MASTER is down", True),
        ("MISCONF Redis is configured to save RDB snapshots", True),
        ("NOREPLICAS Not enough good replicas to write.", True),
        ("NOSCRIPT No matching script.", True),
        ("EXECABORT Transaction discarded because of: READONLY You can't write", True),
        ("ERR Error running script (call to f_a): @user_script:1: -OOM command not allowed", True),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
        ("NOPERM No permissions to access a key", False),
    ],
)
def test_what_redis_says_is_worth_another_try_in_a_pipeline_too(reply: str, expected: bool) -> None:
    """redis-py takes the code off the text where it has a type, and puts the command before it in a pipeline."""
    error = BaseParser.parse_error(reply)
    assert is_passing(error) is expected
    error.args = (f"Command # 1 (EXISTS bull:OOM LOADING :1) of pipeline caused error: {error.args}",)
    assert is_passing(error) is expected


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:6379", "must begin with redis://, rediss:// or unix://"),
        ("http://localhost", "must begin with"),
        ("redis://localhost:porta", "cannot be read; .* the port is a number"),
        ("redis://localhost?foo=1", "has a parameter that redis-py's connections do not take"),
        ("redis://localhost/loja", "has a path that is not a database's number, as redis://localhost:6379/2"),
        ("redis://localhost/1/2", "has a path that is not a database's number"),
        ("redis://localhost/-1", "has a path that is not a database's number"),
    ],
)
def test_a_url_that_is_none(url: str, says: str) -> None:
    with pytest.raises(InvalidSettings, match=f"ORACULO_BULLMQ_URL: {says}"):
        BullmqRedis(url)


@pytest.mark.parametrize(
    "url",
    ["redis://localhost", "redis://:p@[::1]:7000/", "rediss://h/3?socket_keepalive=1", "unix:///run/redis.sock?db=2"],
)
def test_a_url_that_is_one(url: str) -> None:
    assert BullmqRedis(url).trouble


def test_trouble_shows_no_password() -> None:
    assert BullmqRedis("redis://user:segredo@example.org:7000/1").trouble == "not connected to example.org:7000 yet"


def results_on(broker: MemoryBroker, clock: SystemClock) -> Results:
    """The writer of answers, which notes nothing in Redis."""
    names = QueueNames()
    return Results(broker, cast("Ledger", None), AnswerWriter(clock, names), names.answers, SystemEntropy())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("[" * 5000 + "]" * 5000, "nested deeper than 128 levels"),
        ("[" * 129 + "]" * 129, "nested deeper than 128 levels"),
        (r'{"legenda": "x\ud83d"}', "half a surrogate pair"),
    ],
)
def test_a_value_that_nobody_could_read_ends_its_task_and_breaks_nothing_else(value: str, reason: str) -> None:
    clock = SystemClock()
    results = results_on(MemoryBroker(clock=clock), clock)
    report = results.completed("j", record_of("fila", command()), value)
    answer = json.loads(bytes(decode_message(report.body).payload))
    assert answer["status"] == "erro"
    assert reason in answer["erros"][0]
    assert answer["repetir"] is False
    results.progressed("j", record_of("fila", command()), decode_progress(value))


async def test_while_one_answer_waits_for_a_full_queue_the_others_are_sent_once() -> None:
    class Full(MemoryBroker):
        refusals = 2

        async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
            receipts = await publish_but(super().publish, messages, self.fault_of)
            self.refusals -= any(receipt.error for receipt in receipts)
            return receipts

        def fault_of(self, message: Outgoing) -> BrokerError | None:
            return QueueFull("no room") if self.refusals and message.queue == "cheia" else None

    clock = SystemClock()
    broker = Full(clock=clock)
    await broker.start()
    results = results_on(broker, clock)
    queues = ["um", "cheia", "dois", "cheia"]
    jobs = [(f"job{place}", record_of("fila", command(responder_em=queue))) for place, queue in enumerate(queues)]
    await results.publish([results.completed(job_id, record, "1") for job_id, record in jobs])
    assert {state.queue: state.ready for state in await broker.queues()} == {"um": 1, "dois": 1, "cheia": 2}
