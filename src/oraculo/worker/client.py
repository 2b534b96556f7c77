"""`Client`: starts runs over the broker, and awaits their aggregates."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import structlog

from oraculo.clients.subscription import QueueIntake, Subscription
from oraculo.core.request import Limits, read_request
from oraculo.errors import Conflict, Fault, InvalidInput, InvalidMessage, InvalidRequest, OraculoError
from oraculo.ports.broker import Broker, Delivery, Outgoing, publish_all
from oraculo.ports.clock import Clock, Entropy, SystemClock, SystemEntropy
from oraculo.ports.objects import Objects
from oraculo.wire import naming
from oraculo.wire.json_guard import UNREADABLE
from oraculo.wire.message import Message, decode_message, encode_message
from oraculo.wire.timestamps import in_words, to_iso
from oraculo.worker.large_results import completed
from oraculo.worker.logs import TroubleLog

_PREFETCH = 500
_NO_LIMITS = Limits(payload_bytes=sys.maxsize, request_bytes=sys.maxsize)  # the server checks its own limits

_log = structlog.get_logger("oraculo.client")


class Client:
    """A client that starts runs over the broker, without HTTP.

    Many calls of `run` may wait at once: they share one reply queue and one consumer. Use the client as an `async`
    context manager, or call `close`. The client starts the broker that it is given, and does not close it.

    Args:
        broker: The broker that the engine reads.
        prefix: The engine's `ORACULO_PREFIX`.
        reply_queue: A queue that only this process reads. Without it, each client makes a queue that stays on the
            broker. Name one if your process starts often.
        objects: The engine's object store. With it, `run` also returns large results that the aggregate only names.
    """

    def __init__(
        self,
        broker: Broker,
        prefix: str = "",
        clock: Clock | None = None,
        entropy: Entropy | None = None,
        *,
        reply_queue: str | None = None,
        objects: Objects | None = None,
    ) -> None:
        self._broker = broker
        self._objects = objects
        self._names = naming.QueueNames(prefix)
        self._clock = clock or SystemClock()
        self._entropy = entropy or SystemEntropy()
        self._reply_queue = self._names.physical(reply_queue or f"respostas.{self._entropy.new_id()}")
        self._awaited: dict[str, asyncio.Future[dict[str, Any]]] = {}
        log_trouble = TroubleLog().of_queue
        self._intake = QueueIntake(broker, self._reply_queue, _PREFETCH, self._receive, self._entropy, log_trouble)
        self._subscribing = asyncio.Lock()
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._broker.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.close()

    async def submit(self, request: Mapping[str, Any], *, correlation_id: str | None = None) -> str:
        """Start a run and return its id, without waiting. `request` is the body of `POST /orquestracoes`.

        Raises:
            InvalidRequest: if the request breaks the schema.
            BrokerUnavailable: if the request was perhaps not sent. Call again with the same `correlation_id`: there
                will be one run.
        """
        run_id = self._id_of(request, correlation_id)
        await self._send(run_id, request)
        return run_id

    async def run(
        self, request: Mapping[str, Any], *, timeout: float, correlation_id: str | None = None
    ) -> dict[str, Any]:
        """Start a run, wait for its end and return its aggregate, whatever its status.

        Raises:
            TimeoutError: if no aggregate came in `timeout` seconds. Either the run goes on, or the engine refused the
                request, or the run had ended before this call. The message names the run.
            InvalidRequest: if the request breaks the schema, or sets `responder_em`.
            BrokerUnavailable: if the request was perhaps not sent.
            Conflict: if this client waits for the same run already.
            OraculoError: if Python cannot read the aggregate, or the client was closed meanwhile.
        """
        if request.get("responder_em") is not None:
            raise InvalidRequest(Fault("responder_em", "is set by run(); use submit() to have another queue answered"))
        run_id = self._id_of(request, correlation_id)
        if run_id in self._awaited:
            raise Conflict(f"run {run_id} is awaited by this client already")
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._awaited[run_id] = answer
        try:
            async with asyncio.timeout(timeout):
                await self._listen()
                await self._send(run_id, {**request, "responder_em": self._names.logical(self._reply_queue)})
                aggregate = await answer
                return aggregate if self._objects is None else await completed(self._objects, aggregate)
        except TimeoutError:
            raise TimeoutError(self._unanswered(run_id, timeout)) from None
        finally:
            del self._awaited[run_id]

    async def close(self) -> None:
        """Stop listening. Calls of `run` that still wait raise OraculoError. You may close a client twice."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
        await self._intake.close()
        for run_id, answer in self._awaited.items():
            if not answer.done():
                answer.set_exception(OraculoError(f"the client was closed while it waited for run {run_id}"))

    def _unanswered(self, run_id: str, timeout: float) -> str:
        return (
            f"run {run_id}: no answer in {in_words(timeout)}; see `oraculo runs show`, or, for a refused request, "
            f"look in {naming.dlq_of(self._names.requests)} (`oraculo dlq list {naming.REQUESTS}`)"
        )

    def _unread(self, run_id: str, error: InvalidInput) -> str:
        place = naming.dlq_of(self._reply_queue)
        return f"run {run_id} ended: {error}. It is kept in {place}, and `oraculo runs show` shows it"

    def _id_of(self, request: Mapping[str, Any], correlation_id: str | None) -> str:
        return correlation_id or request.get("correlation_id") or self._entropy.new_id()

    async def _send(self, run_id: str, request: Mapping[str, Any]) -> None:
        payload = msgspec.json.encode({**request, "correlation_id": run_id})
        read_request(payload, _NO_LIMITS)  # a fault is raised here and now, not by a run that never comes
        message = Message(
            correlation_id=run_id,
            tipo_evento=naming.START_RUN,
            payload=msgspec.Raw(payload),
            timestamp=to_iso(self._clock.now()),
        )
        await publish_all(self._broker, [Outgoing(self._names.requests, encode_message(message))])

    async def _listen(self) -> None:
        """Open the reply queue once; further callers wait for the first."""
        async with self._subscribing:
            if self._listener is None:
                await self._intake.subscribe()
                self._listener = asyncio.create_task(self._intake.run(), name="oraculo-replies")

    async def _receive(self, subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
        good: list[Delivery] = []
        for delivery in deliveries:
            try:
                self._resolve(decode_message(delivery.body))
                good.append(delivery)
            except InvalidInput as error:
                if await subscription.dead_letter(delivery, str(error)):
                    _log.warning("dead-lettered", queue=delivery.queue, reason=str(error))
        await subscription.ack(good)

    def _resolve(self, message: Message) -> None:
        """Hand an aggregate to the call that waits for it; pass over amendments and runs that nobody awaits."""
        answer = self._awaited.get(message.correlation_id)
        if message.tipo_evento == naming.RUN_ENDED and answer is not None and not answer.done():
            try:
                answer.set_result(msgspec.json.decode(message.payload))
            except UNREADABLE as error:  # a worker of another language wrote a number that Python cannot hold, say
                unreadable = InvalidMessage.at("payload", f"the aggregate cannot be read here: {error}")
                answer.set_exception(OraculoError(self._unread(message.correlation_id, unreadable)))
                raise unreadable from None
