"""Asking for runs over the broker."""

import asyncio
from typing import Any

import msgspec
import pytest

from oraculo.errors import BrokerUnavailable, Conflict, InvalidInput, InvalidRequest, OraculoError
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.wire.message import Message, encode_message
from oraculo.worker import Client

from .stage import NOW, FixedClock, Stage

REQUEST = {"destinos": ["escavador_youtube"], "payload": {"x": 1}}


class Numbers:
    def __init__(self) -> None:
        self.given = 0

    def new_id(self) -> str:
        self.given += 1
        return f"id-{self.given}"

    def jitter(self) -> float:
        return 0.5


def ended(run_id: str, aggregate: object, event: str = "orquestracao_concluida") -> bytes:
    payload = msgspec.Raw(msgspec.json.encode(aggregate))
    return encode_message(
        Message(correlation_id=run_id, tipo_evento=event, payload=payload, timestamp="2025-10-14T12:00:00Z")
    )


async def request_of(stage: Stage, queue: str = "orquestrador") -> tuple[Message, dict[str, Any]]:
    message = await stage.answer(queue)
    return message, msgspec.json.decode(message.payload)


async def test_submit_puts_the_request_on_orquestrador(stage: Stage) -> None:
    async with Client(stage.broker, clock=FixedClock(NOW), entropy=Numbers()) as client:
        run_id = await client.submit(REQUEST)
    message, body = await request_of(stage)
    assert (message.tipo_evento, message.correlation_id) == ("iniciar_orquestracao", run_id)
    assert message.timestamp == "2025-10-09T08:53:20.000Z"
    assert body == REQUEST | {"correlation_id": run_id}


@pytest.mark.parametrize(
    ("request_id", "argument", "expected"),
    [(None, "mine", "mine"), ("theirs", None, "theirs"), ("theirs", "mine", "mine")],
)
async def test_the_caller_may_name_the_run(
    stage: Stage, request_id: str | None, argument: str | None, expected: str
) -> None:
    request = REQUEST | ({"correlation_id": request_id} if request_id else {})
    async with Client(stage.broker) as client:
        assert await client.submit(request, correlation_id=argument) == expected
    message, body = await request_of(stage)
    assert message.correlation_id == body["correlation_id"] == expected


async def test_the_prefix_is_put_before_the_queue(stage: Stage) -> None:
    async with Client(stage.broker, prefix="lab.") as client:
        await client.submit(REQUEST)
    await stage.answer("lab.orquestrador")


async def test_a_request_that_could_only_be_refused_is_refused_here(stage: Stage) -> None:
    async with Client(stage.broker) as client:
        with pytest.raises(InvalidRequest, match="destino"):
            await client.submit({"destino": ["x"]})
        with pytest.raises(InvalidInput):
            await client.run({"pipeline": "x", "timeout": -1}, timeout=1)
    assert stage.broker.batches == []


async def test_a_broker_that_is_away_is_told_to_the_caller(stage: Stage) -> None:
    stage.broker.fail("publish", BrokerUnavailable("away"))
    async with Client(stage.broker) as client:
        with pytest.raises(BrokerUnavailable):
            await client.submit(REQUEST)


async def test_run_returns_the_aggregate(stage: Stage) -> None:
    async with Client(stage.broker, entropy=Numbers()) as client:
        running = asyncio.create_task(client.run(REQUEST, timeout=5))
        message, body = await request_of(stage)
        assert body["responder_em"] == "respostas.id-1"
        await stage.send_raw(body["responder_em"], ended("another run", {"status": "erro"}))
        await stage.send_raw(body["responder_em"], ended(message.correlation_id, {"x": 1}, event="progresso"))
        await stage.send_raw(body["responder_em"], ended(message.correlation_id, {"status": "parcial", "versao": 1}))
        await stage.send_raw(body["responder_em"], ended(message.correlation_id, {"status": "ok", "versao": 2}))
        assert await running == {"status": "parcial", "versao": 1}
    assert await stage.left(body["responder_em"]) == (0, 0, 0)
    assert len(stage.broker.consumed) == 1  # nothing of this broke the listening


async def test_many_runs_share_one_consumer_and_each_gets_its_own(stage: Stage) -> None:
    async with Client(stage.broker) as client:
        calls = [asyncio.create_task(client.run(REQUEST, timeout=5, correlation_id=f"r{n}")) for n in range(20)]
        requests = [await request_of(stage) for _ in calls]
        for message, body in reversed(requests):
            await stage.send_raw(body["responder_em"], ended(message.correlation_id, {"run": message.correlation_id}))
        assert await asyncio.gather(*calls) == [{"run": f"r{n}"} for n in range(20)]
    assert len(stage.broker.consumed) == 1


async def test_a_timeout_names_the_run_and_where_a_refusal_would_be(stage: Stage) -> None:
    async with Client(stage.broker) as client:
        with pytest.raises(TimeoutError, match=r"^run slow: no answer in 0.*`oraculo dlq list orquestrador`") as caught:
            await client.run(REQUEST, timeout=0.01, correlation_id="slow")
        assert "refused" in str(caught.value)
        _, body = await request_of(stage)
        await stage.send_raw(body["responder_em"], ended("slow", {}))  # late: passed over
        again = asyncio.create_task(client.run(REQUEST, timeout=5, correlation_id="next"))
        await request_of(stage)
        await stage.send_raw(body["responder_em"], ended("next", {"status": "concluida"}))
        assert (await again)["status"] == "concluida"


async def test_run_sets_the_reply_queue_itself(stage: Stage) -> None:
    async with Client(stage.broker) as client:
        with pytest.raises(InvalidRequest, match="responder_em"):
            await client.run(REQUEST | {"responder_em": "x"}, timeout=1)


async def test_one_run_is_awaited_once(stage: Stage) -> None:
    async with Client(stage.broker) as client:
        first = asyncio.create_task(client.run(REQUEST, timeout=5, correlation_id="r"))
        await request_of(stage)
        with pytest.raises(Conflict, match="r is awaited"):
            await client.run(REQUEST, timeout=5, correlation_id="r")
        first.cancel()


async def test_a_reply_queue_of_ones_own(stage: Stage) -> None:
    async with Client(stage.broker, prefix="lab.", reply_queue="respostas.api-1") as client:
        with pytest.raises(TimeoutError, match=r"in lab\.orquestrador\.dlq \("):
            await client.run(REQUEST, timeout=0.01, correlation_id="q")
        await request_of(stage, "lab.orquestrador")
        running = asyncio.create_task(client.run(REQUEST, timeout=5, correlation_id="r"))
        _, body = await request_of(stage, "lab.orquestrador")
        await stage.send_raw("lab.respostas.api-1", ended("r", {"a": 1}))
        assert await running == {"a": 1}
    assert body["responder_em"] == "respostas.api-1"  # in a request names are logical: the engine puts the prefix


async def test_garbage_on_the_reply_queue_is_dead_lettered(stage: Stage) -> None:
    async with Client(stage.broker, reply_queue="replies") as client:
        running = asyncio.create_task(client.run(REQUEST, timeout=5, correlation_id="r"))
        await request_of(stage)
        await stage.send_raw("replies", b"garbage")
        await stage.send_raw("replies", ended("r", {}))
        assert await running == {}
    assert await stage.left("replies") == (0, 0, 1)


@pytest.mark.parametrize("number", [b"1e999", b"9" * 5000])
async def test_an_aggregate_that_python_cannot_read_fails_its_run_alone(stage: Stage, number: bytes) -> None:
    """As a worker of another language may write it."""
    async with Client(stage.broker, reply_queue="replies") as client:
        far, near = (
            asyncio.create_task(client.run(REQUEST, timeout=5, correlation_id=name)) for name in ("far", "near")
        )
        for _ in range(2):
            await request_of(stage)
        await stage.send_raw("replies", ended("far", {"resultados": {"a": {"n": "N"}}}).replace(b'"N"', number))
        with pytest.raises(
            OraculoError, match=r"^run far ended: payload: the aggregate cannot be read here: .*ange.*`or"
        ):
            await far
        await stage.send_raw("replies", ended("near", {"status": "concluida"}))
        assert await near == {"status": "concluida"}
    assert await stage.left("replies") == (0, 0, 1)
    assert "the aggregate cannot be read here" in (await stage.reasons("replies"))[0]
    assert len(stage.broker.consumed) == 1, "nothing of this broke the listening"


async def test_a_lost_consumer_is_made_again(stage: Stage) -> None:
    stage.broker.fail("take", BrokerUnavailable("away"))
    async with Client(stage.broker, reply_queue="replies") as client:
        running = asyncio.create_task(client.run(REQUEST, timeout=5, correlation_id="r"))
        await request_of(stage)
        await stage.send_raw("replies", ended("r", {}))
        assert await running == {}
    assert len(stage.broker.consumed) == 2


async def test_closing_ends_the_waiting_and_the_client_can_be_used_again(stage: Stage) -> None:
    client = Client(stage.broker, reply_queue="replies")
    running = asyncio.create_task(client.run(REQUEST, timeout=5, correlation_id="r"))
    await request_of(stage)
    await client.close()
    await client.close()
    with pytest.raises(OraculoError, match="closed while it waited for run r"):
        await running
    again = asyncio.create_task(client.run(REQUEST, timeout=5, correlation_id="s"))
    await request_of(stage)
    await publish_all(stage.broker, [Outgoing("replies", ended("s", {}))])
    assert await again == {}
    await client.close()
