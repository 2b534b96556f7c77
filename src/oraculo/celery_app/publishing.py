"""Our broker, for code that cannot await: Celery's tasks are plain functions."""

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from oraculo.bootstrap import make_broker
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Broker, Outgoing
from oraculo.ports.clock import SystemClock
from oraculo.settings import Settings

PATIENCE = 15.0  # seconds for one call; connecting and publishing have shorter limits of their own


class Publisher:
    """Keeps one connection in each process that publishes, on an event loop in a thread: Celery forks, and a connection
    must not be shared by two processes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop
        self._broker: Broker

    def publish(self, messages: Sequence[Outgoing]) -> None:
        """Returns once they are confirmed. Raises BrokerUnavailable or BrokerError."""
        self._call(self._publish, messages)

    def declare(self, queues: Sequence[str]) -> None:
        """Makes them as every other part of ours does. Raises BrokerUnavailable or BrokerError."""
        self._call(self._declare, queues)

    async def _publish(self, messages: Sequence[Outgoing]) -> None:
        await self._broker.start()
        await self._broker.publish(messages)

    async def _declare(self, queues: Sequence[str]) -> None:
        await self._broker.start()
        await self._broker.declare(queues)

    def _call(self, work: Any, argument: Any) -> None:
        self._ensure_loop()
        coroutine: Coroutine[Any, Any, None] = work(argument)
        future: Future[None] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            future.result(PATIENCE)
        except TimeoutError:
            future.cancel()
            raise BrokerUnavailable(f"the broker did not confirm in {PATIENCE:g} s") from None

    def _ensure_loop(self) -> None:
        with self._lock:
            if self._pid == os.getpid():
                return
            self._loop = asyncio.new_event_loop()
            self._broker = make_broker(self._settings, SystemClock())
            self._pid = os.getpid()
            threading.Thread(target=self._loop.run_forever, name="oraculo-broker", daemon=True).start()
