"""Celery's broker over kombu: where it is, how it is reached, and what its errors mean.

kombu blocks, so each connection belongs to one thread. A broken connection raises CeleryUnavailable, which names the
broker without its password. TaskRefused concerns one queue or task, so that the others go on.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, Self

import kombu
from amqp.exceptions import AccessRefused, ContentTooLarge, MessageNacked, PreconditionFailed, ResourceLocked
from amqp.exceptions import NotFound as QueueMissing
from kombu.exceptions import OperationalError

from oraculo.bridges.celery.tls import SecuredConnection
from oraculo.errors import Fault, InvalidSettings, how_to_add

CONNECT_TIMEOUT = 3.0  # seconds
SEND_TIMEOUT = 5.0  # seconds for a confirm; then the broker counts as lost
SETUP_TIMEOUT = 10.0  # seconds for what opens a connection
HEARTBEAT = 10  # seconds between two of RabbitMQ's heartbeats
# Seconds after which Redis delivers again what a dead bridge held. RabbitMQ sees by itself that the bridge is dead.
_VISIBILITY_TIMEOUT = 30
# RabbitMQ 4 drops a message after 20 deliveries unless its queue sets a limit. A reply is delivered anew at each stop
# of a bridge, so it may need more.
_DELIVERY_LIMIT = 1_000_000_000
_AMQP = {"amqp", "amqps", "pyamqp"}
_REDIS = {"redis", "rediss", "redis+socket"}
# RabbitMQ reports a queue on a stopped node as missing, so QueueMissing is no refusal: the queue may come back.
_REFUSALS = (AccessRefused, ResourceLocked, PreconditionFailed, ContentTooLarge)


class CeleryUnavailable(Exception):
    """Celery's broker cannot be reached now. A later attempt may work."""


class CeleryQueueUnavailable(CeleryUnavailable):
    """One queue takes no task now, because it is full or its node is down. Other queues may."""


class TaskRefused(Exception):
    """One task can never be sent, although the broker can be reached."""


class CeleryBroker:
    """The broker of a Celery app, and the queue there for the replies of its tasks.

    Raises InvalidSettings if kombu cannot use the URL.
    """

    def __init__(self, url: str, key_prefix: str = "", reply_queue: str = "") -> None:
        self._url = url
        self._key_prefix = key_prefix
        schemes = {scheme_of(each) for each in url.split(";")}
        self.is_amqp = schemes <= _AMQP
        self.is_redis = schemes <= _REDIS
        arguments = {"x-queue-type": "quorum", "x-delivery-limit": _DELIVERY_LIMIT} if self.is_amqp else None
        exchange = kombu.Exchange(reply_queue, "direct", durable=True)
        self.replies = kombu.Queue(
            reply_queue, exchange, routing_key=reply_queue, durable=True, queue_arguments=arguments
        )
        if fault := self._url_fault():
            raise InvalidSettings(Fault("ORACULO_CELERY_BROKER_URL", fault))

    def _url_fault(self) -> str | None:
        if not (self.is_amqp or self.is_redis):
            return "must lead to RabbitMQ or Redis, as pyamqp://guest@localhost// or redis://localhost/0"
        if missing := missing_package(self._url):
            return missing
        try:
            connection = self.connection()
            for _ in self._url.split(";"):
                connection.maybe_switch_next()
        except ValueError:
            return "cannot be read; a ':', '@' or '/' in a password is written %3A, %40, %2F"
        except TypeError as error:  # an unknown TLS parameter
            return f"cannot be used: {error}"
        return None

    def connection(self, *, heartbeat: float = 0) -> kombu.Connection:
        return SecuredConnection(
            self._url,
            connect_timeout=CONNECT_TIMEOUT,
            heartbeat=heartbeat if self.is_amqp else 0,
            transport_options=self._amqp_options() if self.is_amqp else self._redis_options(),
        )

    def _amqp_options(self) -> dict[str, Any]:
        return {"confirm_publish": True, "read_timeout": SEND_TIMEOUT * 2, "write_timeout": SEND_TIMEOUT}

    def _redis_options(self) -> dict[str, Any]:
        # Unacked replies have keys of their own: with the app's keys, our short timeout would also redeliver tasks
        # that its workers hold.
        unacked = f"{self.replies.name}.unacked"
        options = {
            "socket_timeout": SEND_TIMEOUT,
            "socket_connect_timeout": CONNECT_TIMEOUT,
            "socket_keepalive": True,
            "visibility_timeout": _VISIBILITY_TIMEOUT,
            "unacked_key": unacked,
            "unacked_index_key": f"{unacked}_index",
            "unacked_mutex_key": f"{unacked}_mutex",
            "unacked_mutex_expire": _VISIBILITY_TIMEOUT,
        }
        return options | ({"global_keyprefix": self._key_prefix} if self._key_prefix else {})

    def connect(self, connection: kombu.Connection) -> None:
        """Connect to the first broker of the list that can be reached, so that all connections choose the same one.

        kombu's own `connect` tries only two of them.
        """
        tries = max(len(connection.alt), 1)
        connection.ensure_connection(max_retries=tries, interval_start=0, interval_step=0, interval_max=0)

    def declare_replies(self, channel: Any) -> None:
        """Declare the reply queue, its exchange and their binding, also on a Redis that was emptied."""
        if self.is_redis:
            channel.state.clear()  # kombu remembers what it declared, and would not declare it again
        self.replies(channel).declare()

    @contextlib.contextmanager
    def faults(self, connection: kombu.Connection) -> Iterator[None]:
        """Raise CeleryUnavailable for whatever a broken connection raises."""
        try:
            yield
        except (MessageNacked, QueueMissing) as error:
            raise CeleryQueueUnavailable(f"Celery's broker at {connection.as_uri()}: {_text_of(error)}") from error
        except (OperationalError, OSError, *connection.connection_errors, *connection.channel_errors) as error:
            raise CeleryUnavailable(f"Celery's broker at {connection.as_uri()}: {_text_of(error)}") from error


def scheme_of(url: str) -> str:
    return url.strip().partition(":")[0].lower()


def missing_package(url: str) -> str | None:
    """Return what kombu lacks for a Redis at `url`, or None. kombu's own errors do not name the package."""
    if scheme_of(url) not in _REDIS:
        return None
    try:
        import packaging  # noqa: F401
        import redis  # noqa: F401
    except ImportError as error:
        return f"redis:// needs a package that is not installed ({error.name}): {how_to_add('celery')}"
    return None


class SetupTimeout:
    """A timer that cuts a connection without an answer, because some waits of kombu have no limit."""

    def __init__(self, connection: kombu.Connection, seconds: float = SETUP_TIMEOUT) -> None:
        self._timer = threading.Timer(seconds, cut, [connection])
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        self._timer.cancel()


def cut(connection: kombu.Connection) -> None:
    """Break a connection from any thread. The thread that uses it gets an error."""
    with contextlib.suppress(Exception):  # the socket may be gone; on Redis the client's own timeouts suffice
        connection._connection.sock.shutdown(socket.SHUT_RDWR)


def close(connection: kombu.Connection) -> None:
    with contextlib.suppress(Exception):  # a broken connection may raise anything
        connection.release()


@contextlib.contextmanager
def open_channel(connection: kombu.Connection) -> Iterator[Any]:
    """Open a channel for one question. A refusal closes a channel in RabbitMQ, and the next question needs another."""
    channel: Any = connection.channel()
    try:
        yield channel
    finally:
        with contextlib.suppress(Exception):  # the channel is gone with its connection
            channel.close()


@contextlib.contextmanager
def refusals(what: str = "the task") -> Iterator[None]:
    """Raise TaskRefused for what the broker refuses."""
    try:
        yield
    except Exception as error:
        if not _is_refusal(error):
            raise
        raise TaskRefused(f"Celery's broker refused {what}: {_text_of(error)}") from error


def _is_refusal(error: Exception) -> bool:
    """Other errors of Redis (read-only, loading, out of memory) concern the whole server, not one queue."""
    is_redis_refusal = type(error).__name__ == "NoPermissionError" or "WRONGTYPE " in str(error)
    return isinstance(error, _REFUSALS) or is_redis_refusal


def ensure_queue(connection: kombu.Connection, name: str) -> None:
    """Declare a queue as Celery's clients do, unless it exists: an existing queue keeps its arguments."""
    queue = kombu.Queue(name, kombu.Exchange(name, "direct", durable=True), routing_key=name, durable=True)
    if connection.transport.driver_type == "amqp":
        with contextlib.suppress(QueueMissing), open_channel(connection) as channel:
            queue(channel).queue_declare(passive=True)
            return
    with open_channel(connection) as channel:
        queue(channel).declare()


def _text_of(error: BaseException) -> str:
    """Return an error's text with its cause. Some of kombu's errors have no text of their own."""
    text = str(error) or type(error).__name__
    return text if error.__cause__ is None or str(error.__cause__) in text else f"{text} ({error.__cause__})"
