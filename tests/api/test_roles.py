"""Every call with every role: what each may do is in the table of calls, which has all that the application has."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from oraculo.api import auth
from oraculo.settings import ApiSettings, KeyRole

from .calls import CALLS, Call
from .service import SETTINGS, Service, assert_problem, running

KEYS = {role: f"chave-de-{role}-{role}" for role in KeyRole}
WITH_ROLES = msgspec.structs.replace(
    SETTINGS, api=ApiSettings(keys=("chave-sem-papel-1", *(f"{role}:{key}" for role, key in KEYS.items())))
)


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr(auth, "WRONG_KEY_PAUSE", 0.01)
    async with running(tmp_path, WITH_ROLES) as service:
        yield service


async def answer(service: Service, call: Call, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return (await service.client.request(call.method, call.address, headers=headers)).status_code


async def test_a_key_may_do_what_its_role_says_and_no_more(service: Service) -> None:
    for call in CALLS:
        for key in (None, "", "nenhuma-chave-daqui", f"{KeyRole.ADMIN}:{KEYS[KeyRole.ADMIN]}"):
            assert (await answer(service, call, key) == 401) == (call.role is not None), key
        for role, key in [*KEYS.items(), (KeyRole.ADMIN, "chave-sem-papel-1")]:
            is_allowed = call.role is None or list(KeyRole).index(role) >= list(KeyRole).index(call.role)
            status = await answer(service, call, key)
            assert status == 403 if not is_allowed else status not in (401, 403), role


async def test_a_refusal_names_the_role_that_is_needed(service: Service) -> None:
    headers = {"X-API-Key": KEYS[KeyRole.OPERATOR]}
    refused = await service.client.put("/pipelines/x", json={"steps": [{"type": "a"}]}, headers=headers)
    assert_problem(refused, 403, None, "role admin", "role is operator")
    headers = {"X-API-Key": KEYS[KeyRole.ADMIN]}
    assert (await service.client.get("/pipelines/x", headers=headers)).status_code == 404


async def test_a_call_that_nobody_foresaw_needs_the_most(service: Service) -> None:
    for method, path in (("PATCH", "/pipelines/x"), ("POST", "/filas"), ("DELETE", "/novidade")):
        for role in (KeyRole.READER, KeyRole.OPERATOR):
            reply = await service.client.request(method, path, headers={"X-API-Key": KEYS[role]})
            assert_problem(reply, 403, None, "role admin")


async def test_the_document_names_the_role_of_each_call(service: Service) -> None:
    paths = service.app.openapi()["paths"]
    for call in CALLS:
        path = call.path.replace(":run}", "}").replace(":segment}", "}")
        if call.role is not None and path in paths:
            assert f"`{call.role}`" in paths[path][call.method.lower()]["description"]


async def test_a_wrong_key_is_answered_after_a_pause_and_a_good_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "WRONG_KEY_PAUSE", 0.3)
    async with running(tmp_path, WITH_ROLES) as service:
        runs = next(call for call in CALLS if str(call) == "GET /orquestracoes")

        async def seconds(key: str | None) -> float:
            begun = time.monotonic()
            await answer(service, runs, key)
            return time.monotonic() - begun

        good = min([await seconds(KEYS[KeyRole.READER]) for _ in range(5)])
        assert await seconds("nenhuma-chave-daqui") >= 0.3
        assert good < 0.3
        assert min([await seconds(None) for _ in range(5)]) < 0.3, "a call without a key is no guess"
