"""Task events: they say why a task failed, and what no callback tells. The broker does not keep them, so no outcome
depends on them: without them a failed task has no reason, and one without a callback ends by its deadline.

Celery calls no errback for a task that was revoked, nor for one whose name its worker does not know. Its workers send
events when they are asked to, which is what Flower does too.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import kombu
from celery import Celery
from celery.events.event import get_exchange

from oraculo.bridges.celery.connections import Listener
from oraculo.bridges.celery.reports import Report, failure, told_by
from oraculo.bridges.celery.tasks import ReturnAddress

ASK_EVERY = 15.0  # seconds; workers that started meanwhile did not hear us
ASK_SOON = 2.0  # after one has told that it starts, which it does before it can be asked
ASKED_SOON = 3  # times
MOST_REMEMBERED = 10_000
_IDLE = 0.5
_UNKNOWN_TASK = "NotRegistered"


class SentTasks:
    """The commands whose tasks were sent from here and have not reported, by task id; the oldest are forgotten."""

    def __init__(self, limit: int = MOST_REMEMBERED) -> None:
        self._limit = limit
        self._commands: OrderedDict[str, ReturnAddress] = OrderedDict()

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._commands

    def add(self, task_id: str, command: ReturnAddress) -> None:
        self._commands[task_id] = command
        if len(self._commands) > self._limit:
            self._commands.popitem(last=False)

    def get(self, task_id: object) -> ReturnAddress | None:
        return self._commands.get(task_id) if isinstance(task_id, str) else None

    def forget(self, task_id: str) -> None:
        self._commands.pop(task_id, None)


class TaskEvents:
    """Reads events in a `Listener`'s thread. `on_end` hears of tasks that ended without a callback, `on_failure` why
    any other task failed, `on_retry` of those that Celery runs again, and why."""

    def __init__(
        self,
        app: Celery,
        sent: SentTasks,
        on_end: Callable[[Report], None],
        on_failure: Callable[[str, str, str], None],
        on_retry: Callable[[ReturnAddress, str], None],
    ) -> None:
        self._app = app
        self._sent = sent
        self._on_end = on_end
        self._on_failure = on_failure
        self._on_retry = on_retry
        self._ask_at = 0.0
        self._asks_soon = 0

    def listen(self, listener: Listener, connection: kombu.Connection) -> None:
        exchange = get_exchange(connection, name=self._app.conf.event_exchange)
        queues = [_queue(exchange, key) for key in ("task.#", "worker.online")]  # kombu's Redis has one key for each
        self._ask_at = time.monotonic()
        with kombu.Consumer(connection.channel(), queues, callbacks=[self._arrived], accept=["json"], no_ack=True):
            listener.is_ready()
            while not listener.stopping:
                if time.monotonic() >= self._ask_at:
                    self._app.control.enable_events(connection=connection)
                    self._ask_at = time.monotonic() + (ASK_SOON if self._asks_soon else ASK_EVERY)
                    self._asks_soon = max(0, self._asks_soon - 1)
                listener.drain(connection, _IDLE)

    def _arrived(self, body: Any, _message: kombu.Message) -> None:
        for event in _events_in(body):
            if event.get("type") == "worker-online":
                self._ask_at, self._asks_soon = min(self._ask_at, time.monotonic() + ASK_SOON), ASKED_SOON
            task_id = event.get("uuid")
            if event.get("type") == "task-failed" and isinstance(task_id, str):
                self._on_failure(task_id, *told_by(event))  # another engine may have sent the task
            command = self._sent.get(task_id)
            if command is not None:
                self._tell(event, command)

    def _tell(self, event: Mapping[str, Any], command: ReturnAddress) -> None:
        match event.get("type"):
            case "task-revoked":
                self._on_end(_revoked(command, event))
            case "task-failed" if str(event.get("exception")).startswith(_UNKNOWN_TASK):
                worker = event.get("hostname")
                self._on_end(failure(command, _UNKNOWN_TASK, f"the worker {worker} has no such task"))
            case "task-retried":
                self._on_retry(command, _retried(event))


def _queue(exchange: kombu.Exchange, routing_key: str) -> kombu.Queue:
    return kombu.Queue(
        f"celeryev.oraculo.{kombu.uuid()}",
        exchange,
        routing_key=routing_key,
        durable=False,
        auto_delete=True,
        expires=60,
        message_ttl=30,
    )


def _events_in(body: Any) -> Iterator[Mapping[str, Any]]:
    """Workers send them singly, and those of tasks several at a time."""
    for event in body if isinstance(body, list) else [body]:
        if isinstance(event, dict):
            yield event


def _retried(event: Mapping[str, Any]) -> str:
    reason = event.get("exception")
    # A task may ask for its retry without an exception, and Celery writes that as the text of Python's None.
    return "Celery runs it again" if reason in (None, "None") else f"Celery runs it again after {reason}"


def _revoked(command: ReturnAddress, event: Mapping[str, Any]) -> Report:
    how = "its deadline passed before a worker began it" if event.get("expired") else "someone revoked it"
    if event.get("terminated"):
        how = f"someone terminated it (signal {event.get('signum')})"
    return failure(command, "TaskRevokedError", how)
