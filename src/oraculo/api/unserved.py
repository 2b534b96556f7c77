"""503 for requests that a stop of the server cuts short, or that need a thread which the system refuses."""

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oraculo.api.problems import RETRY_SECONDS, Problem, problem_reply
from oraculo.errors import NO_THREAD

_STOPPING = "The server is stopping, and what this needs does not answer. Ask again in a moment"
_IN_DOUBT = f"{_STOPPING}, with the same Idempotency-Key where there was one: it is not known whether this was done."
_CROWDED = "The system lets the server start no more threads: its limit of processes, or of memory, is reached."

_logger = logging.getLogger("oraculo.api")


class AnswersUnserved:
    """Middleware that answers such requests with 503.

    uvicorn cancels requests a few seconds after a signal; the client would get a bare `500`, and the log a traceback.
    FastAPI's handlers see no cancellation, and one for RuntimeError would hide faults once a reply has begun.
    """

    def __init__(self, app: ASGIApp, is_stopping: Callable[[], bool]) -> None:
        self._app = app
        self._is_stopping = is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_and_remember(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_remember)
        except (asyncio.CancelledError, RuntimeError) as error:
            if scope["type"] != "http":
                raise
            if has_begun and isinstance(error, asyncio.CancelledError) and self._is_stopping():
                return  # uvicorn closes the connection
            problem = None if has_begun else self._problem(scope, error)
            if problem is None:
                raise
            await problem_reply(scope, problem, {"Retry-After": RETRY_SECONDS})(scope, receive, send)

    def _problem(self, scope: Scope, error: BaseException) -> Problem | None:
        if isinstance(error, asyncio.CancelledError):
            detail = f"{_STOPPING}." if scope["method"] in ("GET", "HEAD") else _IN_DOUBT
            return _unavailable("service-unavailable", "Service Unavailable", detail) if self._is_stopping() else None
        if str(error) != NO_THREAD:
            return None
        _logger.error("%s %s: the system has no room for another thread", scope["method"], scope["path"])
        return _unavailable("no-thread", "There is no thread for it now", _CROWDED)


def _unavailable(kind: str, title: str, detail: str) -> Problem:
    return Problem(f"urn:oraculo:problem:{kind}", title, 503, detail)
