"""The answer to a request that a stop cuts short, or that finds no thread."""

import asyncio
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from oraculo.api.unserved import AnswersUnserved
from oraculo.engine.operations import LARGE_REQUEST
from oraculo.errors import NO_THREAD
from tests.api.service import Service


class Cut:
    """A request that waits for what does not answer, and is cancelled. `begun`: some of its reply is out."""

    def __init__(self, method: str, *, begun: bool = False) -> None:
        self.scope: dict[str, Any] = {"type": "http", "method": method, "path": "/", "headers": []}
        self.sent: list[Any] = []
        self._begun = begun
        self._waits = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        self._waits.set()
        await asyncio.Event().wait()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> Any:
        raise AssertionError

    async def ends(self, *, is_stopping: bool) -> None:
        await self.cut(AnswersUnserved(self, is_stopping=lambda: is_stopping))

    async def cut(self, app: Any) -> None:
        task = asyncio.create_task(app(self.scope, self.receive, self.send))
        await self._waits.wait()
        task.cancel()
        await task


@pytest.mark.parametrize(("method", "in_doubt"), [("GET", False), ("POST", True)])
async def test_the_answer_says_to_ask_again_and_whether_it_may_have_been_done(method: str, in_doubt: bool) -> None:
    cut = Cut(method)
    await cut.ends(is_stopping=True)
    start, body = cut.sent
    assert start["status"] == 503
    assert (b"not known whether this was done" in body["body"]) is in_doubt


@pytest.mark.parametrize("begun", [False, True])
async def test_a_cancellation_without_a_stop_is_left_alone(begun: bool) -> None:
    cut = Cut("GET", begun=begun)
    with pytest.raises(asyncio.CancelledError):
        await cut.ends(is_stopping=False)
    assert len(cut.sent) == begun


async def test_a_live_stream_is_cut_without_a_traceback_and_does_not_look_complete() -> None:
    cut = Cut("GET", begun=True)
    await cut.ends(is_stopping=True)  # whatever it raises uvicorn logs as a fault of the application
    assert [message["type"] for message in cut.sent] == ["http.response.start"]


async def test_what_is_no_request_is_cut_as_ever() -> None:
    cut = Cut("GET", begun=True)
    cut.scope = {"type": "lifespan"}
    with pytest.raises(asyncio.CancelledError):
        await cut.ends(is_stopping=True)


async def test_the_api_shows_so_once_its_engine_takes_no_more(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Cut("GET")
    cut.scope |= {"path": "/orquestracoes/x/explicacao", "query_string": b"", "root_path": ""}

    async def hang(_run_id: str) -> None:
        await cut(None, None, None)

    monkeypatch.setattr(service.operations, "run", hang)
    monkeypatch.setattr(service.engine.parts.lifecycle, "accepting", False)
    await cut.cut(service.app)
    assert cut.sent[0]["status"] == 503


async def test_what_found_no_thread_is_not_done_when_there_is_room_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"destinos": ["fila_a"], "payload": {"a": "%s"}}' % (b"x" * LARGE_REQUEST)
    maker = service.engine.parts.runs.maker
    made = Mock(wraps=maker.submission)
    monkeypatch.setattr(maker, "submission", made)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError(NO_THREAD)))
        assert {(await service.client.post("/orquestracoes", content=body)).status_code for _ in range(5)} == {503}
    assert (await service.client.post("/orquestracoes", content=body)).status_code == 202
    assert made.call_count == 1


async def test_an_error_behind_the_beginning_of_a_reply_keeps_its_name() -> None:
    async def fail(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError(NO_THREAD)

    cut = Cut("GET")
    with pytest.raises(RuntimeError, match=NO_THREAD):
        await AnswersUnserved(fail, is_stopping=lambda: False)(cut.scope, cut.receive, cut.send)
