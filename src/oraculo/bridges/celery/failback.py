"""Brings a Celery worker back to the first RabbitMQ of a list.

Celery goes to the next broker when one is lost, and stays there. The orchestrator sends to the first as soon as it is
back, so the worker must return too: it drops its connection, and Celery connects to the first again.
"""

import contextlib
import threading
from typing import Any

import kombu
import structlog
from celery import bootsteps

from oraculo.bridges.celery.connections import CONNECT_TIMEOUT, close, cut

_LOOK_EVERY = 5.0  # seconds

_log = structlog.get_logger("oraculo.celery")


class BackToFirst(bootsteps.StartStopStep):  # type: ignore[misc, unused-ignore]
    requires = ("celery.worker.consumer:Connection",)

    def __init__(self, c: Any, **options: Any) -> None:
        super().__init__(c, **options)
        self._ended = threading.Event()

    def start(self, c: Any) -> None:
        self._ended = threading.Event()
        first = first_of(c.connection)
        if first is not None:
            _log.warning("works with another broker until the first is back", broker=c.connection.as_uri())
            watch = (c.connection, first, self._ended)
            threading.Thread(target=_return, args=watch, name="oraculo-first-broker", daemon=True).start()

    def stop(self, _c: Any) -> None:
        self._ended.set()


def first_of(connection: kombu.Connection) -> kombu.Connection | None:
    """Return a connection to the first broker of the list, or None if this connection leads there."""
    if not connection.alt or connection.transport.driver_type != "amqp":
        return None
    first = type(connection)(connection.alt[0], connect_timeout=CONNECT_TIMEOUT)
    return None if _place(first) == _place(connection) else first


def _place(connection: kombu.Connection) -> tuple[Any, ...]:
    """Return host, port and virtual host in one form: kombu changes the first two when it opens a connection."""
    host = "127.0.0.1" if connection.hostname == "localhost" else connection.hostname
    default = 5671 if connection.ssl else connection.transport.default_port
    return host, connection.port or default, connection.virtual_host or "/"


def _return(connection: kombu.Connection, first: kombu.Connection, ended: threading.Event) -> None:
    while not ended.wait(_LOOK_EVERY):
        if _can_be_reached(first) and not ended.is_set():
            _log.info("the first broker is back", broker=first.as_uri())
            cut(connection)
            return


def _can_be_reached(broker: kombu.Connection) -> bool:
    with contextlib.suppress(Exception):  # whatever it is, the broker is not there yet
        broker.connect()
        return True
    close(broker)
    return False
