"""`CeleryBridge`: commands out to Celery's workers, reports back in.

A command is acked once Celery's broker has confirmed the task; a report is acked there once its answer is confirmed
here. In between, all that is needed rests in one of the two brokers: the bridge may be killed at any moment.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from celery import Celery

from oraculo.bridges.celery.answers import DUTY, TaskAnswers
from oraculo.bridges.celery.connections import NOT_YET, Address, Listener
from oraculo.bridges.celery.events import SentTasks, TaskEvents
from oraculo.bridges.celery.handover import QUEUE, STOP_GRACE, TaskHandover
from oraculo.bridges.celery.looking import QueueLook
from oraculo.bridges.celery.reasons import PATIENCE, FailureReasons
from oraculo.bridges.celery.replies import TaskReplies
from oraculo.bridges.celery.reports import Report
from oraculo.bridges.celery.tasks import ReturnAddress
from oraculo.bridges.ended_runs import EndedRuns
from oraculo.pipeline import bridges
from oraculo.pipeline.bridges import Beyond, Bridge
from oraculo.ports.broker import Broker
from oraculo.ports.clock import Clock, Entropy
from oraculo.ports.store import Store
from oraculo.ports.telemetry import LoopFailed, Telemetry
from oraculo.settings import CelerySettings
from oraculo.wire import naming
from oraculo.wire.answers import AnswerWriter

REPLIES = naming.BRIDGE_REPLIES  # the exchange and the queue on Celery's broker, with our prefix


class CeleryBridge:
    """Makes the rooms, and starts and stops them in order. `store` is only read: it tells which runs ended while
    Celery's broker was away. Raises InvalidSettings."""

    name = bridges.CELERY

    def __init__(
        self,
        settings: CelerySettings,
        broker: Broker,
        prefix: str,
        clock: Clock,
        entropy: Entropy,
        telemetry: Telemetry,
        store: Store,
    ) -> None:
        names = naming.QueueNames(prefix)
        queue = names.physical(QUEUE)
        self._telemetry = telemetry
        self._has_events = settings.events
        self._default_queue = settings.queue
        self._app = Celery("oraculo", broker=settings.broker_url, set_as_current=False)
        if settings.key_prefix:  # it speaks to the workers by connections of its own
            self._app.conf.broker_transport_options = {"global_keyprefix": settings.key_prefix}
        self._address = Address(settings.broker_url, settings.key_prefix, names.physical(REPLIES))
        self._look = QueueLook(self._address)
        self._sent = SentTasks()
        self._reasons = FailureReasons(PATIENCE if settings.events else 0)
        self._answers = TaskAnswers(broker, AnswerWriter(clock, names), self._sent, entropy, telemetry)
        self._replies = TaskReplies(
            self._address, self._answers, self._sent, self._reasons, queue, self._on_loop, entropy, telemetry
        )
        self._handover = TaskHandover(
            self._app,
            settings,
            self._address,
            self._answers,
            self._sent,
            EndedRuns(store, clock),
            broker=broker,
            queue=queue,
            clock=clock,
            entropy=entropy,
            telemetry=telemetry,
        )
        self._threads: list[Listener] = []
        self._started = False

    @property
    def trouble(self) -> str | None:
        return self._handover.trouble or (self._threads[0].trouble if self._threads else None)

    @property
    def shortfall(self) -> str | None:
        why = self._threads[1].trouble if len(self._threads) > 1 else None
        if why is None or why == NOT_YET:
            return None
        return f"{why}; so the events of Celery's workers are not heard, which ORACULO_CELERY_EVENTS=false does without"

    async def beyond(self, destination: Bridge) -> Beyond | None:
        return await self._look.at(destination.queue or self._default_queue)

    async def start(self) -> None:
        if self._started:
            return
        self._started = True
        self._loop = asyncio.get_running_loop()
        self._threads = [Listener("oraculo-celery-in", self._address, self._replies.listen, self._tell_trouble)]
        if self._has_events:
            events = TaskEvents(self._app, self._sent, self._ended, self._failed, self._retried)
            self._threads.append(Listener("oraculo-celery-events", self._address, events.listen, self._tell_trouble))
        for thread in self._threads:
            thread.start()
        self._handover.start()

    async def stop(self) -> None:
        if not self._started:
            return
        self._started = False
        await self._handover.stop()
        for thread in self._threads:
            thread.end()
        await asyncio.gather(*(asyncio.to_thread(thread.join, STOP_GRACE) for thread in self._threads))
        self._threads = []

    # -- called in a listener's thread --------------------------------------------------------------------------

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _ended(self, report: Report) -> None:
        self._on_loop(self._answers.give_for_event(report))

    def _failed(self, task_id: str, kind: str, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._reasons.note, task_id, kind, text)

    def _retried(self, command: ReturnAddress, text: str) -> None:
        self._on_loop(self._answers.tell_retry(command, text))

    def _tell_trouble(self, trouble: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever would hear this
            self._loop.call_soon_threadsafe(self._telemetry.emit, LoopFailed(DUTY, trouble))
