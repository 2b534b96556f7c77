"""The tasks with which any Celery client starts runs."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from celery import Celery

from oraculo.bridges.celery.connections import ensure_queue
from oraculo.bridges.celery.publisher import BlockingPublisher
from oraculo.core.request import Limits, read_request
from oraculo.errors import BrokerError, BrokerUnavailable, Fault, InvalidRequest, OraculoError
from oraculo.ports.broker import Outgoing
from oraculo.ports.clock import SystemClock
from oraculo.settings import Settings
from oraculo.wire import naming
from oraculo.wire.timestamps import to_iso

MAX_RETRIES = 3
_FIRST_PAUSE = 1.0  # seconds; each further retry waits twice as long

_log = structlog.get_logger("oraculo.celery")

_Request = dict[str, Any]
_Arguments = tuple[Any, ...]


def iniciar_coleta(correlation_id: str | None, fonte: str, parametros: Any = None, **options: Any) -> _Request:
    queue = _queue(naming.COLLECTOR_PREFIX, fonte)
    payload = {"fonte": naming.source_of(queue), "parametros": parametros or {}}
    return {"correlation_id": correlation_id, "destinos": [queue], "payload": payload, **options}


def iniciar_execucao(correlation_id: str | None, destino: str, payload: Any = None, **options: Any) -> _Request:
    queue = _queue(naming.PROCESSOR_PREFIX, destino)
    return {"correlation_id": correlation_id, "destinos": [queue], "payload": payload or {}, **options}


def iniciar_pipeline(pipeline: str, payload: Any = None, correlation_id: str | None = None, **options: Any) -> _Request:
    return {"correlation_id": correlation_id, "pipeline": pipeline, "payload": payload or {}, **options}


def _queue(prefix: str, name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a destination must be a text; got {naming.shown(name)}")
    return naming.with_kind(prefix, name)


def register_entry(app: Celery, settings: Settings, publisher: BlockingPublisher) -> None:
    """Add the tasks to the app, by the names of the functions above."""
    entry = _Entry(app, settings, publisher)
    for make_request in (iniciar_coleta, iniciar_execucao, iniciar_pipeline):
        _register(app, make_request, entry)


def _register(app: Celery, make_request: Callable[..., _Request], entry: "_Entry") -> None:
    # The task takes any arguments: of a request with wrong ones, Celery would keep nothing.
    @app.task(bind=True, name=make_request.__name__, max_retries=MAX_RETRIES)  # type: ignore[untyped-decorator, unused-ignore]
    def start(self: Any, *args: Any, **options: Any) -> _Request:
        return entry.start(self, make_request, args, options)


class _Entry:
    """The publisher of requests for runs. One that is refused, or cannot be published, is dead-lettered."""

    def __init__(self, app: Celery, settings: Settings, publisher: BlockingPublisher) -> None:
        self._app = app
        self._requests = settings.broker.prefix + naming.REQUESTS
        self._limits = Limits(settings.limits.payload_bytes, settings.limits.request_bytes)
        self._publisher = publisher
        self._clock = SystemClock()

    def start(
        self, task: Any, make_request: Callable[..., _Request], args: _Arguments, options: dict[str, Any]
    ) -> _Request:
        """Publish a request, and return its message. A task that runs again asks for the same run."""
        fault = None
        try:
            request = make_request(*args, **options)
        except TypeError as error:  # an argument is missing, or one too many
            fault = InvalidRequest(Fault(task.name, str(error)))
            request = {**options, "argumentos": args}
        request["correlation_id"] = run_id = request.get("correlation_id") or str(task.request.id)
        message = {
            "correlation_id": run_id,
            "tipo_evento": naming.START_RUN,
            "payload": request,
            "timestamp": to_iso(self._clock.now()),
        }
        body = _encoded(message)
        try:
            if fault is not None:
                raise fault
            read_request(_encoded(request), self._limits)
            self._publisher.publish(Outgoing(self._requests, body))
        except BrokerUnavailable as error:
            if task.request.retries < MAX_RETRIES:
                pause = _FIRST_PAUSE * 2**task.request.retries
                raise task.retry(exc=error, countdown=pause, max_retries=MAX_RETRIES) from error
            self._give_up(body, f"not published after {MAX_RETRIES} retries: {error}", error)
        except OraculoError as error:  # another attempt would be refused too
            self._give_up(body, str(error), error)
        return message

    def _give_up(self, body: bytes, reason: str, error: Exception) -> None:
        _log.error("a request for a run was given up", reason=reason)
        try:
            self._publisher.publish(Outgoing(self._requests, body, reason=reason))
        except BrokerError:
            self._dead_letter_on_celerys_broker(body, reason)
        raise error

    def _dead_letter_on_celerys_broker(self, body: bytes, reason: str) -> None:
        """Keep the request where the task came from. If both brokers are one RabbitMQ, `oraculo dlq list` shows it."""
        queue = naming.dlq_of(self._requests)
        with self._app.producer_or_acquire() as producer:
            ensure_queue(producer.connection, queue)
            producer.publish(
                body,
                exchange="",
                routing_key=queue,
                content_type="application/json",
                content_encoding="utf-8",
                delivery_mode="persistent",
                headers={naming.AMQP_REASON_HEADER: reason[: naming.LONGEST_REASON]},
                retry=True,
            )


def _encoded(value: object) -> bytes:
    """Encode what a client sent. The standard library also writes half a character, which the reader then refuses."""
    return json.dumps(value, default=msgspec.to_builtins).encode()
