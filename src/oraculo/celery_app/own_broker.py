"""The Celery app on our own address: no variable of Celery's is put before it, and of several RabbitMQs the first that
can be reached is read."""

import contextlib
import threading
from typing import Any

import kombu
import structlog
from celery import Celery, bootsteps
from celery.app.amqp import AMQP

from oraculo.bridges.celery.connections import CONNECT_TIMEOUT, cut
from oraculo.bridges.celery.secured import SecuredConnection, VerifiedConnection

LOOK_EVERY = 5.0  # seconds between two looks whether the first broker is back

_log = structlog.get_logger("oraculo.celery")


class OwnAMQP(AMQP):  # type: ignore[misc, unused-ignore]
    """For the broker of ORACULO_BROKER_URL."""

    Connection = VerifiedConnection


class TheirAMQP(AMQP):  # type: ignore[misc, unused-ignore]
    """For the broker of ORACULO_CELERY_BROKER_URL."""

    Connection = SecuredConnection


class OwnBrokerCelery(Celery):  # type: ignore[misc, unused-ignore]
    """Celery puts CELERY_BROKER_URL, CELERY_BROKER_READ_URL and CELERY_BROKER_WRITE_URL of the environment before what
    an app says. Set for another app, they would let our worker wait where no command comes."""

    def connection_for_read(self, url: str | None = None, **options: Any) -> Any:
        return super().connection_for_read(url or self._own_url(), **options)

    def connection_for_write(self, url: str | None = None, **options: Any) -> Any:
        return super().connection_for_write(url or self._own_url(), **options)

    def connection(self, hostname: str | None = None, **options: Any) -> Any:
        return super().connection(hostname or self._own_url(), **options)

    def _own_url(self) -> Any:
        return self.conf["broker_url"]  # as an attribute it would be the environment's


class BackToFirst(bootsteps.StartStopStep):  # type: ignore[misc, unused-ignore]
    """Celery goes to the next broker of a list when one is lost, and stays there. The orchestrator uses the first again
    as soon as it is back, so the worker must go back too: it drops its connection, and makes it anew."""

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
            threading.Thread(target=_go_back, args=watch, name="oraculo-first-broker", daemon=True).start()

    def stop(self, _c: Any) -> None:
        self._ended.set()


def first_of(connection: kombu.Connection) -> kombu.Connection | None:
    """The broker that comes before the one that this connection is to; None: it is the first itself."""
    if not connection.alt or connection.transport.driver_type != "amqp":
        return None
    first = type(connection)(connection.alt[0], connect_timeout=CONNECT_TIMEOUT)
    return None if _place(first) == _place(connection) else first


def _place(connection: kombu.Connection) -> tuple[Any, ...]:
    """A connection that was opened has another name for this machine, and a port."""
    host = "127.0.0.1" if connection.hostname == "localhost" else connection.hostname
    default = 5671 if connection.ssl else connection.transport.default_port
    return host, connection.port or default, connection.virtual_host or "/"


def _go_back(connection: kombu.Connection, first: kombu.Connection, ended: threading.Event) -> None:
    while not ended.wait(LOOK_EVERY):
        if _answers(first):
            if not ended.is_set():
                _log.info("the first broker is back", broker=first.as_uri())
                cut(connection)
            return


def _answers(broker: kombu.Connection) -> bool:
    try:
        broker.connect()
    except Exception:  # noqa: BLE001 - whatever it is, it is not there yet
        return False
    finally:
        with contextlib.suppress(Exception):
            broker.release()
    return True
