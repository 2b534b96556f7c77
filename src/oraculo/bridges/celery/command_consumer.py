"""Reads plain JSON commands inside a Celery worker, and gives each to Celery as a task.

So pools, autoscale, time limits, rate limits, revoking, events and Flower are Celery's. Tasks are acked late: a command
leaves its queue when its answer is confirmed, and is delivered again when its pool process is lost.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import kombu
import msgspec
import structlog
from celery import Celery, bootsteps
from celery.signals import task_revoked
from celery.worker.request import Request
from kombu.common import ignore_errors

from oraculo.bridges.celery.handlers import HandlerTask
from oraculo.bridges.celery.publisher import BlockingPublisher
from oraculo.bridges.celery.tasks import task_headers, task_id_of
from oraculo.errors import BrokerError, InvalidInput
from oraculo.ports.broker import Outgoing
from oraculo.ports.clock import SystemClock
from oraculo.ports.objects import Objects
from oraculo.settings import Settings
from oraculo.wire import naming
from oraculo.wire.message import Message
from oraculo.wire.timestamps import from_iso
from oraculo.worker.dispatch import DEADLINE_GRACE, read_command
from oraculo.worker.handlers import Handler

_KILL_GRACE = 10.0  # seconds between the soft limit and the hard one, which kills the process

_log = structlog.get_logger("oraculo.celery")

_Limits = tuple[float | None, float | None]


def register_handlers(
    app: Celery,
    handlers: Sequence[Handler],
    publisher: BlockingPublisher,
    settings: Settings,
    make_objects: Callable[[], Objects | None],
) -> None:
    """Add a task for each handler, by the name of its queue, and the step that reads their queues."""
    names, tasks = naming.QueueNames(settings.broker.prefix), dict[str, HandlerTask]()
    for handler in handlers:
        task = HandlerTask(handler, publisher, settings, make_objects)
        tasks[names.physical(handler.queue)] = task
        _register(app, task)
    # Celery makes the step by itself, without arguments.
    app.steps["consumer"].add(type("Commands", (CommandConsumer,), {"tasks": tasks, "publisher": publisher}))
    task_revoked.connect(_on_revoked, weak=False)


def _register(app: Celery, task: HandlerTask) -> None:
    @app.task(  # type: ignore[untyped-decorator, unused-ignore]
        name=task.handler.queue,
        acks_late=True,
        reject_on_worker_lost=True,
        ignore_result=True,
        handler_task=task,
        Request=f"{CommandRequest.__module__}:{CommandRequest.__name__}",
    )
    def run(text: str) -> str:
        return task.run(text)


class CommandRequest(Request):  # type: ignore[misc, unused-ignore]
    """A request that is answered even if Celery kills its process at the hard time limit."""

    def on_timeout(self, soft: bool, timeout: float) -> None:
        if not soft and not _refuse(self.task, self._args, f"TimeLimitExceeded: killed after {timeout:g} s"):
            self.reject(requeue=True)  # else it would be acked below, without an answer
        super().on_timeout(soft, timeout)


def _on_revoked(sender: Any, request: Any, terminated: bool, signum: Any, **_: Any) -> None:
    how = f"someone terminated it (signal {signum})" if terminated else "someone revoked it"
    _refuse(sender, request.args, f"TaskRevokedError: {how}", retry=False)


def _refuse(task: Any, args: Any, reason: str, *, retry: bool = True) -> bool:
    """Answer a command of ours with a failure. False: the answer could not be published."""
    handler_task = getattr(task, "handler_task", None)
    if isinstance(handler_task, HandlerTask) and args:
        try:
            handler_task.refuse(args[0], reason, retry=retry)
        except Exception as error:  # noqa: BLE001 - the worker must go on
            queue = handler_task.handler.queue
            _log.warning("the end of a task could not be answered", queue=queue, reason=str(error))
            return False
    return True


class CommandConsumer(bootsteps.StartStopStep):  # type: ignore[misc, unused-ignore]
    """A step of Celery's worker, behind its own consumer."""

    requires = ("celery.worker.consumer:Tasks",)
    tasks: Mapping[str, HandlerTask]  # by queue
    publisher: BlockingPublisher
    _queues: Sequence[Any] = ()

    def start(self, c: Any) -> None:
        self.publisher.declare(list(self.tasks))
        self._limits = _limits_of(c)
        self._clock = SystemClock()
        self._start_task = c.create_task_handler()
        self._queues = [self._queue(c, name, task.handler.concurrency) for name, task in self.tasks.items()]
        if c.hub is None:
            self._consume()

    def register_with_event_loop(self, _c: Any, hub: Any) -> None:
        hub.call_soon(self._consume)  # before that, the pool would take nothing

    def _queue(self, c: Any, name: str, limit: int | None) -> Any:
        """Return a queue on a channel of its own, because quorum queues allow a prefetch only for a whole channel."""
        places = max(c.controller.max_concurrency or 0, c.controller.concurrency or 0, 1)
        channel = c.connection.channel()
        channel.basic_qos(0, min(limit or places, places), False)
        return kombu.Queue(name, no_declare=True, channel=channel)

    def _consume(self) -> None:
        """Read each queue, without waiting for RabbitMQ's word: of a queue without a majority, none ever comes."""
        for queue in self._queues:
            queue.consume(queue.name, partial(self._received, queue), nowait=True)

    def stop(self, c: Any) -> None:
        """Read no more. The channels stay open, because commands in work are acked on them."""
        for queue in self._queues:
            ignore_errors(c, partial(queue.channel.basic_cancel, queue.name, nowait=True))

    def _received(self, queue: Any, delivery: Any) -> None:
        message = queue.channel.message_to_python(delivery)
        try:
            command = read_command(_body_of(message))
        except InvalidInput as error:
            self._dead_letter(queue.name, message, str(error))
            return
        self._make_task_of(message, self.tasks[queue.name].handler.queue, command)
        self._start_task(message)

    def _make_task_of(self, message: Any, name: str, command: Message) -> None:
        """Turn a delivery into a Celery message, in memory only: the broker gets back what came."""
        text = _body_of(message).decode()
        hard, soft = self._time_limits(command)
        message.headers, _ = task_headers(
            task_id_of(command),
            name,
            arguments=f"{command.correlation_id} {command.tarefa or ''} {command.tentativa or ''}".strip(),
            time_limit=hard,
            soft_time_limit=soft,
            ignore_result=True,
        )
        message.content_type, message.content_encoding = "application/json", "utf-8"
        embed = dict.fromkeys(("callbacks", "errbacks", "chain", "chord"))
        message.body = msgspec.json.encode([[text], {}, embed]).decode()

    def _time_limits(self, command: Message) -> _Limits:
        """Return the hard and soft limit: the command's deadline, or the worker's own limits where they are shorter.

        Celery looks at the hard limit only after the soft one, so a soft limit that comes later is left out.
        """
        hard, soft = self._limits
        deadline = None if command.prazo is None else from_iso(command.prazo)
        if deadline is None:
            return hard, soft
        left = max(0.0, deadline - self._clock.now()) + DEADLINE_GRACE
        hard, soft = min(hard or left + _KILL_GRACE, left + _KILL_GRACE), min(soft or left, left)
        return hard, soft if soft < hard else None

    def _dead_letter(self, queue: str, message: Any, reason: str) -> None:
        try:
            self.publisher.publish(Outgoing(queue, _body_of(message), reason=reason))
        except BrokerError as error:
            _log.warning("a message could not be dead-lettered; it comes again", queue=queue, reason=str(error))
            message.requeue()
        else:
            _log.warning("dead-lettered", queue=queue, reason=reason)
            message.ack()


def _limits_of(c: Any) -> _Limits:
    conf = c.app.conf
    hard = c.controller.time_limit or conf.task_time_limit
    soft = c.controller.soft_time_limit or conf.task_soft_time_limit
    return hard, soft


def _body_of(message: Any) -> bytes:
    """Return the body as bytes. The client has decoded it where the publisher named an encoding."""
    body = message.body
    return body.encode() if isinstance(body, str) else bytes(body)
