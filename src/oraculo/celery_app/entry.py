"""The tasks that start runs, for whoever speaks Celery."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog
from celery import Celery

from oraculo.bridges.celery.connections import ensure_queue
from oraculo.celery_app.publishing import Publisher
from oraculo.core.request import Limits, read_request
from oraculo.errors import BrokerError, BrokerUnavailable, Fault, InvalidRequest, OraculoError
from oraculo.ports.broker import Outgoing
from oraculo.ports.clock import Clock
from oraculo.settings import Settings
from oraculo.wire import naming
from oraculo.wire.timestamps import to_iso

MAX_RETRIES = 3
FIRST_PAUSE = 1.0  # seconds; twice as long before each further retry

_SUBJECTS = {"destinos", "tipo", "pipeline"}

_log = structlog.get_logger("oraculo.celery")


class Entry:
    """Publishes requests for runs. What cannot be published at last, or could only be refused, rests in the dead
    letters."""

    def __init__(self, settings: Settings, publisher: Publisher, dead_letters: "DeadLetters", clock: Clock) -> None:
        self._names = naming.QueueNames(settings.broker.prefix)
        self._limits = Limits(settings.limits.payload_bytes, settings.limits.request_bytes)
        self._publisher = publisher
        self._dead_letters = dead_letters
        self._clock = clock

    def start(
        self, task: Any, request: Mapping[str, Any], correlation_id: str | None, lacks: str | None = None
    ) -> dict[str, Any]:
        """Returns the message as it was published. The same task id asks for the same run, however often it runs.
        `lacks`: the argument without which there is nothing to run."""
        run_id = correlation_id or str(task.request.id)
        message = {
            "correlation_id": run_id,
            "tipo_evento": naming.START_RUN,
            "payload": {**request, "correlation_id": run_id},
            "timestamp": to_iso(self._clock.now()),
        }
        body = _encoded(message)
        try:
            if lacks is not None:
                raise InvalidRequest(Fault(lacks, f"is required: it is an argument of {task.name}"))
            read_request(_encoded(message["payload"]), self._limits)
            self._publisher.publish([Outgoing(self._names.requests, body)])
        except BrokerUnavailable as error:
            if task.request.retries < MAX_RETRIES:
                pause = FIRST_PAUSE * 2**task.request.retries
                raise task.retry(exc=error, countdown=pause, max_retries=MAX_RETRIES) from error
            self._give_up(body, f"not published after {MAX_RETRIES} retries: {error}", error)
        except OraculoError as error:  # trying again would not help
            self._give_up(body, str(error), error)
        return message

    def _give_up(self, body: bytes, reason: str, error: Exception) -> None:
        _log.error("a request for a run was given up", reason=reason)
        self._dead_letters.keep(self._names.requests, body, reason)
        raise error


def register_entry(app: Celery, entry: Entry) -> None:
    """Clients send these names as they are, without a module before them. An argument that is missing, or one too many,
    is refused when the request is read, and not by Celery, which would keep nothing of it."""

    @app.task(bind=True, name="iniciar_coleta", max_retries=MAX_RETRIES)  # type: ignore[untyped-decorator, unused-ignore]
    def iniciar_coleta(
        self: Any,
        correlation_id: str | None = None,
        fonte: str | None = None,
        parametros: Mapping[str, Any] | None = None,
        *surplus: Any,
        **options: Any,
    ) -> dict[str, Any]:
        source = naming.source_of(fonte) if isinstance(fonte, str) else fonte  # what it should be, the request says
        payload = {"fonte": source, "parametros": parametros or {}}
        request = {"destinos": [_with_kind(naming.COLLECTOR_PREFIX, fonte)], "payload": payload, **options}
        return entry.start(self, request | _refused(surplus), correlation_id, _lacking("fonte", fonte, options))

    @app.task(bind=True, name="iniciar_execucao", max_retries=MAX_RETRIES)  # type: ignore[untyped-decorator, unused-ignore]
    def iniciar_execucao(
        self: Any,
        correlation_id: str | None = None,
        destino: str | None = None,
        payload: Mapping[str, Any] | None = None,
        *surplus: Any,
        **options: Any,
    ) -> dict[str, Any]:
        request = {"destinos": [_with_kind(naming.PROCESSOR_PREFIX, destino)], "payload": payload or {}, **options}
        return entry.start(self, request | _refused(surplus), correlation_id, _lacking("destino", destino, options))

    @app.task(bind=True, name="iniciar_pipeline", max_retries=MAX_RETRIES)  # type: ignore[untyped-decorator, unused-ignore]
    def iniciar_pipeline(
        self: Any,
        pipeline: str | None = None,
        payload: Mapping[str, Any] | None = None,
        correlation_id: str | None = None,
        *surplus: Any,
        **options: Any,
    ) -> dict[str, Any]:
        request = {"pipeline": pipeline, "payload": payload or {}, **options}
        return entry.start(self, request | _refused(surplus), correlation_id, _lacking("pipeline", pipeline, options))


def _lacking(name: str, value: object, options: Mapping[str, Any]) -> str | None:
    """Not where the options say what is to run: then the request is read as it is."""
    return name if value is None and not options.keys() & _SUBJECTS else None


def _refused(surplus: tuple[Any, ...]) -> dict[str, Any]:
    """As a field that no request has."""
    return {"argumentos_a_mais": surplus} if surplus else {}


def _encoded(value: object) -> bytes:
    """Half of a character, which JSON lets a client send, is written as it came, and refused when it is read."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def _with_kind(kind: str, name: Any) -> Any:
    """What is no text is refused when the request is read."""
    return naming.with_kind(kind, name) if isinstance(name, str) else name


class DeadLetters:
    """With the others of ours; while our broker is away, in a queue of the same name on Celery's, which can be reached
    when a task runs. Where both are one RabbitMQ, `oraculo dlq list` shows either."""

    def __init__(self, app: Celery, publisher: Publisher) -> None:
        self._app = app
        self._publisher = publisher

    def keep(self, queue: str, body: bytes, reason: str) -> None:
        try:
            self._publisher.publish([Outgoing(queue, body, reason=reason)])
        except BrokerError:
            self._keep_with_celery(naming.dlq_of(queue), body, reason)

    def _keep_with_celery(self, name: str, body: bytes, reason: str) -> None:
        with self._app.producer_or_acquire() as producer:
            ensure_queue(producer.connection, name)
            producer.publish(
                body,
                exchange="",
                routing_key=name,
                content_type="application/json",
                content_encoding="utf-8",
                delivery_mode="persistent",
                headers={naming.AMQP_REASON_HEADER: reason[: naming.LONGEST_REASON]},
                retry=True,
            )
