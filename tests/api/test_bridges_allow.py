"""A request, a route, a pipeline or a file for what the settings do not allow behind a bridge is refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.settings import BullmqSettings, CelerySettings, Settings

from .service import SETTINGS, assert_problem, running

TASK = "the task 'outra.x' is outside ORACULO_CELERY_TASKS_ALLOW (loja.*)"
JOB = "the job 'estornar' of the queue 'pagamentos' is outside ORACULO_BULLMQ_QUEUES_ALLOW (pagamentos:cobrar)"
OWN = "the queue 'unacked' is one that Celery's transport keeps for itself; name another"


def settings_with(**more: Any) -> Settings:
    return msgspec.structs.replace(
        SETTINGS,
        celery=CelerySettings(tasks_allow=("loja.*",), queues_allow=("*",)),
        bullmq=BullmqSettings(queues_allow=("pagamentos:cobrar",)),
        rotas={"fora": ("executador_x", "celery://outra.x")},
        **more,
    )


@pytest.mark.parametrize(
    ("request_", "field", "fault"),
    [
        ({"destinos": ["executador_x", "celery://outra.x"]}, "destinos[1]", TASK),
        ({"destinos": ["celery://loja.x?queue=unacked"]}, "destinos[0]", OWN),
        ({"destinos": [{"id": "t", "fila": "bullmq://pagamentos?name=estornar"}]}, "destinos[0]", JOB),
        ({"tipo": "fora"}, "tipo", f"steps[1] (celery://outra.x).queue: {TASK}"),
    ],
)
async def test_a_request_is_refused_and_the_setting_named(
    tmp_path: Path, request_: dict[str, object], field: str, fault: str
) -> None:
    async with running(tmp_path, settings_with()) as service:
        reply = await service.client.post("/orquestracoes", json=request_)
        assert_problem(reply, 422, field, fault)
        assert (await service.client.get("/orquestracoes")).json()["orquestracoes"] == []


@pytest.mark.parametrize(
    ("step", "field", "fault"),
    [
        ({"type": "A", "queue": "celery://outra.x"}, "steps[0] (A).queue", TASK),
        ({"type": "A", "celery": {"task": "loja.x", "queue": "unacked"}}, "steps[0] (A).queue", OWN),
        ({"type": "estornar", "queue": "bullmq://pagamentos"}, "steps[0] (estornar).queue", JOB),
    ],
)
async def test_a_pipeline_is_refused_with_its_step(
    tmp_path: Path, step: dict[str, Any], field: str, fault: str
) -> None:
    async with running(tmp_path, settings_with()) as service:
        assert_problem(await service.client.put("/pipelines/p", json={"steps": [step]}), 422, field, fault)


async def test_a_pipeline_that_was_put_before_the_setting_changed_starts_no_run(tmp_path: Path) -> None:
    step = {"type": "A", "queue": "celery://outra.x"}
    allowing = msgspec.structs.replace(SETTINGS, celery=CelerySettings(tasks_allow=("*",)))
    async with running(tmp_path, allowing) as service:
        assert (await service.client.put("/pipelines/p", json={"steps": [step]})).status_code == 201
    async with running(tmp_path, settings_with()) as service:
        reply = await service.client.post("/orquestracoes", json={"pipeline": "p"})
        assert_problem(reply, 422, "pipeline", f"steps[0] (A).queue: {TASK}")


async def test_a_file_is_a_bad_file(tmp_path: Path) -> None:
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (folder / "ruim.yaml").write_text("name: ruim\nsteps:\n  - {type: A, queue: 'celery://outra.x'}\n")
    async with running(tmp_path, settings_with(pipelines=str(folder))) as service:
        [bad] = (await service.client.get("/pipelines")).json()["arquivos_invalidos"]
        assert bad["erros"] == [{"campo": "steps[0] (A).queue", "motivo": TASK}]
