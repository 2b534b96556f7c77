"""The OpenAPI document against the running service: no 5xx, nothing that is not documented."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from oraculo.settings import ApiSettings

from .live import LiveService, live
from .service import SETTINGS, Service

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
IMPATIENT = msgspec.structs.replace(SETTINGS, api=ApiSettings(max_wait=0.02))
FUZZ = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    folder: Path = tmp_path_factory.mktemp("schemathesis")
    with live(folder, IMPATIENT) as served:
        served.do(_fill(served.service))
        yield served


async def _fill(service: Service) -> None:
    """Something to find, so that more than 404s are checked."""
    run_id = await service.start_run(destinos=["escavador_x", "escavador_y"], correlation_id="conhecida")
    await service.answer("escavador_x", {"dados": [1]})
    await service.answer("escavador_y", {"status": "erro"})
    await service.ended(run_id)
    await service.client.put("/pipelines/conhecido", json={"steps": [{"type": "fila_x"}]})
    for number in range(200):
        await service.bury("fila_x", b"nada" if number % 2 else b'{"correlation_id": "conhecida"}')


KNOWN = {
    "correlation_id": "conhecida",
    "name": "conhecido",
    "fila": "fila_x",
    "letter_id": "7",
    "tarefa": "escavador_x",
}


# With nonsense in one of these it is no HTTP request: whoever serves refuses it before the service sees it.
OF_THE_TRANSPORT = {"connection", "content-length", "expect", "host", "transfer-encoding", "upgrade"}


def _call(case: "schemathesis.Case[Any]", served: LiveService) -> None:
    for name in [name for name in case.headers if name.lower() in OF_THE_TRANSPORT]:
        del case.headers[name]
    case.call_and_validate(base_url=served.url, checks=CHECKS)


# Not from the running server: pytest wants to know the cases before there is one.
schema = schemathesis.openapi.from_dict(Service(Path("unused")).app.openapi())


@schema.parametrize()
@FUZZ
def test_anything(case: "schemathesis.Case[Any]", served: LiveService) -> None:
    _call(case, served)


@schema.parametrize()
@FUZZ
def test_of_what_is_there(case: "schemathesis.Case[Any]", served: LiveService) -> None:
    case.path_parameters = {name: KNOWN[name] for name in case.path_parameters or {}}
    _call(case, served)
