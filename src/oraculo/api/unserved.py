"""What a request is told that a stop of the server cuts short: it waits for a store or broker that does not answer."""

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oraculo.api.problems import RETRY_SECONDS, Problem, problem_reply

_STOPPING = "The server is stopping, and what this needs does not answer. Ask again in a moment"
_IN_DOUBT = f"{_STOPPING}, with the same Idempotency-Key where there was one: it is not known whether this was done."


class ToldOfTheStop:
    """uvicorn cancels what is under way a few seconds after a signal; left to it, each such request is a bare `500` to
    its client and a traceback in the log."""

    def __init__(self, app: ASGIApp, is_stopping: Callable[[], bool]) -> None:
        self._app = app
        self._is_stopping = is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def note_and_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, note_and_send)
        except asyncio.CancelledError:
            if scope["type"] != "http" or has_begun or not self._is_stopping():
                raise
            detail = f"{_STOPPING}." if scope["method"] in ("GET", "HEAD") else _IN_DOUBT
            problem = Problem("urn:oraculo:problem:service-unavailable", "Service Unavailable", 503, detail)
            await problem_reply(scope, problem, {"Retry-After": RETRY_SECONDS})(scope, receive, send)
