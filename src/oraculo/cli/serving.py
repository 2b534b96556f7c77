"""Processes that run until a signal: uvicorn with the engine and embedded workers, an engine, or a worker.

The first SIGTERM or SIGINT stops in phases. Waiting requests are answered, then connections are refused, then the
workers stop, then the engine. The second signal ends the process at once. Neither loses work: the store has it.
"""

import asyncio
import errno
import functools
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import typer
import uvicorn

from oraculo.bootstrap import (
    System,
    build,
    collect_garbage_less_often,
    expect_keys,
    make_app,
    make_broker,
    make_objects,
    make_worker,
)
from oraculo.cli import output
from oraculo.errors import BrokerUnavailable, Fault, InvalidSettings, OraculoError, how_to_add
from oraculo.ports.broker import Broker
from oraculo.ports.clock import SystemClock
from oraculo.ports.objects import Objects
from oraculo.settings import ApiSettings, Settings
from oraculo.telemetry.logs import configure_logging
from oraculo.worker import App, Worker

if TYPE_CHECKING:
    from oraculo.engine.starting import Starting
    from oraculo.engine.wiring import Role

# Seconds for requests under way. Requests that wait for a run are answered before, so only slow clients need them.
_CONNECTION_GRACE = 5
# Seconds after the orderly stop in which the event loop must have closed.
_CLOSE_GRACE = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class OnReady(Protocol):
    async def __call__(self, system: System, address: str) -> None:
        """Greet once the server answers requests at `address`."""
        ...


def listen(settings: ApiSettings, host: str, port: int | None) -> socket.socket:
    """Return a bound socket. Raises InvalidSettings, also when other machines could call a server without keys."""
    port = settings.port if port is None else port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (socket.gaierror, UnicodeError) as error:
        raise InvalidSettings(Fault("--host", f"{host} is no address of this machine: {error}")) from None
    except OSError as error:
        raise InvalidSettings(_why_not(error, host, port)) from None
    try:
        expect_keys(settings, listener.getsockname()[0])
    except InvalidSettings:
        listener.close()
        raise
    return listener


def _why_not(error: OSError, host: str, port: int) -> Fault:
    if error.errno == errno.EADDRINUSE:
        return Fault("--port", f"{port} on {host} is in use; choose another, or stop what has it")
    if error.errno == errno.EADDRNOTAVAIL:
        return Fault("--host", f"{host} is no address of this machine; 0.0.0.0 listens on all that it has")
    return Fault("--port", f"cannot listen on {host} port {port}: {error.strerror}")


def serve(
    settings: Settings,
    apps: Sequence[App],
    listener: socket.socket,
    ready: OnReady,
    *,
    greet: Callable[[str], None] = lambda _address: None,
    role: "Role | None" = None,
    only_health: bool = False,
    quiet: bool = False,
) -> None:
    """Serve until a signal. Raises OraculoError when the start fails.

    `greet` gets the address before anything is logged. With `quiet` uvicorn logs only warnings and errors.
    """
    collect_garbage_less_often()
    configure_logging(settings.log)
    with listener:
        system = build(settings, role)
        system.engine.parts.peers.has_apis_beside = only_health
        app = make_app(system, workers=apps, only_health=only_health)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=not quiet,
            log_level="warning" if quiet else None,
            lifespan="on",
            timeout_graceful_shutdown=_CONNECTION_GRACE,
        )
        starting: Starting = app.state.starting
        address = _address(listener)
        server = _Server(config, settings.api, starting, lambda: ready(system, address), system.engine.quiesce)
        _run(_serve(system, server, listener, starting, partial(greet, address)), config)


async def _serve(
    system: System, server: "_Server", listener: socket.socket, starting: "Starting", greet: Callable[[], None]
) -> None:
    # The start begins before uvicorn, which would show a fault as a traceback. It and the stop are idempotent.
    # uvicorn's signal handlers come first too: the start may wait for the store, and PID 1 ignores SIGTERM without one.
    stop = asyncio.Event()
    server.wake = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
    with server.capture_signals():
        greet()
        try:
            if await _is_done(starting.begin(), stop):
                await server.serve(sockets=[listener])
        finally:
            await starting.abandon()
            await system.engine.stop()
    if server.fault is not None:
        raise server.fault


async def _is_done(start: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Return whether the start ended before the stop was asked for."""
    starting = asyncio.create_task(start)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        return starting.done()
    finally:
        starting.cancel()
        stopping.cancel()


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        settings: ApiSettings,
        starting: "Starting",
        ready: Callable[[], Awaitable[None]],
        quiesce: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._settings = settings
        self._starting = starting
        self._ready = ready
        self._quiesce = quiesce
        self._announcing: asyncio.Task[None] | None = None
        self.fault: BaseException | None = None  # ended the server
        self.wake: Callable[[], object] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        from oraculo.api.server import bind  # here, so that a worker process loads without FastAPI

        bind(self.config, self._settings)
        self._starting.on_failure = self._fail
        await super().startup(sockets=sockets)
        if self._starting.is_waiting:
            self._announcing = asyncio.create_task(self._announce())
        else:
            await self._ready()

    async def _announce(self) -> None:
        with suppress(OraculoError):  # the start failed, and called `_fail`
            await self._starting.finished()
            await self._ready()

    def _fail(self, fault: BaseException) -> None:
        self.fault, self.should_exit = fault, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let waiting requests and live streams end by themselves before uvicorn cancels what is left."""
        self._quiesce()
        if self._announcing is not None:
            self._announcing.cancel()
        await super().shutdown(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the stop. The signal is not kept: uvicorn would raise it again, and an orderly stop exits with 0."""
        if self.should_exit:
            _end_at_once(sig)
        self.should_exit = True
        _say_stopping()
        self.wake()


# -- an engine alone -------------------------------------------------------------------------------------------------


def run_engine(settings: Settings) -> None:
    """Run an engine until a signal. Raises OraculoError when the start fails."""
    collect_garbage_less_often()
    configure_logging(settings.log)
    system = build(settings)
    system.engine.parts.peers.has_apis_beside = True
    _run(_run_engine(system), uvicorn.Config(_no_app))


async def _run_engine(system: System) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    with _first_signal(lambda: loop.call_soon_threadsafe(stop.set)):
        try:
            if await _is_done(system.engine.start(), stop):
                output.note(f"oraculo: engine {system.engine.parts.peers.name} is running")
            await stop.wait()
        finally:
            await system.engine.stop()


# -- a worker alone --------------------------------------------------------------------------------------------------


def work(settings: Settings, app: App) -> None:
    """Run a worker until a signal. Raises InvalidSettings, and OraculoError when the worker fails."""
    configure_logging(settings.log)
    clock = SystemClock()
    broker = make_broker(settings, clock)
    objects = make_objects(settings) if settings.objects.url else None
    worker = make_worker(app, broker, settings, clock, objects)
    _run(_work(worker, broker, objects), uvicorn.Config(_no_app))


def work_in_celery(settings: Settings, app: App, options: Sequence[str]) -> NoReturn:
    """Run Celery's worker with `options` of its command line.

    Raises typer.Exit with Celery's exit status, or InvalidSettings.
    """
    try:
        from oraculo.bridges.celery.command_line import run_worker
        from oraculo.celery_app import make_celery_app
    except ModuleNotFoundError as error:
        missing = f"celery needs a package that is not installed ({error.name}): {how_to_add('celery')}"
        raise InvalidSettings(Fault("--engine", missing)) from error
    configure_logging(settings.log)
    raise typer.Exit(run_worker(make_celery_app(settings, [app]), app.name, options))


async def _no_app(*_: object) -> None:
    """Stand in for an app: uvicorn's configuration needs one, and only its choice of an event loop is wanted."""


async def _work(worker: Worker, broker: Broker, objects: Objects | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    with _first_signal(lambda: loop.call_soon_threadsafe(stop.set)):
        stopping = asyncio.create_task(stop.wait())
        try:
            await _connect(broker, stopping)
            if not stop.is_set():
                await _work_until(stopping, worker)
        finally:
            stopping.cancel()
            await broker.close()
            if objects is not None:
                await objects.close()


async def _connect(broker: Broker, stopping: "asyncio.Task[Any]") -> None:
    """Connect. The worker itself waits for a broker that is away; a refusal is raised at once."""
    connecting = asyncio.create_task(broker.start())
    await asyncio.wait([connecting, stopping], return_when=asyncio.FIRST_COMPLETED)
    connecting.cancel()
    with suppress(BrokerUnavailable, asyncio.CancelledError):
        await connecting


async def _work_until(stopping: "asyncio.Task[Any]", worker: Worker) -> None:
    working = asyncio.create_task(worker.run())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    await worker.stop()
    await working


# -- both ------------------------------------------------------------------------------------------------------------


def _run(main: Coroutine[Any, Any, None], config: uvicorn.Config) -> None:
    # Closing the loop waits for every task and for the threads of `asyncio.to_thread`. A handler's thread may never
    # end, and must not keep the process.
    last_resort = threading.Timer(_CLOSE_GRACE, _leave_behind)
    last_resort.daemon = True
    try:
        _reset_signals_in_children()
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            try:
                runner.run(main)
            except Exception as error:
                last_resort.args = (error,)
                raise
            finally:
                last_resort.start()
    finally:
        last_resort.cancel()


@functools.cache  # a registration cannot be undone
def _reset_signals_in_children() -> None:
    """Give processes that a handler forks Python's own signal handlers: with ours, a `Pool` could not end them."""
    if hasattr(os, "register_at_fork"):  # Windows has no forks
        # Held back meanwhile: our handlers would swallow a signal that reaches the child before they are gone.
        hold = partial(signal.pthread_sigmask, signal.SIG_BLOCK, _SIGNALS)
        os.register_at_fork(before=hold, after_in_parent=_release_signals, after_in_child=_reset_signals)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _release_signals()


def _leave_behind(error: Exception | None = None) -> None:
    _write(b"oraculo: a handler does not end; stopped without it\n")
    os._exit(0 if error is None else output.complain(str(error)))


@contextmanager
def _first_signal(act: Callable[[], object]) -> Iterator[None]:
    is_stopping = False

    def handle(sig: int, _frame: FrameType | None) -> None:
        nonlocal is_stopping
        if is_stopping:
            _end_at_once(sig)
        is_stopping = True
        _say_stopping()
        act()

    before = {sig: signal.signal(sig, handle) for sig in _SIGNALS}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def _say_stopping() -> None:
    _write(b"oraculo: stopping; what is in work is finished first (signal again to end at once)\n")


def _end_at_once(sig: int) -> None:
    _write(b"oraculo: ended at once; what was in work goes on at the next start\n")
    os._exit(128 + sig)


def _write(line: bytes) -> None:
    """Write to the descriptor: a signal may interrupt a buffered write. A full disk must not stop the stop."""
    with suppress(OSError):
        os.write(2, line)
