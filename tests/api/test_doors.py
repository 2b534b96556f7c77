"""A page of another site changes nothing and, without keys, reads nothing, whatever it sends and to which route."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import msgspec
import pytest

from oraculo.api.auth import OPEN_PATHS
from oraculo.settings import ApiSettings, Settings

from .calls import CALLS, SAFE, UNSAFE, Foreign, calls_of
from .service import SETTINGS, Service, assert_problem, running
from .test_http import WITH_KEYS

HOST = "127.0.0.1:8000"
KEY = {"X-API-Key": "chave-um"}


@pytest.fixture(params=[SETTINGS, WITH_KEYS], ids=["without keys", "with keys"])
async def local(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """A client on this machine; where there are keys, with a good one."""
    settings: Settings = request.param
    async with running(tmp_path, settings) as service, _local(service) as client:
        await _fill(service)
        yield client


def _local(service: Service) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(service.app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url=f"http://{HOST}", headers=KEY)


async def _fill(service: Service) -> None:
    service.client.headers.update(KEY)
    run_id = await service.start_run(correlation_id="conhecida", destinos=["escavador_x"])
    await service.answer("escavador_x", {"dados": [1]})
    await service.ended(run_id)
    await service.client.put("/pipelines/conhecido", json={"steps": [{"type": "fila_x"}]})
    await service.bury("escavador_y", b"{}")


def test_the_table_has_every_route_of_the_application(tmp_path: Path) -> None:
    app = Service(tmp_path).app
    assert sorted(map(str, CALLS)) == sorted(calls_of(app))
    assert all((call.foreign is Foreign.BLOCKED) != call.is_safe for call in CALLS), "no call that changes is let in"
    app.add_api_route("/novidade", lambda: None, methods=["PATCH"])
    assert "PATCH /novidade" in set(calls_of(app)), "a new route is seen"


FOREIGN: list[dict[str, str]] = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "Cross-Site"},
    {"Sec-Fetch-Site": "cross-site", "Origin": f"http://{HOST}"},
    {"Origin": "http://evil.example"},
    {"Origin": "http://evil.example:8000"},
    {"Origin": "http://127.0.0.1"},
    {"Origin": "http://127.0.0.1:3000"},
    {"Origin": "http://localhost:8000"},
    {"Origin": "http://127.0.0.1:8000.evil.example"},
    {"Origin": "http://evil.example#127.0.0.1:8000"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "http://[::1"},
    {"Origin": "http://127.0.0.1:x"},
    {"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"},
]
_JSON = {"Content-Type": "application/json"}


async def test_an_unsafe_call_of_a_foreign_page_is_refused(local: httpx2.AsyncClient) -> None:
    for call in (call for call in CALLS if call.foreign is Foreign.BLOCKED):
        for headers in FOREIGN:
            for body in (None, b"{}"):
                reply = await local.request(call.method, call.address, content=body, headers=_JSON | headers)
                assert_problem(reply, 403, None, "page of another site")


FORM_KINDS = [
    "text/plain",
    "text/plain;charset=UTF-8",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain; x=application/json",
    "application/octet-stream",
    "",
    "application/jsonp",
    "text/html+json,",
]


async def test_a_body_that_is_no_json_is_refused(local: httpx2.AsyncClient) -> None:
    for call in UNSAFE:
        kinds: list[dict[str, str]] = [{"Content-Type": kind} for kind in FORM_KINDS]
        # A form without fields has a type and no body; a client that names no type has a body and no type.
        kinds_and_bodies: list[tuple[dict[str, str], bytes | None]] = [
            *((kind, b"{}") for kind in kinds),
            *((kind, b"") for kind in kinds),
            ({}, b"{}"),
            ({"Transfer-Encoding": "chunked"}, b"{}"),
        ]
        if "pipelines" not in call.path:
            kinds_and_bodies.append(({"Content-Type": "application/yaml"}, b"{}"))
        for headers, body in kinds_and_bodies:
            reply = await local.request(call.method, call.address, content=body, headers=headers)
            assert_problem(reply, 415, None, "application/json")


OWN: list[dict[str, str]] = [
    {},
    {"Origin": f"http://{HOST}", "Sec-Fetch-Site": "same-origin"},
    {"Origin": f"https://{HOST}"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": "http://LOCALHOST", "Host": "localhost:80"},
    {"Origin": "https://localhost", "Host": "localhost"},
]


async def test_a_program_and_a_page_of_its_own_may_call(local: httpx2.AsyncClient) -> None:
    for call in UNSAFE:
        for headers in OWN:
            reply = await local.request(call.method, call.address, json=call.good_body, headers=headers)
            assert reply.status_code not in (403, 415, 421), reply.text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "192.168.0.9", "[::", "[::2]"]
)
async def test_without_keys_a_foreign_host_is_refused(host: str, tmp_path: Path) -> None:
    """As after a change of what a name means: the browser takes the page for one of this server."""
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    async with running(tmp_path) as service, _local(service) as client:
        for call in CALLS:
            reply = await client.request(call.method, call.address, headers=headers)
            assert_problem(reply, 421, None, host, "ORACULO_API_KEYS")
        assert await service.runs() == []


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:9000", "oraculo.localhost:8000", "127.0.0.1", "127.9.9.9:1", "[::1]:8000"]
)
async def test_this_machine_may_be_called_by_any_of_its_own_names(host: str, tmp_path: Path) -> None:
    async with running(tmp_path) as service, _local(service) as client:
        assert (await client.get("/filas", headers={"Host": host})).status_code == 200


async def test_with_keys_any_host_may_be_named(tmp_path: Path) -> None:
    async with running(tmp_path, WITH_KEYS) as service, _local(service) as client:
        assert (await client.get("/filas", headers={"Host": "oraculo.example"})).status_code == 200


async def test_a_link_from_another_site_may_be_followed(local: httpx2.AsyncClient) -> None:
    for call in (call for call in CALLS if call.foreign is Foreign.UNREADABLE):
        headers = {"Sec-Fetch-Site": "cross-site", "Origin": "http://evil.example"}
        reply = await local.get(call.address, headers=headers)
        assert reply.status_code < 400, reply.text
        assert not [name for name in reply.headers if name.startswith("access-control-")], "no other page may read it"


async def test_no_page_may_be_framed(local: httpx2.AsyncClient) -> None:
    pages = [
        reply
        for call in SAFE
        if (reply := await local.get(call.address)).headers.get("content-type", "").startswith("text/html")
    ]
    assert pages
    for page in pages:
        assert page.headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]


# -- other machines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["http://192.168.0.9:8000", "http://[fd00::9]:8000"])
async def test_without_keys_another_machine_is_refused_whatever_serves(address: str, tmp_path: Path) -> None:
    """An ASGI server of one's own may listen anywhere, and only a request says on which address it came."""
    async with running(tmp_path) as service, _local(service) as client:
        for call in CALLS:
            reply = await client.request(call.method, f"{address}{call.address}")
            if call.path in OPEN_PATHS:
                assert reply.status_code == 200
            else:
                assert_problem(reply, 403, None, "ORACULO_API_KEYS", "ORACULO_API_INSECURE")
        assert await service.runs() == []


INSECURE = msgspec.structs.replace(SETTINGS, api=ApiSettings(insecure=True))


@pytest.mark.parametrize("settings", [INSECURE, WITH_KEYS], ids=["insecure", "with keys"])
async def test_another_machine_may_call_with_a_key_or_when_others_guard_the_server(
    settings: Settings, tmp_path: Path
) -> None:
    async with running(tmp_path, settings) as service, _local(service) as client:
        for address in ("http://192.168.0.9:8000", f"http://{HOST}"):
            reply = await client.get(f"{address}/orquestracoes", headers={"Host": "oraculo.example"})
            assert reply.status_code == 200


async def test_an_insecure_server_is_no_prey_of_a_foreign_page(tmp_path: Path) -> None:
    async with running(tmp_path, INSECURE) as service, _local(service) as client:
        headers = {"Origin": "http://evil.example"}
        reply = await client.post("http://192.168.0.9:8000/orquestracoes", json={"tipo": "x"}, headers=headers)
        assert_problem(reply, 403, None, "page of another site")
