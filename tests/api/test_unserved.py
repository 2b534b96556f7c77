"""What a request is told that a stop cuts short."""

import asyncio
from typing import Any

import pytest

from oraculo.api.stopping import ToldOfTheStop


class Cut:
    """A request that waits for what does not answer, and is cancelled. `begun`: some of its reply is out."""

    def __init__(self, method: str, *, begun: bool = False) -> None:
        self.scope = {"type": "http", "method": method, "path": "/", "headers": []}
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
        app = ToldOfTheStop(self, is_stopping=lambda: is_stopping)
        task = asyncio.create_task(app(self.scope, self.receive, self.send))
        await self._waits.wait()
        task.cancel()
        await task


@pytest.mark.parametrize(("method", "in_doubt"), [("GET", False), ("POST", True)])
async def test_it_is_told_to_ask_again_and_whether_it_may_have_been_done(method: str, in_doubt: bool) -> None:
    cut = Cut(method)
    await cut.ends(is_stopping=True)
    start, body = cut.sent
    assert start["status"] == 503
    assert (b"not known whether this was done" in body["body"]) is in_doubt


async def test_a_reply_that_has_begun_and_a_cancellation_without_a_stop_are_left_alone() -> None:
    for cut, is_stopping in ((Cut("GET", begun=True), True), (Cut("GET"), False)):
        with pytest.raises(asyncio.CancelledError):
            await cut.ends(is_stopping=is_stopping)
        assert [message for message in cut.sent if message.get("status") == 503] == []
