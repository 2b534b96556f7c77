"""A start that may have to wait for its store, while the server beside it already answers health checks."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from oraculo.engine.service import Engine
from oraculo.ports.telemetry import LoopFailed


class Starting:
    """The start of an engine, and of the workers beside it.

    `on_failure` is called when the start fails while others already use what it was to start. Unless it is set, the
    process gets SIGTERM.
    """

    def __init__(self, engine: Engine, workers: Sequence[Callable[[], Awaitable[None]]] = ()) -> None:
        self._engine = engine
        self._workers = workers
        self._task: asyncio.Task[None] | None = None
        self.on_failure: Callable[[BaseException], None] = self._stop_process

    async def begin(self) -> None:
        """Return when all has started, or when the start waits for its store.

        Raise what ended the start before. A second call does no harm.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._start(), name="start")
            waiting = asyncio.create_task(self._engine.awaits_store.wait())
            await asyncio.wait([self._task, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not self._task.done():
                self._task.add_done_callback(self._ended)
        if self._task.done():
            self._task.result()

    @property
    def is_waiting(self) -> bool:
        """Return whether the start was begun and goes on."""
        return self._task is not None and not self._task.done()

    async def finished(self) -> None:
        """Return when all has started. Raise what ended the start."""
        assert self._task is not None, "it is begun before"
        await asyncio.shield(self._task)

    async def abandon(self) -> None:
        """Stop what has not started yet."""
        if self._task is not None and self._task.cancel():
            with suppress(asyncio.CancelledError):
                await self._task

    async def _start(self) -> None:
        await self._engine.start()
        for worker in self._workers:
            await worker()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_failure(error)

    def _stop_process(self, error: BaseException) -> None:
        self._engine.ports.telemetry.emit(LoopFailed("start", str(error)))
        signal.raise_signal(signal.SIGTERM)
