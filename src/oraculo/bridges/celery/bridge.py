"""`CeleryBridge`: commands go out as Celery tasks, and their replies come back as answers.

A command is acked once Celery's broker has confirmed its task. A reply is acked there once its answer is confirmed
here. So all state rests in one of the two brokers, and the bridge may be killed at any moment.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import kombu

from oraculo.bridges.celery.answers import TaskAnswers
from oraculo.bridges.celery.connections import CeleryBroker
from oraculo.bridges.celery.dispatcher import TaskDispatcher
from oraculo.bridges.celery.events import TaskEvents
from oraculo.bridges.celery.failure_reasons import EVENT_TIMEOUT, FailureReasons
from oraculo.bridges.celery.listener import NOT_YET, STOP_GRACE, Listener
from oraculo.bridges.celery.reply_consumer import ReplyConsumer
from oraculo.pipeline import bridges
from oraculo.ports.broker import Broker
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.telemetry import Telemetry
from oraculo.settings import CelerySettings
from oraculo.wire import naming


class CeleryBridge:
    """The bridge as a service of an engine, which starts and stops the parts. Raises InvalidSettings."""

    name = bridges.CELERY

    def __init__(
        self,
        settings: CelerySettings,
        broker: Broker,
        prefix: str,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
    ) -> None:
        self._answers = TaskAnswers(broker, prefix, clock, entropy, telemetry)
        self._celery_broker = CeleryBroker(settings.broker_url, settings.key_prefix, prefix + naming.BRIDGE_REPLIES)
        reasons = FailureReasons(EVENT_TIMEOUT if settings.events else 0)
        self._replies = ReplyConsumer(self._celery_broker, self._answers, reasons, self._on_loop)
        self._events = TaskEvents(self._answers, reasons, self._on_loop) if settings.events else None
        self._dispatcher = TaskDispatcher(
            settings,
            self._celery_broker,
            self._answers,
            broker=broker,
            prefix=prefix,
            clock=clock,
            entropy=entropy,
        )
        self._listeners: list[Listener] = []  # of replies, and of events where they are read

    @property
    def trouble(self) -> str | None:
        return self._dispatcher.trouble or (self._listeners[0].trouble if self._listeners else None)

    @property
    def shortfall(self) -> str | None:
        why = self._listeners[1].trouble if len(self._listeners) > 1 else None
        if why is None or why == NOT_YET:
            return None
        return f"{why}; the events of Celery's workers cannot be read; ORACULO_CELERY_EVENTS=false does without them"

    async def start(self) -> None:
        if self._listeners:
            return
        self._loop = asyncio.get_running_loop()
        self._listen("oraculo-celery-in", self._replies.listen)
        if self._events is not None:
            self._listen("oraculo-celery-events", self._events.listen)
        self._dispatcher.start()

    def _listen(self, name: str, listen: Callable[[Listener, kombu.Connection], None]) -> None:
        listener = Listener(name, self._celery_broker, listen, self._report)
        self._listeners.append(listener)
        listener.start()

    async def stop(self) -> None:
        if not self._listeners:
            return
        await self._dispatcher.stop()
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener.end()
        await asyncio.gather(*(asyncio.to_thread(listener.join, STOP_GRACE) for listener in listeners))

    # -- called in a listener's thread --------------------------------------------------------------------------

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _report(self, trouble: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._answers.report, trouble)
