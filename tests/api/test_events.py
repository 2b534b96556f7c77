import asyncio
import gc
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx2
import pytest

from oraculo.api import events, replies
from oraculo.core.history import HistoryEntry
from oraculo.errors import StoreUnavailable
from tests.waiting import until

from .exchange import Exchange
from .live import live
from .service import Service, assert_problem

LIVE = {"Accept": "text/event-stream"}


def parsed(text: str) -> list[dict[str, Any]]:
    """The events of a stream, as an EventSource would report them."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if fields:
            found.append({**fields, "data": json.loads(fields["data"])})
    return found


async def ended_run(service: Service) -> str:
    run_id = await service.start_run(destinos=["escavador_x"])
    await service.answer("escavador_x", {"dados": 1})
    await service.ended(run_id)
    return run_id


async def test_the_history_comes_in_pages(service: Service) -> None:
    path = f"/orquestracoes/{await ended_run(service)}/eventos"
    whole = (await service.client.get(path)).json()
    names = [entry["evento"] for entry in whole["eventos"]]
    assert names[0] == "orquestracao_iniciada"
    assert names[-1] == "orquestracao_encerrada"
    assert whole["proximo"] == whole["eventos"][-1]["seq"] == len(names)
    first = (await service.client.get(path, params={"limite": 2})).json()
    assert first == {"eventos": whole["eventos"][:2], "proximo": 2}
    assert (await service.client.get(path, params={"apos": 2})).json()["eventos"] == whole["eventos"][2:]
    assert (await service.client.get(path, params={"apos": 99})).json() == {"eventos": [], "proximo": None}


async def test_a_page_of_long_entries_ends_early_and_the_next_goes_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/orquestracoes/{await ended_run(service)}/eventos"
    whole = (await service.client.get(path)).json()["eventos"]
    monkeypatch.setattr(replies, "PAGE_BYTES", 2 * max(len(json.dumps(entry)) for entry in whole))
    seen: list[dict[str, Any]] = []
    while page := (await service.client.get(path, params={"apos": len(seen)})).json()["eventos"]:
        assert len(page) < len(whole)
        seen += page
    assert seen == whole


async def test_a_parameter_that_was_left_empty_is_not_given(service: Service) -> None:
    path = f"/orquestracoes/{await ended_run(service)}/eventos"
    whole = (await service.client.get(path)).json()
    assert (await service.client.get(f"{path}?apos=&limite=")).json() == whole


@pytest.mark.parametrize("query", ["apos=-1", "apos=x", "apos=9999999999", "limite=0", "limite=1001"])
async def test_a_bad_page_is_refused(service: Service, query: str) -> None:
    reply = await service.client.get(f"/orquestracoes/{await ended_run(service)}/eventos?{query}")
    assert_problem(reply, 422, query.partition("=")[0])


async def test_the_stream_of_an_ended_run_shows_all_and_ends(service: Service) -> None:
    run_id = await ended_run(service)
    path = f"/orquestracoes/{run_id}/eventos"
    page = (await service.client.get(path)).json()["eventos"]
    reply = await service.client.get(path, headers=LIVE)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *said, end = parsed(reply.text)
    assert [event["data"] for event in said] == page
    assert [event["id"] for event in said] == [str(entry["seq"]) for entry in page]
    assert [event["event"] for event in said] == [entry["evento"] for entry in page]
    assert end == {"event": "fim", "data": {"correlation_id": run_id, "status": "concluida"}}


async def test_a_stream_goes_on_behind_the_last_event(service: Service) -> None:
    path = f"/orquestracoes/{await ended_run(service)}/eventos"
    reply = await service.client.get(path, headers={**LIVE, "Last-Event-ID": "2"})
    assert parsed(reply.text)[0]["id"] == "3"
    reply = await service.client.get(path, headers={**LIVE, "Last-Event-ID": "99"})
    assert [event["event"] for event in parsed(reply.text)] == ["fim"]
    reply = await service.client.get(path, params={"apos": "2"}, headers={**LIVE, "Last-Event-ID": ""})
    assert parsed(reply.text)[0]["id"] == "3"


@pytest.mark.parametrize("last", [b"x", b"-1", b"1.5", b"\xff", b"9" * 30])
async def test_a_bad_last_event_is_refused(service: Service, last: bytes) -> None:
    path = f"/orquestracoes/{await ended_run(service)}/eventos"
    reply = await service.client.get(path, headers={b"Accept": b"text/event-stream", b"Last-Event-ID": last})
    assert_problem(reply, 422, "Last-Event-ID")


@pytest.mark.parametrize(
    ("accept", "streams"),
    [
        ("text/event-stream", True),
        ("TEXT/Event-Stream;q=0.9, */*;q=0.1", True),
        ("text/event-stream;q=0", False),
        ("application/json, text/event-stream;q=0.5", False),
        ("*/*", False),
        ("", False),
        ("text/event-stream;q=muito", True),
    ],
)
async def test_the_accept_header_chooses(service: Service, accept: str, streams: bool) -> None:
    path = f"/orquestracoes/{await ended_run(service)}/eventos"
    reply = await service.client.get(path, headers={"Accept": accept})
    assert reply.headers["content-type"].startswith("text/event-stream" if streams else "application/json")


async def test_the_stream_of_an_unknown_run_is_not_found(service: Service) -> None:
    assert_problem(await service.client.get("/orquestracoes/nada/eventos", headers=LIVE), 404)


async def test_an_open_run_is_reported_as_it_goes(service: Service) -> None:
    run_id = await service.start_run(destinos=["escavador_x"])
    async with Exchange(service.app, "GET", f"/orquestracoes/{run_id}/eventos", LIVE) as exchange:
        assert "orquestracao_iniciada" in await exchange.next_chunk()
        await service.answer("escavador_x", {"dados": 1})
        text = ""
        while "event: fim" not in text:
            text += await exchange.next_chunk()
        await exchange.finished()
    assert [event["event"] for event in parsed(text)][-3:] == ["tarefa_concluida", "orquestracao_encerrada", "fim"]
    assert run_id not in service.engine.parts.runs.watchers


async def test_a_stream_reads_and_keeps_nothing_of_its_run_but_the_history(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many may follow one run, whose results may be hundreds of megabytes."""
    run_id = await service.start_run(destinos=["escavador_x"])

    async def is_noted() -> bool:
        return not await service.engine.ports.store.unsent(1)

    await until(is_noted, saying="the command to be noted as sent")
    load = AsyncMock(wraps=service.engine.ports.store.load)
    monkeypatch.setattr(service.engine.ports.store, "load", load)
    async with Exchange(service.app, "GET", f"/orquestracoes/{run_id}/eventos", LIVE) as exchange:
        text = await exchange.next_chunk()
        await service.answer("escavador_x", {"dados": 1})
        while "event: fim" not in text:
            text += await exchange.next_chunk()
        await exchange.finished()
    assert parsed(text)[-1] == {"event": "fim", "data": {"correlation_id": run_id, "status": "concluida"}}
    load.assert_not_called()


@pytest.mark.parametrize("is_waited_for", [True, False])
async def test_a_store_that_is_lost_under_a_stream_is_asked_to_its_reader_or_to_nobody(
    is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    monkeypatch.setattr(events, "KEEP_ALIVE", 0.01)
    lost = asyncio.Event()

    async def history() -> AsyncGenerator[HistoryEntry, None]:
        await lost.wait()
        raise StoreUnavailable("the connection was cut")
        yield

    stream = events._with_pauses(source := history())
    assert await anext(stream) is None
    lost.set()
    if is_waited_for:
        with pytest.raises(StoreUnavailable, match="cut"):
            await anext(stream)
    else:
        await until(lambda: source.ag_frame is None, saying="the fault")
    await stream.aclose()
    del stream
    gc.collect()
    assert unheard == []


async def test_a_silent_stream_is_kept_alive(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = await service.start_run(destinos=["escavador_x"])
    assert events.KEEP_ALIVE == 15.0
    monkeypatch.setattr(events, "KEEP_ALIVE", 0.001)
    async with Exchange(service.app, "GET", f"/orquestracoes/{run_id}/eventos", LIVE) as exchange:
        while not (await exchange.next_chunk()).startswith(":"):
            pass


async def test_a_reader_who_leaves_is_forgotten_at_once(service: Service) -> None:
    run_id = await service.start_run(destinos=["escavador_x"])
    async with Exchange(service.app, "GET", f"/orquestracoes/{run_id}/eventos", LIVE) as exchange:
        await exchange.next_chunk()
        assert run_id in service.engine.parts.runs.watchers
        exchange.leave()
        await exchange.finished()
        assert run_id not in service.engine.parts.runs.watchers


async def test_a_reader_who_leaves_without_reading_is_forgotten_too(service: Service) -> None:
    run_id = await service.start_run(destinos=["escavador_x"])
    async with Exchange(service.app, "GET", f"/orquestracoes/{run_id}/eventos", LIVE, window=1) as exchange:
        await exchange.stalled.wait()
        assert run_id in service.engine.parts.runs.watchers
        exchange.leave()
        await exchange.finished()
        assert run_id not in service.engine.parts.runs.watchers


async def test_head_of_a_stream_has_no_body_and_ends(service: Service) -> None:
    run_id = await service.start_run(destinos=["escavador_x"])
    async with Exchange(service.app, "HEAD", f"/orquestracoes/{run_id}/eventos", LIVE, window=1) as exchange:
        await exchange.stalled.wait()
        for _ in range(10):
            await asyncio.sleep(0)  # every chance to end before its answer is out
        assert (await exchange.next())["status"] == 200
        assert (await exchange.next())["body"] == b""
        await exchange.finished()
    assert run_id not in service.engine.parts.runs.watchers


def test_over_a_real_server(tmp_path: Path) -> None:
    with live(tmp_path) as served, httpx2.Client(base_url=served.url, timeout=20) as client:
        run_id = served.do(served.service.start_run(destinos=["escavador_x"]))
        text = ""
        with client.stream("GET", f"/orquestracoes/{run_id}/eventos", headers=LIVE) as reply:
            for line in reply.iter_lines():
                text += line + "\n"
                if line == "event: orquestracao_iniciada":
                    served.do(served.service.answer("escavador_x", {"dados": 1}))
        assert parsed(text)[-1]["event"] == "fim"
        reply = client.head("/orquestracoes")
        assert reply.status_code == 200
        assert int(reply.headers["content-length"]) > 0
