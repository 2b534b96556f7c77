"""A command that reached a bridge for what the settings do not allow there goes no further, and its run is answered.

It may come from a run that began before the settings changed, or from whoever else may publish on our broker.
"""

import uuid
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from oraculo.errors import InvalidRequest
from oraculo.pipeline.bridges import QUEUES
from oraculo.testing.harness import Harness
from tests.bridges.celery_stage import Bridged
from tests.bridges.node.stage import BullStage, bull_settings
from tests.servers.fleet import Fleet
from tests.waiting import until


async def reason_of(oraculo: Harness, kind: str, place: dict[str, Any]) -> str:
    """Return why a task failed whose command somebody else put on the bridge's queue."""
    run_id = await oraculo.submit({"destinos": [{"id": "t", "fila": "executador_nenhum"}], "timeout": 30})
    command = {
        "correlation_id": run_id,
        "tipo_evento": "iniciar_execucao",
        "tarefa": "t",
        "tentativa": 1,
        "payload": {},
        "timestamp": "2026-01-01T00:00:00Z",
        "ponte": {"tipo": kind, **place},
    }
    await oraculo.publish(QUEUES[kind], command)
    return str((await oraculo.ended(run_id))["falhas"]["t"]["motivo"])


async def test_kombus_own_keys_are_never_touched(fleet: Fleet) -> None:
    """A task on the queue `unacked` made a list of the key where workers keep what they hold, and stopped them all."""
    url = fleet.url("redis")
    async with Redis.from_url(url) as redis, Bridged(url, "loja-celery") as oraculo:
        await redis.delete("unacked")
        with pytest.raises(InvalidRequest, match="the queue 'unacked' is one that Celery's transport keeps"):
            await oraculo.submit({"destinos": ["celery://loja.somar?queue=unacked"]})
        place = {"alvo": "loja.somar", "fila": "unacked"}
        assert "is one that Celery's transport keeps for itself" in await reason_of(oraculo, "celery", place)
        assert await redis.type("unacked") == b"none"


async def test_what_was_allowed_once_is_refused_when_it_is_repeated_or_redriven(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, queue = fleet.url("redis"), f"loja-{uuid.uuid4().hex[:10]}"
    async with Redis.from_url(url) as redis, Bridged(url, queue) as oraculo:
        task = {"destinos": [{"id": "t", "fila": "celery://outra.x"}], "timeout": 0.5}
        run_id = await oraculo.submit(task)
        assert (await oraculo.ended(run_id))["falhas"]["t"]["status"] == "timeout"
        assert await redis.llen(queue) == 1
        narrow = msgspec.structs.replace(oraculo.settings.celery, tasks_allow=("loja.*",))
        monkeypatch.setattr(oraculo.bridge._dispatcher, "_settings", narrow)

        await oraculo.operations.repeat(run_id)
        assert "'outra.x' is outside ORACULO_CELERY_TASKS_ALLOW" in await _reason(oraculo, run_id)

        refused = await until(lambda: oraculo.operations.dead_letters(QUEUES["celery"]), saying="the dead letter")
        before = await _refusals(oraculo, run_id)
        await oraculo.operations.redrive(QUEUES["celery"], [letter.id for letter in refused])

        async def is_refused_again() -> bool:
            return await _refusals(oraculo, run_id) > before

        await until(is_refused_again, saying="the redriven command's answer")
        assert await redis.llen(queue) == 1


async def _reason(oraculo: Harness, run_id: str) -> str:
    return str((await oraculo.ended(run_id))["falhas"]["t"]["motivo"])


async def _refusals(oraculo: Harness, run_id: str) -> int:
    """Return how often the run's history names the setting."""
    return str(await oraculo.operations.history(run_id)).count("is outside ORACULO_CELERY_TASKS_ALLOW")


async def test_a_job_that_is_not_allowed_is_not_added(fleet: Fleet) -> None:
    settings = bull_settings("memory://", fleet.url("redis"), queues_allow=("pagamentos:cobrar",))
    async with BullStage(settings) as oraculo:
        reason = await reason_of(oraculo, "bullmq", {"alvo": "pagamentos", "nome": "estornar"})
        assert "the job 'estornar' of the queue 'pagamentos' is outside ORACULO_BULLMQ_QUEUES_ALLOW" in reason
        assert await oraculo.job_ids("pagamentos") == []
