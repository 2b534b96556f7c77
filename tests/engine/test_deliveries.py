"""The aggregate reaches its webhook and its reply queue: signed, tried again, given up in the open."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

import pytest
from standardwebhooks import Webhook

from oraculo.brokers.memory import MemoryBroker
from oraculo.core.machine import delivery as core_delivery
from oraculo.core.webhook_rules import LOOPBACK
from oraculo.engine.deliver.webhooks import NotPosted
from oraculo.errors import BrokerError
from oraculo.ports.broker import Outgoing, Receipt, publish_all
from oraculo.ports.clock import SystemClock, SystemEntropy
from oraculo.ports.telemetry import DeliveryAttempted
from oraculo.settings import EngineSettings, Settings, WebhookSettings
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.harness import Harness
from oraculo.wire.naming import LONGEST_REASON
from tests.engine.broker_stage import Durable, Told
from tests.engine.workers import Journal, recording_app
from tests.servers.listener import listening
from tests.waiting import until

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
QUICK = Settings(
    webhook=WebhookSettings(secret=SECRET, allow=LOOPBACK, backoff=0.01, max_attempts=3, timeout=2),
    engine=EngineSettings(poll=0.02, note_linger=0.005),
)
CUT_OFF = EngineSettings(poll=0.02, note_linger=0.005, stop_grace=0.2)  # where a stop would wait for a broker in vain


@dataclass
class Receiver:
    """A real HTTP server on loopback: it answers with the statuses it was given, then with 200."""

    statuses: list[int] = field(default_factory=list)
    received: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head if line)}
        body = await reader.readexactly(int(headers["content-length"]))
        self.received.append((headers, body))
        status = self.statuses.pop(0) if self.statuses else 200
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()


@asynccontextmanager
async def receiving(*statuses: int) -> AsyncIterator[Receiver]:
    receiver = Receiver(list(statuses))
    async with listening(receiver.serve) as port:
        receiver.url = f"http://127.0.0.1:{port}/gancho"
        yield receiver


async def delivery_state(oraculo: Harness, run_id: str) -> tuple[str, int]:
    (delivery,) = (await oraculo.operations.run(run_id)).head.deliveries
    return delivery.status, delivery.attempts


async def test_a_webhook_is_signed_and_carries_the_aggregate() -> None:
    async with receiving() as receiver, Harness(recording_app(Journal(), ("escavador_a",)), settings=QUICK) as oraculo:
        aggregate = await oraculo.run({"destinos": ["escavador_a"], "webhook": receiver.url})
        await until(lambda: receiver.received)
        ((headers, body),) = receiver.received
        assert Webhook(SECRET).verify(body, headers) == aggregate
        assert headers["webhook-id"] == f"{aggregate['correlation_id']}.1"

        async def noted() -> bool:
            return await delivery_state(oraculo, aggregate["correlation_id"]) == ("entregue", 1)

        await until(noted)


async def test_what_lets_one_in_at_a_webhook_is_used_and_not_shown() -> None:
    async with receiving() as receiver, Harness(recording_app(Journal(), ("escavador_a",)), settings=QUICK) as oraculo:
        webhook = receiver.url.replace("://", "://ana:s3cret@") + "?token=t"
        run_id = await oraculo.submit({"destinos": ["escavador_a"], "webhook": webhook})
        await until(lambda: receiver.received)
        ((headers, _),) = receiver.received
        assert headers["authorization"] == f"Basic {b64encode(b'ana:s3cret').decode()}"
        view = await oraculo.operations.view(await oraculo.operations.run(run_id))
        assert view["entregas"][0]["destino"] == receiver.url.replace("://", "://ana:***@") + "?***"


@pytest.mark.parametrize(
    ("run_id", "sent"),
    [
        (" a  b ", "%20a%20%20b%20.1"),
        ("ação 漢😀", "a%C3%A7%C3%A3o%20%E6%BC%A2%F0%9F%98%80.1"),
        ("100%", "100%25.1"),
        ("\t\x7f\nx", "%09%7F%0Ax.1"),  # by message: its envelope may have any text
        ('a:b,c"d\\e/f?g#h', 'a:b,c"d\\e/f?g#h.1'),
    ],
)
async def test_every_id_that_a_run_may_have_is_sent_in_a_header_and_signed_so(run_id: str, sent: str) -> None:
    async with receiving() as receiver, Harness(recording_app(Journal(), ("escavador_a",)), settings=QUICK) as oraculo:
        payload = {"destinos": ["escavador_a"], "webhook": receiver.url}
        message = {"correlation_id": run_id, "tipo_evento": "iniciar_orquestracao", "payload": payload}
        body = json.dumps(message | {"timestamp": "2025-10-14T12:00:00Z"}).encode()
        await publish_all(oraculo.broker, [Outgoing("orquestrador", body)])
        await until(lambda: receiver.received)
        ((headers, aggregate),) = receiver.received
        assert headers["webhook-id"] == sent
        assert unquote(sent) == f"{run_id}.1"
        assert Webhook(SECRET).verify(aggregate, headers)["correlation_id"] == run_id


async def test_a_webhook_is_tried_again_under_the_same_id() -> None:
    async with receiving(500, 503) as receiver, Harness(settings=QUICK) as oraculo:
        run = await oraculo.run({"destinos": ["escavador_a"], "timeout": 0.05, "webhook": receiver.url})
        await until(lambda: len(receiver.received) == 3)
        assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 1

        async def noted() -> bool:
            return await delivery_state(oraculo, run["correlation_id"]) == ("entregue", 3)

        await until(noted)


async def test_a_webhook_is_given_up_after_its_limit_and_shown_as_undelivered() -> None:
    async with receiving(*[500] * 10) as receiver, Harness(settings=QUICK) as oraculo:
        run = await oraculo.run({"destinos": ["escavador_a"], "timeout": 0.05, "webhook": receiver.url})

        async def given_up() -> bool:
            return (await delivery_state(oraculo, run["correlation_id"]))[0] == "nao_entregue"

        await until(given_up)
        assert len(receiver.received) == 3
        sentence = await oraculo.operations.explain(run["correlation_id"])
        assert "given up after 3 attempts (answered 500; a 2xx is awaited)" in sentence
        told = [entry.what for entry in await oraculo.operations.history(run["correlation_id"])]
        assert told[-3:] == ["entrega_falhou", "entrega_falhou", "entrega_abandonada"]


async def test_a_webhook_that_cannot_be_reached_is_given_up_too() -> None:
    async with receiving() as receiver:
        url = receiver.url
    async with Harness(settings=QUICK) as oraculo:
        run = await oraculo.run({"destinos": ["escavador_a"], "timeout": 0.05, "webhook": url})

        async def given_up() -> bool:
            return (await delivery_state(oraculo, run["correlation_id"]))[0] == "nao_entregue"

        await until(given_up)


async def test_the_reply_queue_gets_the_aggregate_as_a_message() -> None:
    async with Harness(recording_app(Journal(), ("escavador_a",)), settings=QUICK) as oraculo:
        aggregate = await oraculo.run({"destinos": ["escavador_a"], "responder_em": "minhas-respostas"})
        consumer = await oraculo.broker.consume("minhas-respostas", prefetch=1)
        (delivery,) = await consumer.take(1)
        message = json.loads(delivery.body)
        assert message["tipo_evento"] == "orquestracao_concluida"
        assert message["correlation_id"] == aggregate["correlation_id"]
        assert message["payload"] == aggregate
        await consumer.ack([delivery])


async def test_a_reply_comes_soon_after_its_broker_is_back_however_long_that_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_delivery, "DELIVERY_LEASE", 0.05)
    broker, told = Durable("rabbitmq"), Told()
    async with Harness(settings=QUICK, broker=broker, telemetry=told) as oraculo:
        await broker.leave()
        request = {"destinos": ["escavador_a"], "timeout": 0.05, "responder_em": "minhas-respostas"}
        run_id = await oraculo.submit(request)
        await until(lambda: len(told.of(DeliveryAttempted)) > 15, saying="many attempts")  # 0.01 s, doubled 15 times
        assert await delivery_state(oraculo, run_id) == ("pendente", 1)
        assert "is not delivered yet (pulled out), and is tried again" in await oraculo.operations.explain(run_id)
        broker.come_back()
        await until(lambda: broker.queues(["minhas-respostas"]), saying="the reply")

        async def noted() -> bool:
            return await delivery_state(oraculo, run_id) == ("entregue", 2)

        await until(noted)


class Refusing(MemoryBroker):
    """Has no queue of replies, and never will."""

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if any(message.is_reply for message in messages):
            raise BrokerError("there can be no such queue")
        return await super().publish(messages)


async def test_a_reply_that_is_refused_again_and_again_is_given_up() -> None:
    """Else its run would be kept for ever, and its history grow with every attempt."""
    async with Harness(settings=QUICK, broker=Refusing(SystemClock())) as oraculo:
        run_id = await oraculo.submit({"destinos": ["escavador_a"], "responder_em": "respostas", "timeout": 0.1})
        await oraculo.ended(run_id)

        async def is_given_up() -> bool:
            return "given up after 3 attempts (there can be no such queue)" in await oraculo.operations.explain(run_id)

        await until(is_given_up)


async def test_a_reply_that_waits_for_its_broker_does_not_hurry_the_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_delivery, "DELIVERY_LEASE", 0.05)
    monkeypatch.setattr(SystemEntropy, "jitter", lambda self: 0.9)
    settings = Settings(webhook=WebhookSettings(backoff=600, max_backoff=600, allow=LOOPBACK), engine=CUT_OFF)
    broker, told = Durable("rabbitmq"), Told()
    async with receiving(*[500] * 9) as receiver, Harness(settings=settings, broker=broker, telemetry=told) as oraculo:
        await broker.leave()
        request = {"destinos": ["escavador_a"], "timeout": 0.05, "webhook": receiver.url, "responder_em": "respostas"}
        await oraculo.submit(request)
        await until(lambda: len(told.of(DeliveryAttempted)) > 8, saying="many attempts")
    assert len(receiver.received) == 1


async def test_replies_to_a_broker_that_is_frozen_hold_up_no_webhook(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(webhook=WebhookSettings(concurrency=1, allow=LOOPBACK), engine=CUT_OFF)
    broker = Durable("rabbitmq")
    async with receiving() as receiver, Harness(settings=settings, broker=broker) as oraculo:

        async def publish(messages: Sequence[Outgoing]) -> Sequence[Receipt]:
            await asyncio.Event().wait()
            raise AssertionError("it never thaws")

        monkeypatch.setattr(broker, "publish", publish)
        await oraculo.submit({"destinos": ["escavador_a"], "timeout": 0.05, "responder_em": "respostas"})
        await until(lambda: oraculo.engine.parts.deliveries._under_way, saying="the reply to be on its way")
        await oraculo.submit({"destinos": ["escavador_a"], "timeout": 0.05, "webhook": receiver.url})
        await until(lambda: receiver.received, saying="the webhook")


async def test_a_delivery_cut_off_by_a_stop_is_made_after_the_restart(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = str(tmp_path / "o.db")
    hangs = asyncio.Event()

    async def never(url: str, body: bytes, headers: dict[str, str]) -> int:
        hangs.set()
        await asyncio.Event().wait()
        return 200

    brief = Settings(engine=EngineSettings(poll=0.02, stop_grace=0.05))
    async with Harness(settings=brief, store=SqliteStore(path), post=never) as before:
        run = await before.run({"destinos": ["escavador_a"], "timeout": 0.05, "webhook": "http://r.example/"})
        await hangs.wait()

    class Later:
        def now(self) -> float:
            import time

            return time.time() + core_delivery.DELIVERY_LEASE + 1

    async with receiving() as receiver:

        async def post(url: str, body: bytes, headers: dict[str, str]) -> int:
            receiver.received.append((headers, body))
            return 200

        async with Harness(settings=QUICK, store=SqliteStore(path), clock=Later(), post=post) as after:
            await until(lambda: receiver.received)
            assert json.loads(receiver.received[0][1]) == run

            async def noted() -> bool:
                return (await delivery_state(after, run["correlation_id"]))[0] == "entregue"

            await until(noted)


async def test_what_a_receiver_said_is_kept_only_as_far_as_a_reason_goes() -> None:
    async def post(url: str, body: bytes, headers: dict[str, str]) -> int:
        raise NotPosted("illegal status line: " + "x" * 90_000)

    async with Harness(settings=QUICK, post=post) as oraculo:
        run = await oraculo.run({"destinos": ["escavador_a"], "timeout": 0.05, "webhook": "http://r.example/"})

        async def failure() -> str | None:
            return (await oraculo.operations.run(run["correlation_id"])).head.deliveries[0].error

        assert len(await until(failure)) == LONGEST_REASON
