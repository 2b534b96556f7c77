"""The small parts of the bridge to BullMQ, without a server."""

import asyncio
import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from redis._parsers.base import BaseParser
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import ResponseError

from oraculo.bridges.bullmq.events import _decoded
from oraculo.bridges.bullmq.layout import BullmqLayout, is_hopeless
from oraculo.bridges.bullmq.ledger import Ledger
from oraculo.bridges.bullmq.portions import FIRST, MOST, READ_BYTES, TOLD_BYTES, Portion, by_the_megabyte
from oraculo.bridges.bullmq.records import decode_record, encode_record, job_id_of, record_of
from oraculo.bridges.bullmq.reports import Reporter, read_progress
from oraculo.bridges.bullmq.runs import Runs
from oraculo.bridges.bullmq.server import BullmqRedis, is_passing
from oraculo.brokers.memory import MemoryBroker
from oraculo.errors import InvalidSettings
from oraculo.ports.broker import NotTaken, Outgoing
from oraculo.ports.clock import SystemClock, SystemEntropy
from oraculo.ports.telemetry import LoopFailed
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.store_runs import create, make_run
from oraculo.wire.answers import AnswerWriter
from oraculo.wire.message import Message, decode_message
from oraculo.wire.naming import QueueNames
from tests.engine.broker_stage import Told
from tests.waiting import until


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


def test_a_command_that_names_no_task_is_told_by_its_body() -> None:
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
def test_only_the_last_attempt_says_that_another_is_of_no_use(stacktrace: str | None, expected: bool) -> None:
    assert is_hopeless(stacktrace) is expected


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
    """redis-py takes the code off where it has a type, and in a pipeline puts the command before."""
    error = BaseParser.parse_error(reply)
    assert is_passing(error) is expected
    error.args = (f"Command # 1 (EXISTS bull:OOM LOADING :1) of pipeline caused error: {error.args}",)
    assert is_passing(error) is expected


def test_parts_are_of_about_a_megabyte_and_made_one_by_one() -> None:
    made: list[int] = []

    def sizes() -> Iterator[int]:
        for size in (10, TOLD_BYTES, 3 * TOLD_BYTES, 1, 2):
            made.append(size)
            yield size

    parts = by_the_megabyte(sizes(), lambda size: size)
    assert next(parts) == [10, TOLD_BYTES]
    assert len(made) == 2
    assert list(parts) == [[3 * TOLD_BYTES], [1, 2]]


def test_a_portion_is_small_while_entries_are_large_and_grows_only_when_it_was_full() -> None:
    portion = Portion()
    portion.learn([{"v": "x"}] * (FIRST - 1))
    assert portion.count == FIRST
    for _ in range(10):
        portion.learn([{"v": "x"}] * portion.count)
    assert portion.count == MOST
    portion.learn([{"v": "x" * (READ_BYTES // 2)}] * 4)
    assert portion.count == 2
    portion.learn([{"v": "x" * READ_BYTES}] * 4, streams=2)
    assert portion.count == 1


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


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("[" * 5000 + "]" * 5000, "nested deeper than 128 levels"),
        ("[" * 129 + "]" * 129, "nested deeper than 128 levels"),
        (r'{"legenda": "x\ud83d"}', "half a surrogate pair"),
    ],
)
def test_a_value_that_nobody_could_read_ends_its_task_and_breaks_nothing_else(value: str, told: str) -> None:
    clock, names, unused = SystemClock(), QueueNames(), cast("Ledger", None)
    writer = AnswerWriter(clock, names)
    reporter = Reporter(MemoryBroker(clock=clock), unused, writer, names.answers, SystemEntropy())
    report = reporter.completed("j", record_of("fila", command()), value)
    answer = json.loads(bytes(decode_message(report.body).payload))
    assert answer["status"] == "erro"
    assert told in answer["erros"][0]
    assert answer["repetir"] is False
    reporter.progressed("j", record_of("fila", command()), _decoded(value))


async def test_of_answers_that_wait_for_a_full_queue_the_others_are_sent_once() -> None:
    class Full(MemoryBroker):
        refusals = 2

        async def publish(self, messages: Sequence[Outgoing]) -> Sequence[str]:
            vias = [None if self.refusals and message.queue == "cheia" else self.name for message in messages]
            await super().publish([message for message, via in zip(messages, vias, strict=True) if via])
            if None in vias:
                self.refusals -= 1
                raise NotTaken("no room", vias)
            return [self.name] * len(messages)

    clock, names = SystemClock(), QueueNames()
    broker = Full(clock=clock)
    await broker.start()
    nothing_is_noted = cast("Ledger", None)
    reporter = Reporter(broker, nothing_is_noted, AnswerWriter(clock, names), names.answers, SystemEntropy())
    queues = ["um", "cheia", "dois", "cheia"]
    jobs = [(f"job{place}", record_of("fila", command(responder_em=queue))) for place, queue in enumerate(queues)]
    await reporter.publish([reporter.completed(job_id, record, "1") for job_id, record in jobs])
    assert {state.queue: state.ready for state in await broker.queues()} == {"um": 1, "dois": 1, "cheia": 2}


async def test_queues_that_are_named_once_do_not_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oraculo.bridges.bullmq.layout.MOST_QUEUES", 10)
    layout = BullmqLayout(Redis(decode_responses=True), "bull", priority=True)  # which is never asked
    often = layout._queue("images-queue")
    for number in range(20):
        once = layout._queue(f"once-{number}")
        assert once.backend.scripts.commands is often.backend.scripts.commands  # which are most of what each takes
        assert layout._queue("images-queue") is often
    assert len(layout._queues) == 10


async def test_a_run_that_a_newer_version_wrote_is_told_of_and_the_others_are_followed(tmp_path: Path) -> None:
    clock, told, store = SystemClock(), Told(), SqliteStore(str(tmp_path / "oraculo.db"))
    await store.start()
    await create(store, *(make_run(name) for name in "abc"))
    with closing(sqlite3.connect(tmp_path / "oraculo.db")) as connection, connection:
        connection.execute("UPDATE runs SET status = 'novo' WHERE id = 'b'")
    runs = Runs(
        Redis(),  # which is never asked
        MemoryBroker(clock=clock),
        store,
        names=QueueNames(),
        keep=60,
        clock=clock,
        entropy=SystemEntropy(),
        telemetry=told,
    )
    followed = [runs.follow(name) for name in "abc"]
    watching = asyncio.create_task(runs.watch())
    failure = await until(lambda: told.of(LoopFailed), saying="a look")
    watching.cancel()
    assert "'novo' for the status of a run" in str(failure)
    assert [one.head is not None for one in followed] == [True, False, True]
    await store.close()
