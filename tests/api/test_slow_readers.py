"""Clients that ask and do not read: what a server keeps for them, and how long."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oraculo.core.history import Happened, HistoryEntry
from oraculo.settings import ApiSettings, LimitSettings
from tests import waiting
from tests.api.exchange import Exchange
from tests.api.live import LiveService, live
from tests.api.service import SETTINGS, Service, running
from tests.cli.processes import until

WRITE_TIMEOUT = 0.6
LARGE = 2 * 2**20
TIMED = msgspec.structs.replace(SETTINGS, api=ApiSettings(write_timeout=WRITE_TIMEOUT, keep_alive=0.2))
LETTERS = "/filas/fila_x/dlq"


# -- the deadline ------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveService]:
    with live(tmp_path, TIMED) as service:
        service.keep_little_in_the_system()
        for _ in range(LARGE // 2**20):
            service.do(service.service.bury("fila_x", b"a" * 2**20))
        yield service


@contextmanager
def _asking(server: LiveService, path: str, headers: str = "") -> Iterator[socket.socket]:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        client.settimeout(20)
        client.connect(("127.0.0.1", server.port))
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
        yield client


def test_who_does_not_read_a_reply_is_cut_off(server: LiveService) -> None:
    with _asking(server, LETTERS) as client:
        until(lambda: server.answers_under_way(), saying="an answer under way")
        until(lambda: not server.has_connections, saying="the end of the connection")
        assert 0 < len(_read_to_end(client)) < LARGE
    assert server.service.app.state.context.replies.has(TIMED.limits.replies_bytes)


def test_who_reads_slowly_gets_all(server: LiveService) -> None:
    with _asking(server, LETTERS, "Connection: close\r\n") as client:
        read = pieces = 0
        while piece := client.recv(64 * 1024):
            read, pieces = read + len(piece), pieces + 1
            if pieces % 8 == 0:
                server.do(asyncio.sleep(WRITE_TIMEOUT / 5))
    assert read > LARGE
    assert pieces > 40, "it took longer than the deadline"


def test_who_reads_slowly_is_seen_to_though_the_system_keeps_much(tmp_path: Path) -> None:
    """A client takes some of what the system keeps, which has room for more only once a third of that is gone."""
    count = 7
    with live(tmp_path, TIMED) as server:
        for _ in range(count):
            server.do(server.service.bury("fila_x", b"a" * 2**20))
        with _asking(server, LETTERS, "Connection: close\r\n") as client:
            until(lambda: server.answers_under_way(), saying="an answer under way")
            read, end = 0, time.monotonic() + 4 * WRITE_TIMEOUT
            while time.monotonic() < end:
                read += len(client.recv(16 * 1024))
                server.do(asyncio.sleep(WRITE_TIMEOUT / 20))
            read += len(_read_to_end(client))
    assert read > count * 2**20


def test_who_does_not_read_a_small_reply_is_cut_off_too(server: LiveService) -> None:
    """Of a small one less stays unread than makes the server pause."""
    server.do(server.service.bury("fila_z", b"a" * 95_000))
    with _asking(server, "/filas/fila_z/dlq"):
        until(lambda: server.has_connections, saying="a connection")
        until(lambda: not server.has_connections, saying="the end of the connection")


def test_who_does_not_read_a_live_stream_is_cut_off(server: LiveService, monkeypatch: pytest.MonkeyPatch) -> None:
    async def follow(_run: str, _after: int = 0) -> AsyncIterator[HistoryEntry]:
        number = 0
        while True:
            number += 1
            yield HistoryEntry(number, 0.0, Happened.PROGRESS, detail="x" * 4000)
            await asyncio.sleep(0)

    run = server.do(server.service.start_run(destinos=["escavador_x"], timeout=60))
    monkeypatch.setattr(server.service.operations, "follow", follow)
    with _asking(server, f"/orquestracoes/{run}/eventos", "Accept: text/event-stream\r\n"):
        until(lambda: server.answers_under_way(), saying="a stream under way")
        until(lambda: not server.has_connections and not server.answers_under_way(), saying="the end of the stream")


def _read_to_end(client: socket.socket) -> bytes:
    read = b""
    while True:
        try:
            piece = client.recv(2**20)
        except ConnectionError:
            return read
        if not piece:
            return read
        read += piece


# -- the room ----------------------------------------------------------------------------------------------------------

ROOM = 300_000
SMALL_ROOM = msgspec.structs.replace(SETTINGS, limits=LimitSettings(replies_bytes=ROOM))


@pytest.fixture
async def crowded(tmp_path: Path) -> AsyncIterator[Service]:
    """A service with one dead letter that takes up most of the room for replies, and one that takes up more."""
    async with running(tmp_path, SMALL_ROOM) as service:
        await service.bury("fila_x", b"a" * 200_000)
        await service.bury("fila_y", b"a" * 2 * ROOM)
        yield service


async def _status(service: Service, path: str) -> int:
    return (await service.client.get(path)).status_code


async def test_what_is_not_read_takes_only_so_much_memory(crowded: Service) -> None:
    async with Exchange(crowded.app, "GET", LETTERS, window=1) as unread:
        await unread.stalled.wait()
        refused = await crowded.client.get(LETTERS)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "large replies" in refused.json()["detail"]
        assert await _status(crowded, "/filas") == 200, "a small one needs no room"
    assert await _status(crowded, LETTERS) == 200, "what was given back is another's"


async def test_one_that_is_larger_than_the_room_is_served_while_it_is_alone(crowded: Service) -> None:
    assert await _status(crowded, "/filas/fila_y/dlq") == 200
    async with Exchange(crowded.app, "GET", "/filas/fila_y/dlq", window=1) as unread:
        await unread.stalled.wait()
        assert await _status(crowded, LETTERS) == 503
        assert await _status(crowded, "/filas/fila_y/dlq") == 503
    assert await _status(crowded, "/filas/fila_y/dlq") == 200


async def test_a_reply_arrives_whole_in_pieces(crowded: Service) -> None:
    whole = await crowded.client.get("/filas/fila_y/dlq")
    assert whole.json()["mensagens"][0]["corpo_texto"] == "a" * 2 * ROOM
    async with Exchange(crowded.app, "GET", "/filas/fila_y/dlq") as exchange:
        await exchange.finished()
        assert int(dict((await exchange.next())["headers"])[b"content-length"]) == len(whole.content)
        sizes: list[int] = []
        while (message := await exchange.next()).get("more_body"):
            sizes.append(len(message["body"]))
    assert max(sizes) < ROOM
    assert sum(sizes) + len(message["body"]) == len(whole.content)


async def test_who_waits_for_a_run_whose_reply_has_no_room_is_answered_without_it(crowded: Service) -> None:
    body: dict[str, Any] = {"destinos": ["escavador_z"], "correlation_id": "r"}
    async with Exchange(crowded.app, "GET", LETTERS, window=1) as unread:
        await unread.stalled.wait()
        asking = asyncio.create_task(crowded.client.post("/orquestracoes", json=body, headers={"Prefer": "wait=10"}))
        await crowded.answer("escavador_z", {"x": "a" * 200_000})
        reply = await asking
    assert (reply.status_code, reply.json()["correlation_id"]) == (202, "r")


async def test_what_has_changed_something_is_answered_though_there_is_no_room(crowded: Service) -> None:
    run = await crowded.start_run(destinos=["escavador_z", "escavador_w"])
    await crowded.answer("escavador_z", {"x": "a" * 200_000})
    path = f"/orquestracoes/{run}"
    await waiting.until(lambda: _succeeded(crowded, path))
    async with Exchange(crowded.app, "GET", LETTERS, window=1) as unread:
        await unread.stalled.wait()
        cancelled = await crowded.client.post(f"{path}/cancelar")
        assert (cancelled.status_code, len(cancelled.content) > 200_000) == (200, True)
        assert await _status(crowded, path) == 503


async def _succeeded(service: Service, path: str) -> int:
    return int((await service.client.get(path)).json()["resumo"]["concluidas"])
