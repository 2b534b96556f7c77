"""A connection to RabbitMQ that can be awaited: pika's callbacks on one side, futures and our errors on the other."""

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

import pika
from pika.exceptions import AMQPError, ChannelClosedByBroker

from oraculo.brokers.address import Address, no_node
from oraculo.brokers.rabbitmq.frames import Connection as RawConnection
from oraculo.brokers.rabbitmq.frames import Receiver
from oraculo.brokers.rabbitmq.transport import LoopServices
from oraculo.errors import BrokerError, BrokerUnavailable

T = TypeVar("T")

HEARTBEAT = 10  # seconds: a peer that is silent for about twice as long is gone
CLOSE_GRACE = 1.0  # seconds that a polite good-bye may take
BLOCKED = "RabbitMQ blocks publishers: low on memory or disk"
CLOSED = "the RabbitMQ broker is closed: call start() first"
ACCESS_REFUSED = 403
NOT_FOUND = 404
LOCKED = 405  # another connection's exclusive queue
PRECONDITION_FAILED = 406
_REFUSALS = {ACCESS_REFUSED: "refused the user", 530: "refused the vhost"}
_PASSING = re.compile(r"is down|limit \(\d+\) is reached")  # words of a refusal that will not last
_LOST = re.compile(r"Stream connection lost: \w+\((?:\d+, )?['\"](.*?)['\"]\)")
_CLOSED_BY = re.compile(r"\((\d{3})\) ['\"](.*?)['\"]\"?,?\)?$")


class Refused(BrokerError):
    """The broker closed the channel because of what was asked on it."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(f"RabbitMQ refused: {text}")


class SharedAttempts(Generic[T]):
    """Attempts by name. Callers who want the same at the same time share one, and may be cancelled without it."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[T]] = {}

    async def result(self, name: str, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = self._under_way.get(name)
        if task is None:
            task = self._under_way[name] = asyncio.create_task(attempt(), name=f"RabbitMQ: {name}")
            task.add_done_callback(partial(self._ended, name))
        await asyncio.wait({task})
        if task.cancelled():
            raise BrokerUnavailable("the broker was closed while it connected")
        return task.result()

    async def cancel(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, name: str, task: "asyncio.Task[T]") -> None:
        del self._under_way[name]
        if not task.cancelled():
            task.exception()  # every caller may have been cancelled; then asyncio would log it


class Channel:
    """A channel whose calls can be awaited. AMQP closes a channel when it refuses something; then this one is done."""

    def __init__(self, connection: RawConnection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self.fault: BrokerError | None = None  # why it closed
        self.on_close: Callable[[BrokerError], None] | None = None
        self._waiting: set[asyncio.Future[Any]] = set()
        self._got: asyncio.Future[Any] | None = None
        self._opened = self._promise()
        self.raw = connection.channel(on_open_callback=partial(_answer, self._opened))
        self.raw.add_on_close_callback(self._closed)

    @property
    def is_open(self) -> bool:
        return self.fault is None and bool(self.raw.is_open)

    def listen(self, receiver: Receiver) -> None:
        self._connection.receivers[self.raw.channel_number] = receiver

    async def opened(self) -> "Channel":
        await self._kept(self._opened)
        return self

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of pika's channel and return the answer. Raises Refused, or BrokerUnavailable when lost."""
        answer = self._promise()
        question = partial(getattr(self.raw, method), **arguments, callback=partial(_answer, answer))
        return (await self._kept(answer, question)).method

    def tell(self, method: str, **arguments: Any) -> None:
        """Call a method of pika's channel without waiting for an answer."""
        self._ask(partial(getattr(self.raw, method), **arguments))

    async def get(self, queue: str) -> int | None:
        """Ask for the next message, once for each channel. Return how many are behind it; None when there is none.

        The message comes to the receiver. pika would decode its properties, and end the connection if it cannot.
        """
        answer = self._got = self._promise()
        self.raw.add_callback(lambda _: _answer(answer, None), [pika.spec.Basic.GetEmpty])
        behind: int | None = await self._kept(answer, partial(self.raw.basic_get, queue, unused))
        return behind

    def got(self, behind: int) -> None:
        """Note that the receiver has what `get` asked for."""
        if self._got is not None:
            _answer(self._got, behind)

    async def close(self) -> None:
        """Close it. Once the server has agreed, what was not settled on it is back in its queue."""
        if self.fault is None:
            closed = self._promise()
            self.abandon()
            with suppress(TimeoutError, BrokerError):  # the error says that it is closed
                async with asyncio.timeout(CLOSE_GRACE):
                    await self._kept(closed)

    def abandon(self) -> None:
        """Close it without waiting for the server to agree."""
        self.on_close = None
        with suppress(AMQPError):  # it is closed, or closing already
            self.raw.close()

    def _ask(self, question: Callable[[], object]) -> None:
        if self.fault is not None:
            raise self.fault
        try:
            question()
        except AMQPError as error:  # it is closing
            raise BrokerUnavailable(f"RabbitMQ: {_text_of(error)}") from error

    def _promise(self) -> asyncio.Future[Any]:
        promise: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.add(promise)
        return promise

    async def _kept(self, promise: asyncio.Future[Any], question: Callable[[], object] | None = None) -> Any:
        try:
            if question is not None:
                self._ask(question)
            async with asyncio.timeout(self._timeout):
                return await promise
        except TimeoutError:
            raise BrokerUnavailable(f"RabbitMQ did not answer in {self._timeout} s") from None
        finally:
            self._waiting.discard(promise)

    def _closed(self, _: object, reason: Exception) -> None:
        self._connection.receivers.pop(self.raw.channel_number, None)
        self.fault = _fault_of(reason)
        for promise in self._waiting:
            if not promise.done():
                promise.set_exception(self.fault)
        if self.on_close is not None:
            self.on_close(self.fault)


class Connection:
    """One connection: opened when it is first needed, and again after it broke."""

    def __init__(
        self,
        address: Address,
        purpose: str,
        on_trouble: Callable[[str], None],
        *,
        connect_timeout: float,
        call_timeout: float,
    ) -> None:
        self._address = address
        self._node = address  # the node of a cluster where it is connected, or tries to be
        self._on_trouble = on_trouble
        self._connect_timeout = connect_timeout
        self._call_timeout = call_timeout
        self._purpose = purpose
        self._raw: RawConnection | None = None
        self._attempts = SharedAttempts[RawConnection]()
        self._failures = 0  # to open it; each leads to the next node
        self._gone = asyncio.Event()
        self._is_closed = False  # then only `start` opens it: a late call would leave it open for ever
        self.blocked: str | None = None  # why the server takes nothing that is published
        self.on_blocked: Callable[[str], None] | None = None
        self.version = "unknown"

    async def start(self) -> None:
        """Open it, also after it was closed. Raises BrokerError when the server does not let us in."""
        self._is_closed = False
        await self._connected()

    async def opened(self) -> RawConnection:
        """Return the open connection. Raises BrokerUnavailable, also when the server does not let us in.

        Such a refusal is never about the message that is sent, and it may pass.
        """
        try:
            return await self._connected()
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            raise BrokerUnavailable(str(error)) from error

    async def _connected(self) -> RawConnection:
        if self._is_closed:
            raise BrokerUnavailable(CLOSED)
        if self._raw is not None and self._raw.is_open:
            return self._raw
        return await self._attempts.result("connect", self._open)

    @property
    def raw(self) -> RawConnection | None:
        """The connection that is open now."""
        return self._raw

    async def channel(self) -> Channel:
        raw = await self.opened()
        try:
            channel = Channel(raw, self._call_timeout)
        except AMQPError as error:
            raise BrokerUnavailable(f"RabbitMQ at {self.place}: {_text_of(error)}") from error
        try:
            return await channel.opened()
        except BaseException:
            channel.abandon()  # nobody else knows of it, and the server may still open it
            raise

    async def ping(self) -> None:
        """Ask the server something that changes nothing."""
        (await self.channel()).abandon()

    def abort(self, reason: str) -> None:
        """Give it up, because the server does not answer."""
        raw, self._raw, self.blocked = self._raw, None, None
        if raw is not None:
            raw.abort(reason)

    async def close(self) -> None:
        self._is_closed = True
        await self._attempts.cancel()
        raw, self._raw = self._raw, None
        if raw is None:
            return
        with suppress(AMQPError):  # it is closing already
            raw.close()
        if not await self._is_gone_in(CLOSE_GRACE):
            raw.abort("it did not answer when it was closed")
            await self._is_gone_in(CLOSE_GRACE)

    @property
    def place(self) -> str:
        return self._node.place

    async def _open(self) -> RawConnection:
        """Try each node once, beginning with the last one used."""
        try:
            return await self._open_one_of_all()
        except BrokerError as error:
            self._on_trouble(str(error))
            raise

    async def _open_one_of_all(self) -> RawConnection:
        failures: list[BrokerError] = []
        for _ in self._address.hosts:
            self._node = self._address.turned(self._failures)
            self._failures += 1  # also when it is cancelled meanwhile: this node may be the silent one
            try:
                raw = await self._open_node()
            except BrokerError as error:
                if self._is_closed:
                    raise
                failures.append(error)
            else:
                self._failures -= 1
                return raw
        raise no_node(failures)

    async def _open_node(self) -> RawConnection:
        outcome: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        raw = RawConnection(
            _parameters(self._node, self._purpose, self._connect_timeout),
            on_open_callback=lambda _: _answer(outcome, None),
            on_open_error_callback=lambda _, error: _answer(outcome, error),
            on_close_callback=self._lost,
            custom_ioloop=LoopServices(asyncio.get_running_loop(), (self._failures - 1) // len(self._address.hosts)),
        )
        try:
            async with asyncio.timeout(self._connect_timeout):
                error = await asyncio.shield(outcome)
        except BaseException as error:
            await _give_up(raw, outcome)
            if isinstance(error, TimeoutError):
                raise BrokerUnavailable(self._unreachable(f"no answer in {self._connect_timeout} s")) from None
            raise
        if error is not None:
            raise self._refusal(error)
        if self._is_closed:
            raw.abort("it was closed while it connected")
            raise BrokerUnavailable(CLOSED)
        self._establish(raw)
        return raw

    def _establish(self, raw: RawConnection) -> None:
        self._raw, self.blocked = raw, None
        self._gone.clear()
        self.version = str((raw.server_properties or {}).get("version", "unknown"))
        raw.add_on_connection_blocked_callback(self._on_blocked)
        raw.add_on_connection_unblocked_callback(self._on_unblocked)

    def _on_blocked(self, *_: object) -> None:
        self.blocked = BLOCKED
        if self.on_blocked is not None:
            self.on_blocked(BLOCKED)

    def _on_unblocked(self, *_: object) -> None:
        self.blocked = None

    def _lost(self, raw: RawConnection, reason: Exception) -> None:
        self._gone.set()
        if self._raw is raw:  # else it was closed on purpose
            self._raw, self.blocked = None, None
            self._on_trouble(f"RabbitMQ at {self.place}: the connection broke: {_text_of(reason)}")

    async def _is_gone_in(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._gone.wait()
        return self._gone.is_set()

    def _unreachable(self, why: str) -> str:
        return f"cannot reach RabbitMQ at {self.place}: {why}"

    def _refusal(self, error: Exception) -> BrokerError:
        causes = list(_causes(error))
        certificate = next((cause for cause in causes if isinstance(cause, ssl.SSLCertVerificationError)), None)
        if certificate is not None:
            return BrokerError(f"RabbitMQ at {self.place} has a certificate that is not trusted: {certificate}")
        root = causes[-1]
        reply = _CLOSED_BY.search(str(root))
        if reply and int(reply[1]) in _REFUSALS and not _PASSING.search(reply[2]):
            who = _vhost(self._node) if int(reply[1]) == 530 else _user(self._node)
            return BrokerError(f"RabbitMQ at {self.place} {_REFUSALS[int(reply[1])]} '{who}': {reply[2]}")
        return BrokerUnavailable(self._unreachable(_text_of(root)))


async def all_of(*calls: Awaitable[object]) -> None:
    """Wait for all, then raise the first error."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _give_up(raw: RawConnection, outcome: "asyncio.Future[Exception | None]") -> None:
    """Stop an attempt, and wait until nothing of it is left."""
    raw.abort("it was given up while it connected")
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_GRACE):
            await asyncio.shield(outcome)


def _parameters(address: Address, purpose: str, timeout: float) -> Any:
    pika_log = logging.getLogger("pika")
    if pika_log.level == logging.NOTSET:  # it logs pages about each lost connection; we log one sentence
        pika_log.setLevel(logging.CRITICAL)
    return pika.ConnectionParameters(
        host=address.host,
        port=address.port,
        virtual_host=_vhost(address),
        credentials=pika.PlainCredentials(_user(address), address.password or "guest"),
        heartbeat=HEARTBEAT,
        socket_timeout=2 * timeout,  # longer than our own, so that only one of the two acts
        stack_timeout=2 * timeout,
        ssl_options=pika.SSLOptions(address.tls, address.host) if address.tls else None,
        client_properties={"connection_name": f"oraculo: {purpose}"},
    )


def _user(address: Address) -> str:
    return address.user or "guest"


def _vhost(address: Address) -> str:
    return unquote(address.path) or "/"


def unused(*_: object) -> None:
    """Do nothing: pika wants a callback, but a receiver reads these frames."""


def _answer(promise: "asyncio.Future[Any]", value: Any) -> None:
    if not promise.done():
        promise.set_result(value)


def _fault_of(reason: BaseException) -> BrokerError:
    if isinstance(reason, ChannelClosedByBroker):
        return Refused(reason.reply_code, reason.reply_text)
    return BrokerUnavailable(f"RabbitMQ: the channel was lost: {_text_of(reason)}")


def _text_of(error: BaseException) -> str:
    """Return pika's words without their wrapping."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error.args[-1]) if error.args else type(error).__name__
    if "indicated EOF" in text:
        return "it closed the connection"
    lost = _LOST.search(text)
    return lost[1] if lost else text


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, the innermost last."""
    yield error
    inner = [*getattr(error, "exceptions", ())[-1:], getattr(error, "exception", None), *error.args[:1]]
    for each in inner:
        if isinstance(each, BaseException):
            yield from _causes(each)
            return
