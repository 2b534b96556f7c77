"""`oraculo doctor` sees what a user may not do, on each broker; the documented rights are all that is needed."""

import asyncio
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pika
import pytest
import redis

from oraculo.brokers.memory import MemoryBroker
from oraculo.cli import rehearsal
from oraculo.cli.rehearsal import Failed, rehearse
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Outgoing, Receipt, publish_all
from oraculo.ports.clock import SystemClock
from oraculo.wire.naming import QueueNames
from tests.brokers.nats_stage import BareNats, api, plain_client
from tests.brokers.rabbitmq_stage import plain_channel
from tests.brokers.redis_streams_stage import started
from tests.cli.test_doctor import doctor
from tests.servers.fleet import Fleet
from tests.servers.rabbitmq import RabbitMQ

DOC = (Path(__file__).parents[2] / "docs" / "reference" / "limits-brokers.md").read_text("utf-8")
PREFIX = "loja."


def broker_check(url: str, **env: str) -> dict[str, Any]:
    _, checks = doctor(ORACULO_BROKER_URL=url, ORACULO_BROKER_PREFIX=PREFIX, **env)
    found: dict[str, Any] = checks["broker"]
    return found


def documented(beginning: str) -> str:
    return next(line for line in DOC.splitlines() if line.startswith(beginning))


@pytest.mark.parametrize(("theirs", "why"), [({"x-message-ttl": 60_000}, "with x-message-ttl"), ({}, "without dead")])
def test_queues_that_were_made_so_that_they_lose_messages_are_a_warning(
    fleet: Fleet, theirs: dict[str, Any], why: str
) -> None:
    prefix = f"{uuid4().hex[:8]}."
    with plain_channel(fleet.url("rabbitmq")) as channel:
        channel.queue_declare(f"{prefix}resultados", durable=True, arguments=theirs)
    _, checks = doctor(ORACULO_BROKER_URL=fleet.url("rabbitmq"), ORACULO_BROKER_PREFIX=prefix)
    assert checks["broker"]["estado"] == "aviso"
    assert f"a queue may lose messages ({prefix}resultados): it was made {why}" in checks["broker"]["detalhe"]
    assert "docs/reference/limits-brokers.md" in checks["broker"]["o_que_fazer"]


# -- RabbitMQ -------------------------------------------------------------------------------------------------------


def rabbit_user(fleet: Fleet, *rights: str) -> str:
    """The URL of a new user who may configure, write and read so much."""
    server, user = cast("RabbitMQ", fleet.server("rabbitmq")), f"u{uuid4().hex[:8]}"
    patterns = ", ".join(f'<<"{right}">>' for right in (pattern.replace("\\", r"\\") for pattern in rights))
    server.evaluate(
        f'rabbit_auth_backend_internal:add_user(<<"{user}">>, <<"pw">>, <<"tests">>), '
        f'rabbit_auth_backend_internal:set_permissions(<<"{user}">>, <<"{server.vhost}">>, {patterns}, <<"tests">>).',
    )
    return server.url.replace("guest:guest", f"{user}:pw")


RABBIT_RIGHTS = shlex.split(documented("rabbitmqctl set_permissions"))[-3:]


def test_rabbitmq_needs_what_the_docs_list(fleet: Fleet) -> None:
    check = broker_check(rabbit_user(fleet, *RABBIT_RIGHTS))
    assert check["estado"] == "ok", check


def test_a_rabbitmq_user_who_may_not_read_is_named(fleet: Fleet) -> None:
    configure, write, _ = RABBIT_RIGHTS
    check = broker_check(rabbit_user(fleet, configure, write, "^nothing$"))
    assert check["estado"] == "erro"
    assert re.match(
        r"RabbitMQ \S+ at .*, but it cannot be used: to \w+.* on .*loja\..*ACCESS_REFUSED", check["detalhe"]
    )
    assert check["o_que_fazer"].endswith("docs/reference/limits-brokers.md lists")


def test_an_answer_queue_of_somebody_else_alone_is_named(fleet: Fleet) -> None:
    prefix, url = f"p{uuid4().hex[:8]}.", fleet.server("rabbitmq").url
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        connection.channel().queue_declare(f"{prefix}resultados", exclusive=True)
        _, checks = doctor(ORACULO_BROKER_URL=url, ORACULO_BROKER_PREFIX=prefix)
    assert checks["broker"]["estado"] == "erro"
    assert "RESOURCE_LOCKED" in checks["broker"]["detalhe"]


# -- Redis ----------------------------------------------------------------------------------------------------------

REDIS_RULES = [rule for rule in documented("ACL SETUSER").split() if rule[0] in "~+"]


@pytest.fixture
def plain(fleet: Fleet) -> Iterator[Any]:
    with redis.Redis.from_url(fleet.url("redis")) as client:
        yield client


@contextmanager
def redis_user(fleet: Fleet, plain: Any, *rules: str) -> Iterator[str]:
    user = f"u{uuid4().hex[:8]}"
    plain.execute_command("ACL", "SETUSER", user, "on", ">pw", *rules)
    try:
        yield fleet.url("redis").replace("redis://", f"redis://{user}:pw@")
    finally:
        plain.acl_deluser(user)


def test_redis_needs_what_the_docs_list_and_nothing_is_left_behind(fleet: Fleet, plain: Any) -> None:
    plain.script_flush()
    with redis_user(fleet, plain, *REDIS_RULES) as url:
        check = broker_check(url)
    assert check["estado"] == "ok", check
    assert plain.keys("*verificacao-doctor*") == []


async def test_redis_trims_with_what_the_docs_list(fleet: Fleet, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oraculo.brokers.redis_streams.trimming.TRIMMED_EVERY", 0.0)
    queue = f"{PREFIX}{uuid4().hex}"
    with redis_user(fleet, plain, *REDIS_RULES) as url:
        async with started(url) as broker:
            for _ in range(3):
                await publish_all(broker, [Outgoing(queue, b"x")])
                plain.xreadgroup(queue, "worker", {queue: ">"}, noack=True)
            assert plain.xlen(queue) == 1
            await broker.remove([queue])


@pytest.mark.parametrize("command", ["xadd", "xreadgroup", "xautoclaim", "xclaim", "time", "zadd", "evalsha", "xgroup"])
def test_a_redis_user_who_lacks_a_command_is_named(fleet: Fleet, plain: Any, command: str) -> None:
    with redis_user(fleet, plain, *REDIS_RULES, f"-{command}") as url:
        check = broker_check(url)
    assert check["estado"] == "erro"
    assert f"'{command}" in check["detalhe"]
    assert check["o_que_fazer"].endswith("docs/reference/limits-brokers.md lists")


def test_a_redis_user_who_may_not_ask_is_warned(fleet: Fleet, plain: Any) -> None:
    with redis_user(fleet, plain, *REDIS_RULES, "-info") as url:
        check = broker_check(url)
    assert check["estado"] == "aviso"
    assert "may not ask INFO" in check["detalhe"]


def test_what_redis_does_not_remove_is_a_warning(fleet: Fleet, plain: Any) -> None:
    with redis_user(fleet, plain, *REDIS_RULES, "-unlink") as url:
        check = broker_check(url)
    left = plain.keys("*verificacao-doctor*")
    plain.delete(*left)
    assert check["estado"] == "aviso"
    assert "an empty queue is left behind: to remove a queue on" in check["detalhe"]


# -- NATS -----------------------------------------------------------------------------------------------------------

NATS_RIGHTS = re.findall(r"^(authorization \{.*?^\} \} \] \})$", DOC, re.MULTILINE | re.DOTALL)[0]


@contextmanager
def nats_user(*without: str) -> Iterator[str]:
    rights = NATS_RIGHTS
    for subject in without:
        assert f'"{subject}"' in rights
        rights = rights.replace(f'"{subject}"', '"nothing"')
    with BareNats(rights) as server:
        yield server.url.replace("nats://", "nats://oraculo:senha@")


def test_nats_needs_what_the_docs_list() -> None:
    with nats_user() as url:
        check = broker_check(url)
    assert check["estado"] == "ok", check


def test_a_nats_that_takes_less_than_a_request_may_have_is_warned_of() -> None:
    with BareNats("max_payload: 1MB") as server:  # as it is unless it is set
        check = broker_check(server.url)
        fitting = broker_check(server.url, ORACULO_LIMITS_PAYLOAD_BYTES="1000000")
    assert check["estado"] == "aviso"
    assert "commands over its max_payload of 1048576 bytes are never sent" in check["detalhe"]
    assert check["o_que_fazer"] == "raise max_payload to 1052672, or lower ORACULO_LIMITS_PAYLOAD_BYTES"
    assert fitting["estado"] == "ok"


@pytest.mark.parametrize(
    ("missing", "step"),
    [
        ("$JS.API.STREAM.CREATE.*", "declare"),
        ("loja.>", "publish"),
        ("$JS.API.CONSUMER.MSG.NEXT.>", "take"),
        ("$JS.ACK.>", "ack"),
        ("$JS.API.STREAM.MSG.DELETE.*", "discard a dead letter"),
    ],
)
def test_a_nats_user_who_lacks_a_subject_is_named(missing: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_STEP_SECONDS", 3.0)
    with nats_user(missing) as url:
        check = broker_check(url)
    assert check["estado"] == "erro"
    assert f"but it cannot be used: to {step} on loja." in check["detalhe"]
    assert check["o_que_fazer"].endswith("docs/reference/limits-brokers.md lists")


@pytest.mark.parametrize(
    ("limit", "said", "remedy"),
    [
        ("max_streams: 1", "maximum number of streams reached", "raise max_streams of the account"),
        ("max_bytes_required: true", "to have max bytes set", "take max_bytes_required from the account"),
    ],
)
def test_a_nats_account_that_is_too_narrow_needs_no_rights(limit: str, said: str, remedy: str) -> None:
    account = f"accounts {{ A {{ jetstream {{ {limit} }}, users: [{{ user: a, password: a }}] }} }}"
    with BareNats(account) as server:
        check = broker_check(server.url.replace("nats://", "nats://a:a@"))
    assert check["estado"] == "erro"
    assert said in check["detalhe"]
    assert check["o_que_fazer"].startswith(remedy)
    assert "rights" not in check["o_que_fazer"]


async def make_stream_of_all(url: str) -> None:
    async with plain_client(url) as client:
        assert "error" not in await api(client, "STREAM.CREATE.tudo", {"name": "tudo", "subjects": [f"{PREFIX}>"]})


def test_a_nats_stream_that_covers_the_queues_is_not_a_matter_of_rights() -> None:
    with BareNats() as server:
        asyncio.run(make_stream_of_all(server.url))
        check = broker_check(server.url)
    assert "subjects overlap with an existing stream" in check["detalhe"]
    assert check["o_que_fazer"].startswith("take the subject from the other stream, or set ORACULO_PREFIX")


def test_a_key_that_is_no_queue_is_to_be_mended_before_rights_are_given(fleet: Fleet, plain: Any) -> None:
    plain.set(f"{PREFIX}resultados", "of others")
    try:
        check = broker_check(fleet.url("redis"))
    finally:
        plain.delete(f"{PREFIX}resultados")
    assert "that is not a stream" in check["detalhe"]
    assert check["o_que_fazer"].startswith("mend what it says, or give")


# -- the rehearsal itself ---------------------------------------------------------------------------------------------


async def failure_of(broker: MemoryBroker) -> Failed:
    with pytest.raises(Failed) as caught:
        await rehearse(broker, QueueNames(PREFIX), 20)
    return caught.value


class Secretive(MemoryBroker):
    async def dead_letters(self, *_: object, **__: object) -> list[Any]:
        raise BrokerError("not for you")


async def test_a_queue_that_could_not_be_used_is_removed() -> None:
    broker = Secretive(SystemClock())
    await broker.start()
    failed = await failure_of(broker)
    assert (failed.step, str(failed.error)) == ("dead-letter", "not for you")
    assert {state.queue for state in await broker.queues()} == {"loja.orquestrador", "loja.resultados"}


class Slow(MemoryBroker):
    async def remove(self, queues: Sequence[str]) -> None:
        raise BrokerUnavailable("did not answer in 5 s")


async def test_a_removal_that_is_slow_is_nothing_grave() -> None:
    broker = Slow(SystemClock())
    await broker.start()
    assert not (await failure_of(broker)).is_grave


class Deaf(MemoryBroker):
    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        return [Receipt(self.name) for _ in messages]


async def test_a_broker_that_delivers_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_STEP_SECONDS", 0.05)
    broker = Deaf(SystemClock())
    await broker.start()
    failed = await failure_of(broker)
    assert failed.step == "take"
    assert "not delivered" in str(failed)
    assert not isinstance(failed.error, BrokerUnavailable)


def test_a_delivery_limit_of_one_leaves_no_room_for_a_retry() -> None:
    _, checks = doctor(ORACULO_BROKER_DELIVERY_LIMIT="1")
    assert checks["broker"]["estado"] == "ok"
