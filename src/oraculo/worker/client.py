"""`Client`: asks for runs over the broker, and awaits what came of them."""

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
from oraculo.ports.broker import Broker, Delivery, Outgoing
from oraculo.ports.clock import Clock, Entropy, SystemClock, SystemEntropy
from oraculo.ports.objects import Objects
from oraculo.wire import naming
from oraculo.wire.json_guard import UNREADABLE
from oraculo.wire.message import Message, decode_message, encode_message
from oraculo.wire.timestamps import in_words, to_iso
from oraculo.worker.large_results import completed
from oraculo.worker.logs import TroubleLog

_PREFETCH = 500
_NO_LIMITS = Limits(payload_bytes=sys.maxsize, request_bytes=sys.maxsize)  # the server's are its own to say

_log = structlog.get_logger("oraculo.client")


class Client:
    """Many `run` calls may be under way at once: they share one reply queue and one consumer.

    The broker belongs to whoever made it; the client starts it (which is idempotent) and does not close it. The
    private reply queue stays on the broker when the client is gone: a process that starts often should pass a
    `reply_queue` of its own, which no other process reads. `objects`, when it is the orchestrator's own object store,
    gives back the large results that an aggregate does not bring along.
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
        tell = TroubleLog().of_queue
        self._intake = QueueIntake(broker, self._reply_queue, _PREFETCH, self._receive, self._entropy, tell)
        self._subscribing = asyncio.Lock()
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._broker.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.close()

    async def submit(self, request: Mapping[str, Any], *, correlation_id: str | None = None) -> str:
        """Asks for a run and returns its id. `request` is the body of `POST /orquestracoes`.

        Raises InvalidRequest when it could only be refused, and BrokerUnavailable when it was perhaps not sent: ask
        again with the same `correlation_id`, and there will be one run.
        """
        run_id = self._id_of(request, correlation_id)
        await self._send(run_id, request)
        return run_id

    async def run(
        self, request: Mapping[str, Any], *, timeout: float, correlation_id: str | None = None
    ) -> dict[str, Any]:
        """Asks for a run and returns its aggregate, whatever its status. Raises TimeoutError, naming the run's id,
        when no answer came in `timeout` seconds. If the run has not ended, it goes on without us. A request that the
        server refused is not answered, nor is one that repeats a run which had ended. Raises OraculoError when the
        aggregate came and Python cannot read it."""
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
        """Stops listening. Calls of `run` that still wait raise OraculoError. Idempotent."""
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
            f"run {run_id}: no answer in {in_words(timeout)}. Either it has not ended, or it had ended before it was "
            f"asked for again (`oraculo runs show` tells), or the request was refused: then the reason is with it in "
            f"{naming.dlq_of(self._names.requests)} (`oraculo dlq list {naming.REQUESTS}`)"
        )

    def _unread(self, run_id: str, error: InvalidInput) -> str:
        place = naming.dlq_of(self._reply_queue)
        return f"run {run_id} ended: {error}. It is kept in {place}, and `oraculo runs show` shows it"

    def _id_of(self, request: Mapping[str, Any], correlation_id: str | None) -> str:
        return correlation_id or request.get("correlation_id") or self._entropy.new_id()

    async def _send(self, run_id: str, request: Mapping[str, Any]) -> None:
        payload = msgspec.json.encode({**request, "correlation_id": run_id})
        read_request(payload, _NO_LIMITS)  # a fault is told here and now, not by a run that never comes
        message = Message(
            correlation_id=run_id,
            tipo_evento=naming.START_RUN,
            payload=msgspec.Raw(payload),
            timestamp=to_iso(self._clock.now()),
        )
        await self._broker.publish([Outgoing(self._names.requests, encode_message(message))])

    async def _listen(self) -> None:
        """The first caller opens the reply queue, the others wait for it."""
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
        """Amendments, repeats and runs that nobody waits for any more are passed over."""
        answer = self._awaited.get(message.correlation_id)
        if message.tipo_evento == naming.RUN_ENDED and answer is not None and not answer.done():
            try:
                answer.set_result(msgspec.json.decode(message.payload))
            except UNREADABLE as error:  # a worker of another language wrote a number that Python cannot hold, say
                unreadable = InvalidMessage.at("payload", f"the aggregate cannot be read here: {error}")
                answer.set_exception(OraculoError(self._unread(message.correlation_id, unreadable)))
                raise unreadable from None
