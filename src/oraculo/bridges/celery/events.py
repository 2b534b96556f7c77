"""Listens to the task events of Celery's workers.

Events say why a task failed. They also report ends for which Celery calls no errback: a task was revoked, or its
worker does not know its name. The broker does not keep events, so no outcome may depend on them: without its event a
failed task has no reason, and a task without a callback ends by its deadline.
"""

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import kombu
from celery.events.event import get_exchange
from kombu.pidbox import Mailbox

from oraculo.bridges.celery.answers import TaskAnswers
from oraculo.bridges.celery.connections import SetupTimeout
from oraculo.bridges.celery.failure_reasons import FailureReasons
from oraculo.bridges.celery.listener import Listener
from oraculo.bridges.celery.replies import Reason, failure, reason_in

_ASK_EVERY = 5.0  # seconds; workers that have started meanwhile did not get the last request
_FIRST_READ, _IDLE = 0.01, 0.5  # seconds
_UNKNOWN_TASK = "NotRegistered"

# Starts a coroutine on the event loop, from any thread.
OnLoop = Callable[[Coroutine[Any, Any, None]], "Future[None]"]


class TaskEvents:
    def __init__(self, answers: TaskAnswers, reasons: FailureReasons, on_loop: OnLoop) -> None:
        self._answers = answers
        self._reasons = reasons
        self._on_loop = on_loop

    def listen(self, listener: Listener, connection: kombu.Connection) -> None:
        """Read events in a listener's thread, and ask the workers for them, as Flower does."""
        workers = Mailbox("celery", type="fanout")(connection)
        ask_at = time.monotonic()
        with kombu.Consumer(
            connection.channel(), [_queue(connection)], callbacks=[self._received], accept=["json"], no_ack=True
        ):
            listener.drain(connection, _FIRST_READ)  # on Redis, only a read subscribes
            listener.ready()
            while not listener.stopping:
                if time.monotonic() >= ask_at:
                    with SetupTimeout(connection):
                        workers.abcast("enable_events")
                    ask_at = time.monotonic() + _ASK_EVERY
                listener.drain(connection, _IDLE)

    def _received(self, body: Any, _message: kombu.Message) -> None:
        for event in _events_in(body):
            task_id = event.get("uuid")
            if isinstance(task_id, str):
                self._take(event, task_id)

    def _take(self, event: Mapping[str, Any], task_id: str) -> None:
        kind, command = event.get("type"), self._answers.sent.get(task_id)
        if kind == "task-failed":
            self._on_loop(self._reasons.note(task_id, reason_in(event)))  # even if another engine sent the task
        if command is None:
            return
        if kind == "task-revoked":
            reason = Reason("TaskRevokedError", _how_revoked(event))
            self._on_loop(self._answers.give_for_event(failure(command, reason)))
        elif kind == "task-failed" and str(event.get("exception")).startswith(_UNKNOWN_TASK):
            reason = Reason(_UNKNOWN_TASK, f"the worker {event.get('hostname')} has no such task")
            self._on_loop(self._answers.give_for_event(failure(command, reason)))
        elif kind == "task-retried":
            self._on_loop(self._answers.give_progress(command, _retry_text(event)))


def _queue(connection: kombu.Connection) -> kombu.Queue:
    return kombu.Queue(
        f"celeryev.oraculo.{kombu.uuid()}",
        get_exchange(connection),
        routing_key="task.#",
        durable=False,
        auto_delete=True,
        expires=60,
        message_ttl=30,
    )


def _events_in(body: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a message. Workers send task events in batches."""
    for event in body if isinstance(body, list) else [body]:
        if isinstance(event, dict):
            yield event


def _retry_text(event: Mapping[str, Any]) -> str:
    reason = event.get("exception")
    # A task may ask for its retry without an exception. Celery writes that as the text "None".
    return "Celery runs it again" if reason in (None, "None") else f"Celery runs it again after {reason}"


def _how_revoked(event: Mapping[str, Any]) -> str:
    if event.get("terminated"):
        return f"someone terminated it (signal {event.get('signum')})"
    return "its deadline passed before a worker began it" if event.get("expired") else "someone revoked it"
