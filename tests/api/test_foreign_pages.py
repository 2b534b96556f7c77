"""A real browser that shows a page of another site: whatever the page sends, nothing changes on a loopback server."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oraculo.settings import Settings
from tests.servers.chromium import browsing, expect_chromium
from tests.servers.fleet import Fleet
from tests.waiting import until

from .calls import UNSAFE, Call
from .evil_site import NAME, EvilSite
from .live import live
from .service import SETTINGS, Service
from .test_http import WITH_KEYS

KEY = {"X-API-Key": "chave-um"}


class Arrived(NamedTuple):
    site: str | None  # in the browser's own word
    method: str
    path: str
    kind: str | None
    status: int


class Witness:
    """Keeps what arrives at the application, and what it answered."""

    def __init__(self) -> None:
        self.arrived: set[Arrived] = set()
        self._app: ASGIApp | None = None

    def around(self, app: ASGIApp) -> ASGIApp:
        self._app = app
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["method"] not in ("GET", "OPTIONS"):
                headers = Headers(scope=scope)
                kind = headers.get("content-type")
                site, kind = headers.get("sec-fetch-site"), kind and kind.partition(";")[0]
                self.arrived.add(Arrived(site, scope["method"], scope["path"], kind, message["status"]))
            await send(message)

        assert self._app is not None
        await self._app(scope, receive, note)


def calls() -> list[dict[str, str | None]]:
    return [
        {"method": call.method, "path": call.address.replace("conhecida", run), "body": _body(call)}
        for call in UNSAFE
        for run in (("aberta", "falha") if "correlation_id" in call.path else ("",))
    ]


def _body(call: Call) -> str | None:
    return None if call.good_body is None else json.dumps(call.good_body, separators=(",", ":"))


async def fill(service: Service) -> None:
    """Make something for each call to change: a run to cancel, one to repeat, a pipeline and a dead letter."""
    service.client.headers.update(KEY)
    await service.start_run(correlation_id="aberta", destinos=["escavador_z"])
    await service.start_run(correlation_id="falha", destinos=["escavador_x"])
    await service.answer("escavador_x", {"status": "erro"})
    await service.ended("falha")
    await service.client.put("/pipelines/conhecido", json={"steps": [{"type": "fila_x"}]})
    await service.bury("escavador_y", b"{}")


async def state(service: Service) -> list[Any]:
    paths = ("/orquestracoes", "/pipelines", "/pipelines/conhecido", "/filas/escavador_y/dlq")
    return [(await service.client.get(path)).json() for path in paths]


def expected_arrivals() -> set[tuple[str, str, str | None]]:
    """What a browser sends for such a page without asking the server first. For a host that is neither this machine nor
    behind TLS, it does not say from which site."""
    kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/ping", None)
    sent = {(site, "POST", kind) for site in ("cross-site", "same-site", None) for kind in kinds}
    own = ("application/json", "application/yaml")
    return sent | {(None, method, kind) for method in ("PUT", "DELETE", "POST") for kind in own}


@pytest.mark.parametrize(
    ("settings", "refusals"),  # of what looks as if it came from a page of this server
    [pytest.param(SETTINGS, {421}, id="without keys"), pytest.param(WITH_KEYS, {401, 415}, id="with keys")],
)
async def test_a_page_of_another_site_changes_nothing(
    settings: Settings, refusals: set[int], fleet: Fleet, tmp_path: Path
) -> None:
    chromium, witness = await asyncio.to_thread(expect_chromium, fleet), Witness()
    with live(tmp_path, settings, witness.around) as served:
        served.do(fill(served.service))
        before = served.do(state(served.service))
        witness.arrived.clear()
        site = EvilSite(served.url, calls())
        names = {NAME: "127.0.0.1"}
        with site.open(), browsing(chromium, site.url, tmp_path / "profile", names=names):
            for _ in ("the page", "the page within it"):
                assert await asyncio.to_thread(site.done.acquire, timeout=60), "the browser did not show the page"
            expected = {*expected_arrivals()}

            def missing() -> set[Any]:
                return expected - {(each.site, each.method, each.kind) for each in witness.arrived}

            with suppress(AssertionError):  # what is missing says more, below
                await until(lambda: not missing(), within=20)
            assert missing() == set(), witness.arrived
        assert served.do(state(served.service)) == before
    assert {each.path for each in witness.arrived} == {call["path"] for call in calls()}
    assert {each.status for each in witness.arrived if each.site} == {403}
    assert {each.status for each in witness.arrived if each.site is None} == refusals
