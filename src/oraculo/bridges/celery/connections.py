"""Celery's broker, spoken to with kombu: it blocks, so each of these lives in a thread of its own.

Whatever goes wrong with the connection is CeleryAway, which says where and why, without the password. What the broker
says no to, though it can be reached, is TaskRefused: it concerns one queue or one task, and must not hold up others.
"""

import contextlib
import re
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self

import kombu
import structlog
from amqp.exceptions import AccessRefused, ContentTooLarge, MessageNacked, PreconditionFailed, ResourceLocked
from amqp.exceptions import NotFound as QueueMissing
from kombu.exceptions import OperationalError

from oraculo.bridges.celery.secured import SecuredConnection
from oraculo.bridges.celery.tasks import Task
from oraculo.clients.kombu_redis import missing_for_kombu
from oraculo.errors import Fault, InvalidSettings
from oraculo.wire.answers import describe

CONNECT_TIMEOUT = 3.0
SEND_TIMEOUT = 5.0  # until a broker that does not confirm counts as lost
SETUP_TIMEOUT = 10.0  # for what is asked of the broker once for each connection
NOT_YET = "Celery's broker has not been reached yet"
HEARTBEAT = 10  # seconds, where the broker knows such a thing
_LEASE = 30  # seconds after which a report that a dead bridge held is read by another; RabbitMQ needs none
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_MOST_KNOWN = 10_000  # queues; then all are looked for again
_MOST_TROUBLES = 16  # different ones that are told once each: every broker of a list may have its own
# RabbitMQ 4 drops what was given back 20 times, unless the queue says otherwise: a report comes again whenever a bridge
# stops, or our own broker is away for longer than a delivery may be held.
_NO_LIMIT = 1_000_000_000
# Not QueueMissing: RabbitMQ says that too of a queue whose node is down, and comes back.
_REFUSALS = (AccessRefused, ResourceLocked, PreconditionFailed, ContentTooLarge)

_DATABASE = re.compile(r"/?\d*")  # of a Redis, as its URL names it

_log = structlog.get_logger("oraculo.celery")


class CeleryAway(Exception):
    """Celery's broker cannot be reached now; worth a retry."""


class QueueAway(CeleryAway):
    """One queue cannot take a task now: it is full, or its node is down. The others may."""


class TaskRefused(Exception):
    """This one task is not taken, though the broker can be reached, or cannot be sent at all."""


class Address:
    """Where Celery's broker is, and the place there that is ours. Raises InvalidSettings."""

    def __init__(self, url: str, key_prefix: str, replies: str) -> None:
        self._url = url
        self._key_prefix = key_prefix
        self._has_noted = False
        self.is_amqp = url.partition(":")[0].lower() in ("amqp", "amqps", "pyamqp", "librabbitmq")
        self.is_redis = url.partition(":")[0].lower() in ("redis", "rediss")
        # A quorum queue, as our own are: it is the one place where results wait while the bridge is away.
        arguments = {"x-queue-type": "quorum", "x-delivery-limit": _NO_LIMIT} if self.is_amqp else None
        exchange = kombu.Exchange(replies, "direct", durable=True)
        self.replies = kombu.Queue(replies, exchange, routing_key=replies, durable=True, queue_arguments=arguments)
        if fault := self._fault():
            raise InvalidSettings(Fault("ORACULO_CELERY_BROKER_URL", fault))

    def declare_replies(self, connection: kombu.Connection) -> None:
        """A queue that is there is used as it is, whatever its arguments: reports may rest in it."""
        try:
            with _channel(connection) as channel:
                self.replies(channel).declare()
        except PreconditionFailed as error:
            self._note_foreign_replies(error)
            with _channel(connection) as channel:
                as_it_is = self.replies(channel)
                as_it_is.queue_declare(passive=True)
                as_it_is.queue_bind()

    def bind_replies(self, connection: kombu.Connection, channel: Any) -> None:
        """For a broker that lost what was declared, as a Redis that was emptied: reports would vanish there for ever.
        Not the queue: whoever consumes from it is told when it goes."""
        if self.is_redis:
            channel.state.clear()  # else kombu, which remembers what it bound, would not do it again
        asking = _channel(connection) if self.is_amqp else contextlib.nullcontext(channel)
        with _Fuse(connection):
            with contextlib.suppress(PreconditionFailed), asking as own:  # somebody's, with other arguments, is there
                self.replies.exchange(own).declare()
            self.replies(channel).queue_bind()

    def _note_foreign_replies(self, error: PreconditionFailed) -> None:
        if not self._has_noted:
            self._has_noted = True
            advice = "docs/reference/limits-bridges.md says how to lift its delivery limit, if it has one"
            _log.warning(
                "the queue of replies is used as it is", queue=self.replies.name, reason=str(error), mend=advice
            )

    def _fault(self) -> str | None:
        if lacking := missing_for_kombu(self._url):
            return lacking
        unknown = "is no broker that kombu knows"
        if "://" not in self._url:
            return f"{unknown}: it needs a scheme, as pyamqp://guest@localhost// or redis://localhost/0"
        if any(broker.strip().lower().startswith("sentinel:") for broker in self._url.split(";")):
            return "cannot lead to Sentinel: name the Redis that is the master itself, as redis://localhost:6379/0"
        try:
            connection = self.connection()
            for _ in range(self._url.count(";") + 1):
                if fault := _place_fault(connection):
                    return fault
                connection.maybe_switch_next()
        except ValueError:
            return f"{unknown}: it cannot be read; a ':', '@' or '/' in a password is written %3A, %40, %2F"
        except Exception as error:  # noqa: BLE001 - kombu looks for the transport's package, which may raise anything
            return f"{unknown}: {error}"
        return None

    def connection(self, *, heartbeat: float = 0) -> kombu.Connection:
        return SecuredConnection(
            self._url,
            connect_timeout=CONNECT_TIMEOUT,
            heartbeat=heartbeat if self.is_amqp else 0,
            transport_options=self._options(),
        )

    def connect(self, connection: kombu.Connection) -> None:
        """To the first of the list that can be reached, so that whoever sends and whoever listens come to the same.
        kombu's own `connect` tries two of them only."""
        tries = max(len(connection.alt), 1)
        connection.ensure_connection(max_retries=tries, interval_start=0, interval_step=0, interval_max=0)

    def _options(self) -> dict[str, Any]:
        if self.is_amqp:
            return {"confirm_publish": True, "read_timeout": SEND_TIMEOUT * 2, "write_timeout": SEND_TIMEOUT}
        if not self.is_redis:
            return {}
        # What was delivered and not acked is kept under names of our own: giving it back after a short time must not
        # touch the tasks that Celery's own workers hold for long.
        own = f"{self.replies.name}.unacked"
        options = {
            "socket_timeout": SEND_TIMEOUT,
            "socket_connect_timeout": CONNECT_TIMEOUT,
            "socket_keepalive": True,
            "visibility_timeout": _LEASE,
            "unacked_key": own,
            "unacked_index_key": f"{own}_index",
            "unacked_mutex_key": f"{own}_mutex",
            "unacked_mutex_expire": _LEASE,
        }
        return options | ({"global_keyprefix": self._key_prefix} if self._key_prefix else {})

    @contextlib.contextmanager
    def faults(self, connection: kombu.Connection) -> Iterator[None]:
        """Raises CeleryAway for whatever a broken connection raises."""
        try:
            yield
        except (MessageNacked, QueueMissing) as error:
            raise QueueAway(f"Celery's broker at {connection.as_uri()}: {_told(error)}") from error
        except (
            OperationalError,
            OSError,
            *connection.connection_errors,
            *connection.channel_errors,
        ) as error:
            raise CeleryAway(f"Celery's broker at {connection.as_uri()}: {_told(error)}") from error


def _place_fault(connection: kombu.Connection) -> str | None:
    """What kombu would trip over at every attempt, or take without a word. Raises for a transport that it has not."""
    kind = connection.transport.driver_type  # connects to nothing yet
    if kind == "memory":
        return "leads to a memory of this process, where no Celery worker reads: name the broker of your Celery app"
    if kind == "redis" and not _DATABASE.fullmatch(connection.virtual_host or ""):
        return "has a path that is not the number of a Redis database, as redis://localhost:6379/0"
    return None


class _Fuse:
    """Cuts a connection on which no answer comes: some of kombu's waits have no limit of their own, and a broker that
    has just started may leave one of them for ever."""

    def __init__(self, connection: kombu.Connection) -> None:
        self._timer = threading.Timer(SETUP_TIMEOUT, cut, [connection])
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        self._timer.cancel()


def cut(connection: kombu.Connection) -> None:
    """From any thread: the one that uses it finds it broken."""
    with contextlib.suppress(Exception):  # it may be gone already; Redis' client has limits for all that it does
        connection._connection.sock.shutdown(socket.SHUT_RDWR)


def limit_waits(connection: kombu.Connection, seconds: float) -> None:
    """Of one to a RabbitMQ, which has no limit by itself once it is open."""
    with contextlib.suppress(Exception):  # it may be gone already
        connection._connection.sock.settimeout(seconds)


class TaskSender:
    """Publishes tasks, each confirmed. Used from one thread at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: kombu.Connection | None = None
        self._producer: kombu.Producer | None = None
        self._known: set[str] = set()  # queues that are there

    def send(self, task: Task) -> None:
        """Raises CeleryAway, or TaskRefused. After CeleryAway it may have been taken all the same."""
        try:
            self._send(task)
        except (CeleryAway, TaskRefused):
            raise
        except Exception as error:  # as for a name that AMQP has no room for: no other task may suffer from it
            self.close()
            raise TaskRefused(f"the task cannot be sent to Celery's queue {task.queue}: {describe(error)}") from error

    def _send(self, task: Task) -> None:
        connection = self._opened()
        try:
            with self._address.faults(connection), _refusals():
                self._ensure_queue(connection, task.queue)
                self._publish(connection, task)
        except QueueAway as error:
            self._drop_producer()
            raise QueueAway(f"the queue {task.queue} takes nothing now: {error}") from error
        except CeleryAway:
            self.close()
            raise
        except TaskRefused:
            self._drop_producer()
            raise

    def _opened(self) -> kombu.Connection:
        if self._connection is None:
            connection = self._address.connection()
            try:
                with self._address.faults(connection), _Fuse(connection):
                    self._address.connect(connection)
                    # Before any task is sent: what it reports would otherwise find no place.
                    self._address.declare_replies(connection)
            except CeleryAway:
                _close(connection)
                raise
            self._connection = connection
        return self._connection

    def _ensure_queue(self, connection: kombu.Connection, name: str) -> None:
        if name not in self._known:
            with _Fuse(connection):
                ensure_queue(connection, name)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known.add(name)

    def _publish(self, connection: kombu.Connection, task: Task) -> None:
        limits = {"mandatory": True, "confirm_timeout": SEND_TIMEOUT} if self._address.is_amqp else {}
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
        """Its channel may not be what it was."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(Exception):
                producer.channel.close()

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        self._known.clear()
        if connection is not None:
            _close(connection)


class Listener(threading.Thread):
    """Keeps a connection in a thread of its own, and makes it again, after a pause, whenever it breaks. `tell` hears of
    each new trouble, in that thread."""

    def __init__(
        self,
        name: str,
        address: Address,
        listen: Callable[["Listener", kombu.Connection], None],
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._address = address
        self._listen = listen
        self._tell = tell
        self._stopping = threading.Event()
        self._told: deque[str] = deque(maxlen=_MOST_TROUBLES)
        self.trouble: str | None = NOT_YET

    def run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            connection = self._address.connection(heartbeat=HEARTBEAT)
            try:
                with self._address.faults(connection), _Fuse(connection) as self._fuse:
                    self._address.connect(connection)
                    self._listen(self, connection)
            except CeleryAway as error:
                self._note(str(error))
            except Exception as error:  # noqa: BLE001 - the thread must outlive any fault, and tell it
                self._note(f"listening to Celery's broker failed: {type(error).__name__}: {error}")
            finally:
                _close(connection)
            # A connection that had worked is tried again at once.
            pause = _FIRST_PAUSE if self._worked() else min(pause * 2, _LONGEST_PAUSE)
            self._stopping.wait(pause)

    def _note(self, trouble: str) -> None:
        if trouble not in self._told:
            self._told.append(trouble)
            self._tell(trouble)
        self.trouble = trouble

    _ready = False

    def _worked(self) -> bool:
        worked, self._ready = self._ready, False
        return worked

    def is_ready(self) -> None:
        """Called by what listens, once it does."""
        self._fuse.remove()
        self._ready = True
        self._told.clear()
        self.trouble = None

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def drain(self, connection: kombu.Connection, timeout: float) -> None:
        """Handles what arrives, for at most that long, and keeps the connection alive."""
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=timeout)
        if self._address.is_amqp:
            connection.heartbeat_check()

    def end(self) -> None:
        self._stopping.set()


def try_rights(address: Address, connection: kombu.Connection) -> None:
    """What the bridge does, but for the queues of tasks: it makes the place of the replies, reads there, and sends, to
    a queue that nobody has. Raises TaskRefused, and whatever kombu does."""
    with _refusals("what the bridge does"):
        address.declare_replies(connection)
        if not address.is_amqp:  # on a Redis whoever reads takes it out
            return
        with _channel(connection) as channel:
            channel.basic_qos(0, 1, False)
            channel.basic_consume(address.replies.name, callback=lambda _: None)  # given back with its channel
            nowhere = f"oraculo-doctor-{uuid.uuid4().hex}"
            kombu.Producer(channel).publish({}, exchange="", routing_key=nowhere, confirm_timeout=SEND_TIMEOUT)


def ensure_queue(connection: kombu.Connection, name: str) -> None:
    """Left as it is when it is there, whatever its arguments; else made as Celery's own clients make it."""
    queue = kombu.Queue(name, kombu.Exchange(name, "direct", durable=True), routing_key=name, durable=True)
    if connection.transport.driver_type != "amqp" or not _exists(connection, queue):
        with _channel(connection) as channel:
            queue(channel).declare()


def _exists(connection: kombu.Connection, queue: kombu.Queue) -> bool:
    try:
        with _channel(connection) as channel:
            queue(channel).queue_declare(passive=True)
    except QueueMissing:
        return False
    return True


def queue_counts(address: Address, name: str) -> tuple[int, int | None]:
    """How many messages wait in a queue, and how many listen to it; None: the broker does not tell. By a connection of
    its own. Raises CeleryAway."""
    connection = address.connection()
    is_amqp = connection.transport.driver_type == "amqp"
    try:
        with address.faults(connection), _Fuse(connection):
            address.connect(connection)
            with _channel(connection) as channel:
                found = kombu.Queue(name, channel=channel).queue_declare(passive=True)
        return int(found.message_count), int(found.consumer_count) if is_amqp else None
    except QueueAway:
        return 0, 0 if is_amqp else None
    finally:
        _close(connection)


@contextlib.contextmanager
def _channel(connection: kombu.Connection) -> Iterator[Any]:
    """One to ask something of the broker. When it says no the channel is not over: the client opens it again."""
    channel: Any = connection.channel()
    try:
        yield channel
    finally:
        with contextlib.suppress(Exception):  # it is gone with its connection
            channel.close()


@contextlib.contextmanager
def _refusals(what: str = "the task") -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not _is_refusal(error):
            raise
        raise TaskRefused(f"Celery's broker refused {what}: {_told(error)}") from error


def _is_refusal(error: Exception) -> bool:
    """Redis' other answers of this kind (it is read-only, loading, out of memory) mean all that is sent there."""
    is_redis_refusal = type(error).__name__ == "NoPermissionError" or "WRONGTYPE " in str(error)
    return isinstance(error, _REFUSALS) or is_redis_refusal


def _close(connection: kombu.Connection) -> None:
    with contextlib.suppress(Exception):
        connection.release()


def _told(error: BaseException) -> str:
    """Not all of kombu's errors have a text."""
    text = str(error) or type(error).__name__
    return text if error.__cause__ is None or str(error.__cause__) in text else f"{text} ({error.__cause__})"
