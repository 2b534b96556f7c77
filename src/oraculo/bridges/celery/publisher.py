"""Publishes on our broker from code that cannot await, as Celery's tasks cannot."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence

from oraculo.bridges.celery.answers import publish_answer
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import Broker, Outgoing, publish_all
from oraculo.wire.answers import AnswerWriter
from oraculo.wire.message import Message

TIMEOUT = 15.0  # seconds for one call; connecting and publishing have shorter limits of their own


class BlockingPublisher:
    """One connection a process, on an event loop in a thread. Celery forks, and processes cannot share one."""

    def __init__(self, make_broker: Callable[[], Broker]) -> None:
        self._make_broker = make_broker
        self._lock = threading.Lock()
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop
        self._broker: Broker

    def publish(self, message: Outgoing) -> None:
        """Return once the broker has confirmed. Raises BrokerUnavailable, or BrokerError for a refusal."""
        self._call(lambda: self._publish(message))

    def publish_answer(self, writer: AnswerWriter, kind: str, command: Message, body: bytes) -> None:
        """Publish an answer, or the failure that stands in for it. Raises as `publish` does."""
        self._call(lambda: publish_answer(self._publish, writer, kind, command, body))

    def declare(self, queues: Sequence[str]) -> None:
        """Declare queues as every other part of ORÁCULO does. Raises as `publish` does."""
        self._call(lambda: self._broker.declare(queues))

    async def _publish(self, message: Outgoing) -> None:
        await publish_all(self._broker, [message])

    def _call(self, work: Callable[[], Awaitable[None]]) -> None:
        async def started() -> None:
            await self._broker.start()
            await work()

        self._ensure_loop()
        future = asyncio.run_coroutine_threadsafe(started(), self._loop)
        try:
            future.result(TIMEOUT)
        except TimeoutError:
            future.cancel()
            raise BrokerUnavailable(f"the broker did not confirm in {TIMEOUT:g} s") from None

    def _ensure_loop(self) -> None:
        with self._lock:
            if self._pid == os.getpid():
                return
            self._loop = asyncio.new_event_loop()
            self._broker = self._make_broker()
            self._pid = os.getpid()
            threading.Thread(target=self._loop.run_forever, name="oraculo-broker", daemon=True).start()
