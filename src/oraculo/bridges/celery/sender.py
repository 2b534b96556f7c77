"""Publishes tasks on Celery's broker. Each is confirmed before `send` returns."""

import contextlib

import kombu

from oraculo.bridges.celery.connections import (
    SEND_TIMEOUT,
    CeleryBroker,
    CeleryQueueUnavailable,
    CeleryUnavailable,
    SetupTimeout,
    TaskRefused,
    close,
    ensure_queue,
    open_channel,
    refusals,
)
from oraculo.bridges.celery.recent import RecentDict
from oraculo.bridges.celery.tasks import CeleryTask
from oraculo.wire.answers import describe

_MAX_KNOWN_QUEUES = 10_000


class TaskSender:
    """A publisher with one connection. Only one thread at a time may use it."""

    def __init__(self, celery_broker: CeleryBroker) -> None:
        self._celery_broker = celery_broker
        self._connection: kombu.Connection | None = None
        self._producer: kombu.Producer | None = None
        self._known_queues = RecentDict[str, None](_MAX_KNOWN_QUEUES)

    def send(self, task: CeleryTask) -> None:
        """Publish a task. Raises TaskRefused, or CeleryUnavailable, after which the task may still have been taken."""
        try:
            self._send(task)
        except CeleryQueueUnavailable as error:
            self._drop_producer()
            raise CeleryQueueUnavailable(f"the queue {task.queue} takes nothing now: {error}") from error
        except CeleryUnavailable:
            self.close()
            raise
        except TaskRefused:
            self._drop_producer()
            raise
        except Exception as error:  # such as a name that is too long for AMQP: only this task fails
            self.close()
            raise TaskRefused(f"the task cannot be sent to Celery's queue {task.queue}: {describe(error)}") from error

    def _send(self, task: CeleryTask) -> None:
        connection = self._opened()
        with self._celery_broker.faults(connection), refusals():
            if task.queue not in self._known_queues:
                with SetupTimeout(connection):
                    ensure_queue(connection, task.queue)
                self._known_queues[task.queue] = None
            self._publish(connection, task)

    def _opened(self) -> kombu.Connection:
        if self._connection is None:
            connection = self._celery_broker.connection()
            try:
                with self._celery_broker.faults(connection), SetupTimeout(connection):
                    self._celery_broker.connect(connection)
                    with open_channel(connection) as channel:  # before the first task, or its reply would be lost
                        self._celery_broker.declare_replies(channel)
            except CeleryUnavailable:
                close(connection)
                raise
            self._connection = connection
        return self._connection

    def _publish(self, connection: kombu.Connection, task: CeleryTask) -> None:
        limits = {"mandatory": True, "confirm_timeout": SEND_TIMEOUT} if self._celery_broker.is_amqp else {}
        self._producer = self._producer or kombu.Producer(connection.channel())
        self._producer.publish(
            task.body,
            exchange="",
            routing_key=task.queue,
            content_type="application/json",
            content_encoding="utf-8",
            headers=task.headers,
            delivery_mode="persistent",
            **task.properties,
            **limits,
        )

    def _drop_producer(self) -> None:
        """Close the producer's channel, which a refusal may have broken."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(Exception):
                producer.channel.close()

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        self._known_queues.clear()
        if connection is not None:
            close(connection)
