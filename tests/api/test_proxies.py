"""Clients behind reverse proxies: whose word on their addresses counts, in every way to serve."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import msgspec
import pytest

from oraculo.api.server.bounds import Bounds
from oraculo.settings import ApiSettings
from tests.api.live import LiveService, live
from tests.api.service import SETTINGS
from tests.cli.processes import environment, until
from tests.servers.prepared import ORACULO

CLIENT = "203.0.113.9"
KEY = "chave-de-teste-0123456789"
MOST = 3
COMMANDS = {
    "uvicorn": [sys.executable, "-m", "uvicorn", "oraculo.main:app", "--port", "0"],
    "uvicorn that believes everyone": [
        *(sys.executable, "-m", "uvicorn", "oraculo.main:app", "--port", "0"),
        *("--proxy-headers", "--forwarded-allow-ips", "*"),
    ],
    "oraculo serve": [*ORACULO, "serve", "--port", "0"],
}


@contextmanager
def _serving(command: str, folder: Path, proxies: str) -> Iterator[tuple[str, list[str]]]:
    """The address, and the lines of the access log, complete once the server has ended."""
    process = subprocess.Popen(
        COMMANDS[command],
        cwd=folder,
        env=environment(ORACULO_API_KEYS=KEY, ORACULO_LOG_FORMAT="console", ORACULO_API_PROXIES=proxies),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        address = next(filter(None, (re.search(r"http://127.0.0.1:\d+", line) for line in process.stdout)))[0]
        yield address, lines
    finally:
        process.terminate()
        lines += process.communicate(timeout=30)[0].splitlines()


@pytest.mark.parametrize(
    ("command", "proxies", "is_believed"),
    [
        ("uvicorn that believes everyone", "", False),
        ("uvicorn", "127.0.0.0/8,::1", True),
        ("oraculo serve", "10.0.0.0/8", False),
    ],
)
def test_the_access_log_names_the_client_that_a_configured_proxy_names(
    tmp_path: Path, command: str, proxies: str, is_believed: bool
) -> None:
    headers = {"X-Forwarded-For": f"198.51.100.1, {CLIENT}"}
    with _serving(command, tmp_path, proxies) as (address, lines):
        assert httpx2.get(f"{address}/health?q={KEY}", headers=headers).status_code == 200
    [line] = [line for line in lines if "GET /health" in line]
    assert (CLIENT in line) is is_believed, line
    assert "198.51.100.1" not in line, "its client wrote that itself"
    assert KEY not in line


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveService]:
    api = ApiSettings(client_connections=MOST, proxies=("127.0.0.1/8",), max_wait=30)
    with live(tmp_path, msgspec.structs.replace(SETTINGS, api=api)) as service:
        yield service


def test_each_client_behind_a_proxy_may_have_as_many_requests_as_another_has_connections(server: LiveService) -> None:
    run = server.do(server.service.start_run(destinos=["escavador_x"], timeout=60))
    streams = [_stream(server, run, client) for client in (CLIENT, "203.0.113.10") for _ in range(MOST)]
    try:
        assert _status(server, "203.0.113.11") == 200
        assert _status(server, CLIENT) == 429
        streams[0].close()
        until(lambda: _status(server, CLIENT) == 200, saying="200 once one of its requests has ended")
    finally:
        for each in streams:
            each.close()


def test_a_proxy_by_itself_is_not_bounded(server: LiveService) -> None:
    run = server.do(server.service.start_run(destinos=["escavador_x"], timeout=60))
    streams = [_stream(server, run, None) for _ in range(3 * MOST)]
    try:
        assert _status(server, None) == 200
    finally:
        for each in streams:
            each.close()


class _Stream:
    """A live stream on a connection of its own."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._client = httpx2.Client(trust_env=False)
        self._stream = self._client.stream("GET", url, headers=headers)
        response = self._stream.__enter__()
        assert response.status_code == 200, "it may have no more"

    def close(self) -> None:
        self._stream.__exit__(None, None, None)
        self._client.close()


def _forwarded(client: str | None) -> dict[str, str]:
    return {} if client is None else {"X-Forwarded-For": client}


def _stream(server: LiveService, run: str, client: str | None) -> _Stream:
    url = f"{server.url}/orquestracoes/{run}/eventos"
    return _Stream(url, {"Accept": "text/event-stream"} | _forwarded(client))


def _status(server: LiveService, client: str | None) -> int:
    return httpx2.get(f"{server.url}/health", headers=_forwarded(client)).status_code


@pytest.mark.parametrize(
    ("address", "is_proxy"),
    [("10.1.2.3", True), ("10.2.0.0", False), ("fd00::1", True), ("fe80::1%eth0", False), ("a name", False)],
)
def test_a_proxy_is_known_by_its_address_or_network(address: str, is_proxy: bool) -> None:
    assert Bounds(ApiSettings(proxies=("10.1.2.0/16", "fd00::1"))).is_proxy(address) is is_proxy
