"""The API behind a real uvicorn, in a thread with its own event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import SO_SNDBUF, SOL_SOCKET, socket
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from oraculo.api.server import bind
from oraculo.settings import ApiSettings, Settings

from .service import SETTINGS, Service

T = TypeVar("T")
Wrap = Callable[[ASGIApp], ASGIApp]


def _as_it_is(app: ASGIApp) -> ASGIApp:
    return app


async def _no_app(*_: object) -> None: ...


class _Server(uvicorn.Server):
    """A server that sets an event once it takes requests."""

    def __init__(self, config: uvicorn.Config, settings: ApiSettings) -> None:
        super().__init__(config)
        self._settings = settings
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        bind(self.config, self._settings)
        await super().startup(sockets)
        self.ready.set()


class LiveService:
    def __init__(self, folder: Path, settings: Settings, wrap: Wrap) -> None:
        self._folder = folder
        self._settings = settings
        self._wrap = wrap
        self._made = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        """As `oraculo serve` does it: on the event loop that uvicorn prefers."""
        with asyncio.Runner(loop_factory=uvicorn.Config(_no_app).get_loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.service = Service(self._folder, self._settings)
        config = uvicorn.Config(
            self._wrap(self.service.app),
            port=0,
            log_level="critical",
            lifespan="on",
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config, self._settings.api)
        self._made.set()
        await self._server.serve()

    def start(self) -> None:
        self._thread.start()
        assert self._made.wait(10)
        assert self._server.ready.wait(10), "uvicorn did not start"
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "uvicorn did not stop"

    def keep_little_in_the_system(self) -> None:
        """Let the system itself take little of what a client does not read."""
        for listener in self._server.servers[0].sockets:
            listener.setsockopt(SOL_SOCKET, SO_SNDBUF, 16 * 1024)

    @property
    def has_connections(self) -> bool:
        return bool(self._server.server_state.connections)

    def answers_under_way(self) -> set[asyncio.Task[None]]:
        return set(self._server.server_state.tasks)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` where the engine lives."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)


@contextmanager
def live(folder: Path, settings: Settings = SETTINGS, wrap: Wrap = _as_it_is) -> Iterator[LiveService]:
    """`wrap` may put something around the application, as a witness of what arrives."""
    service = LiveService(folder, settings, wrap)
    service.start()
    try:
        yield service
    finally:
        service.stop()
