"""What is no command rests in the dead letters, with the reason, and hurts nothing else."""

import asyncio
from typing import Any

import pytest

from oraculo.worker import App

from .stage import Stage, command


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"not json", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[]", "expected `object`, got `array`"),
        (b"[" * 200_000, "nested deeper"),
        (command([1]), "payload: expected `object`"),
        (command(timestamp="yesterday"), "timestamp: must be ISO 8601"),
        (command(prazo="soon"), "prazo: must be ISO 8601"),
        (command(correlation_id=""), "correlation_id"),
        (command(tipo_evento="resultado_coleta"), "tipo_evento: 'resultado_coleta' is not a command"),
        (command(tipo_evento="iniciar_orquestracao"), "is not a command"),
    ],
)
async def test_garbage_is_dead_lettered_with_its_reason(stage: Stage, body: bytes, reason: str) -> None:
    app, runs = App("a"), []
    app.queue("q")(lambda payload: runs.append(1))
    async with stage.worker(app):
        await stage.send_raw("q", body)
        async with asyncio.timeout(5):
            assert reason in await stage.broker.buried.get()
    assert reason in (await stage.reasons("q"))[0]
    assert await stage.left("q") == (0, 0, 1)
    assert runs == []


async def test_garbage_among_commands_does_not_stop_them(stage: Stage) -> None:
    app = App("a")

    @app.queue("q")
    async def work(payload: dict[str, Any]) -> int:
        return int(payload["n"])

    for number in range(5):
        await stage.send("q", {"n": number})
        await stage.send_raw("q", b"{")
    async with stage.worker(app):
        assert [(await stage.payload())["resultado"] for _ in range(5)] == list(range(5))
    assert await stage.left("q") == (0, 0, 5)
