"""What a handler of the SDK raised is to be seen in the run's history: where it was raised, from the handler on."""

import msgspec
import pytest

from oraculo.settings import RunSettings, Settings, WorkerSettings
from oraculo.testing.harness import Harness
from oraculo.wire.tracebacks import split_traceback
from oraculo.worker import App

app = App("loja")


@app.queue("executador_x")
async def collect(_payload: dict[str, object]) -> None:
    charge()


@app.queue("executador_y")
def collect_in_a_thread(_payload: dict[str, object]) -> None:
    charge()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@app.queue("executador_z")
def fail_without_a_text(_payload: dict[str, object]) -> None:
    raise Unspeakable


def charge() -> None:
    raise ValueError("não há saldo")


QUICK = RunSettings(backoff=0.01, max_attempts=2)


async def traces(oraculo: Harness, run_id: str) -> list[str]:
    entries = await oraculo.operations.history(run_id)
    return [trace for entry in entries if (trace := split_traceback(entry.detail)[1]) is not None]


@pytest.mark.parametrize("queue", ["executador_x", "executador_y"])
async def test_each_failed_attempt_keeps_its_own(queue: str) -> None:
    async with Harness(app, settings=Settings(runs=QUICK)) as oraculo:
        aggregate = await oraculo.run({"destinos": [queue], "responder_em": "minhas_respostas"})
        assert aggregate["falhas"][queue]["motivo"] == "ValueError: não há saldo"
        found = await traces(oraculo, aggregate["correlation_id"])
        consumer = await oraculo.broker.consume("minhas_respostas", prefetch=1)
        [delivered] = await consumer.take(1)
    assert len(found) == 2
    first, second, *_ = found[0].splitlines()
    assert first == "Traceback (most recent call last):"
    assert "test_tracebacks.py" in second
    assert ", in collect" in second
    assert found[0].endswith("ValueError: não há saldo\n")
    assert b"Traceback" not in delivered.body
    assert b"Traceback" not in msgspec.json.encode(aggregate)


async def test_an_error_without_a_text_has_one_too() -> None:
    async with Harness(app, settings=Settings(runs=QUICK)) as oraculo:
        aggregate = await oraculo.run({"destinos": ["executador_z"]})
        assert ", in fail_without_a_text" in (await traces(oraculo, aggregate["correlation_id"]))[0]


async def test_with_the_setting_off_none_is_sent_nor_kept() -> None:
    off = Settings(runs=QUICK, worker=WorkerSettings(tracebacks=False))
    async with Harness(app, settings=off) as oraculo:
        aggregate = await oraculo.run({"destinos": ["executador_x"]})
        assert await traces(oraculo, aggregate["correlation_id"]) == []
        run_id = await oraculo.submit({"destinos": ["executador_que_outros_servem"]})
        consumer = await oraculo.broker.consume("executador_que_outros_servem", prefetch=1)
        await consumer.take(1)
        payload = {"status": "erro", "repetir": False, "rastreamento": "of a worker that knows nothing of the setting"}
        message = {"correlation_id": run_id, "tipo_evento": "resultado_execucao", "payload": payload}
        await oraculo.publish("resultados", message | {"timestamp": "2026-01-01T00:00:00Z"})
        assert (await oraculo.ended(run_id))["status"] == "erro"
        assert await traces(oraculo, run_id) == []
