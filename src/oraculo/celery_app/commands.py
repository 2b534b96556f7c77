"""Plain JSON commands in a Celery worker: each delivery is dressed as a message of Celery's own, and from there on it
is a task like any other. Pools, autoscale, time limits, rate limits, revoking, events and Flower are Celery's.

The task is acked late: the delivery leaves its queue when the answer is confirmed, and is delivered again when the
process that worked on it was lost.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kombu
import msgspec
import structlog
from celery import Celery, bootsteps
from celery.signals import task_revoked
from celery.worker.request import Request
from kombu.common import ignore_errors

from oraculo.bridges.celery.connections import limit_waits
from oraculo.bridges.celery.tasks import task_id_of
from oraculo.celery_app.performing import Performer
from oraculo.celery_app.publishing import Publisher
from oraculo.errors import BrokerError, InvalidInput
from oraculo.ports.broker import Outgoing
from oraculo.ports.clock import Clock
from oraculo.wire import naming
from oraculo.wire.message import Message
from oraculo.wire.timestamps import from_iso
from oraculo.worker.dispatch import DEADLINE_GRACE, read_command

CLOSE_PATIENCE = 3.0  # seconds for the broker to confirm that the connection is closed
LAST_GRACE = 10.0  # seconds that a handler has to end after it was told that its time is up, before it is killed

_log = structlog.get_logger("oraculo.celery")


class CommandRequest(Request):  # type: ignore[misc, unused-ignore]
    """A process that Celery kills at the hard limit can answer nothing: its parent does."""

    def on_timeout(self, soft: bool, timeout: float) -> None:
        if not soft and not _answer_for(self.task, self._args, f"TimeLimitExceeded: killed after {timeout:g} s"):
            self.reject(requeue=True)  # else it would be acked below, and its run know nothing until its deadline
        super().on_timeout(soft, timeout)


def register_handlers(app: Celery, performers: Mapping[str, Performer], publisher: Publisher, prefix: str) -> None:
    """A task for each handler, by the name of its queue, and the step that feeds them."""
    for queue, performer in performers.items():
        _register(app, queue, performer)
    names = naming.QueueNames(prefix)

    table = {names.physical(queue): performer for queue, performer in performers.items()}
    # Celery makes the step itself, out of its class.
    app.steps["consumer"].add(type("Commands", (PlainCommands,), {"table": table, "broker": publisher}))
    task_revoked.connect(_on_revoked, weak=False)


def _register(app: Celery, queue: str, performer: Performer) -> None:
    @app.task(  # type: ignore[untyped-decorator, unused-ignore]
        name=queue,
        acks_late=True,
        reject_on_worker_lost=True,
        ignore_result=True,
        performer=performer,
        Request=f"{CommandRequest.__module__}:{CommandRequest.__name__}",
    )
    def perform(text: str) -> str:
        return performer.perform(text)


def _on_revoked(sender: Any, request: Any, terminated: bool, signum: Any, **_: Any) -> None:
    how = f"someone terminated it (signal {signum})" if terminated else "someone revoked it"
    _answer_for(sender, request.args, f"TaskRevokedError: {how}", retry=False)


def _answer_for(task: Any, args: Any, reason: str, *, retry: bool = True) -> bool:
    """Whether its run was told, where there is one."""
    performer = getattr(task, "performer", None)
    if isinstance(performer, Performer) and args:
        try:
            performer.refuse(args[0], reason, retry=retry)
        except Exception as error:  # noqa: BLE001 - the worker must go on
            _log.warning("the end of a task could not be told", queue=performer.handler.queue, reason=str(error))
            return False
    return True


class Reader:
    """Of one queue, on a channel of its own. Waits for nothing that the server says of it: a queue without a majority
    says nothing, and all of them are asked in Celery's one loop. What the server refuses closes the channel, and is
    raised where that loop reads."""

    def __init__(self, channel: Any, queue: str, prefetch: int, take: Callable[[Any], None]) -> None:
        # The prefetch counts by channel, and is never global: quorum queues refuse that.
        channel.basic_qos(0, prefetch, False)
        self._channel = channel
        self._queue = kombu.Queue(queue, no_declare=True, channel=channel)
        self._take = take

    def consume(self) -> None:
        self._queue.consume(self._queue.name, self._received, nowait=True)

    def cancel(self) -> None:
        self._channel.basic_cancel(self._queue.name, nowait=True)

    def _received(self, delivery: Any) -> None:
        self._take(self._channel.message_to_python(delivery))


class PlainCommands(bootsteps.StartStopStep):  # type: ignore[misc, unused-ignore]
    """Behind Celery's own consumer, whose strategies it uses."""

    requires = ("celery.worker.consumer:Tasks",)
    readers: Sequence[Reader] = ()
    table: Mapping[str, Performer]
    broker: Publisher

    def start(self, c: Any) -> None:
        self.broker.declare(list(self.table))
        self._app = c.app
        self._limits = _limits_of(c)
        self._clock: Clock = next(iter(self.table.values())).clock
        self._hand_over = c.create_task_handler()
        self.readers = [self._reader(c, queue) for queue in self.table]
        if c.hub is None:
            self._consume()

    def register_with_event_loop(self, _c: Any, hub: Any) -> None:
        """Celery's pool takes nothing before it is on the event loop, where there is one."""
        hub.call_soon(self._consume)

    def _consume(self) -> None:
        for reader in self.readers:
            reader.consume()

    def _reader(self, c: Any, queue: str) -> Reader:
        places = max(c.controller.max_concurrency or 0, c.controller.concurrency or 0, 1)
        limit = self.table[queue].handler.concurrency
        prefetch = min(limit or places, places)
        return Reader(c.connection.channel(), queue, prefetch, lambda message: self._received(queue, message))

    def stop(self, c: Any) -> None:
        """Takes no more. The channels stay: what is in work is acked on them."""
        for reader in self.readers:
            ignore_errors(c, reader.cancel)

    def shutdown(self, c: Any) -> None:
        """All is acked. RabbitMQ confirms the connection's end when each channel has ended, and waits long for one that
        a silent queue holds."""
        limit_waits(c.connection, CLOSE_PATIENCE)

    def _received(self, queue: str, message: Any) -> None:
        try:
            command = read_command(_body_of(message))
        except InvalidInput as error:
            self._quarantine(queue, message, str(error))
            return
        self._dress(message, self.table[queue], command)
        self._hand_over(message)

    def _dress(self, message: Any, performer: Performer, command: Message) -> None:
        """Only here in memory: what is given back to the broker is what came."""
        text = _body_of(message).decode()
        hard, soft = self._time_limits(command)
        made = self._app.amqp.as_task_v2(
            task_id_of(command),
            performer.handler.queue,
            argsrepr=f"{command.correlation_id} {command.tarefa or ''} {command.tentativa or ''}".strip(),
            kwargsrepr="",
            time_limit=hard,
            soft_time_limit=soft,
            ignore_result=True,
            origin="oraculo",
        )
        message.headers = made.headers
        message.content_type, message.content_encoding = "application/json", "utf-8"
        embed = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))
        message.body = msgspec.json.encode([[text], {}, embed]).decode()

    def _time_limits(self, command: Message) -> tuple[float | None, float | None]:
        """The command's deadline, or the worker's own limits where those are shorter. Celery looks at the hard limit
        only after the soft one has passed, so one that comes later than it is left out."""
        hard, soft = self._limits
        deadline = None if command.prazo is None else from_iso(command.prazo)
        if deadline is None:
            return hard, soft
        left = max(0.0, deadline - self._clock.now()) + DEADLINE_GRACE
        hard, soft = min(hard or left + LAST_GRACE, left + LAST_GRACE), min(soft or left, left)
        return hard, soft if soft < hard else None

    def _quarantine(self, queue: str, message: Any, reason: str) -> None:
        try:
            self.broker.publish([Outgoing(queue, _body_of(message), reason=reason)])
        except BrokerError as error:
            _log.warning("a message could not be dead-lettered; it comes again", queue=queue, reason=str(error))
            message.requeue()
        else:
            _log.warning("dead-lettered", queue=queue, reason=reason)
            message.ack()


def _limits_of(c: Any) -> tuple[float | None, float | None]:
    conf = c.app.conf
    hard = c.controller.time_limit or conf.task_time_limit
    soft = c.controller.soft_time_limit or conf.task_soft_time_limit
    return hard, soft


def _body_of(message: Any) -> bytes:
    """A publisher that named an encoding has it decoded by the client on the way here."""
    body = message.body
    return body.encode() if isinstance(body, str) else bytes(body)
