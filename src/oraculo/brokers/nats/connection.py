"""One connection to a NATS server. It fails at once, for good, and with plain words.

Everything that is answered (confirms of published messages, calls of JetStream's API) shares one inbox, and is written
out in one go before the first answer is awaited. An answer takes a short way to its caller: there is no object, queue
or task for each.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import nats.errors

from oraculo.brokers.address import Address
from oraculo.brokers.nats.client import OneLifeClient, Receive
from oraculo.brokers.nats.known_queues import KnownQueues
from oraculo.brokers.nats.layout import header_block, stream_of
from oraculo.brokers.nats.replies import (
    FORBIDDEN,
    NOBODY,
    UNANSWERED,
    Answer,
    ApiAnswer,
    ApiError,
    Read,
    Replies,
    Request,
    read_answer,
)
from oraculo.core.chunks import pages
from oraculo.errors import BrokerError, BrokerUnavailable, QueueDown, how_to_add

PING_INTERVAL = 5  # seconds; a peer that leaves two pings unanswered is gone
_API = "$JS.API."
_API_WINDOW = 4000  # calls of the API that are out together; JetStream drops calls when 10,000 wait
_NO_JETSTREAM = frozenset({10039, 10076})
_FORBIDDEN_SUBJECT = re.compile(r'permissions violation for publish to "([^"]+)"')


class Patience(NamedTuple):
    """The seconds to wait for answers. A line may be slow, so the silence counts and not the time of all."""

    silence: float  # without any answer, until the server is asked whether it works
    proof: float  # for the answer to that
    grace: float  # for answers that the proof overtook


class OneWaySender(Protocol):
    """A sender that gets no answer, and hears when its subject is forbidden. Neither call may raise."""

    def sends_to(self, subject: str) -> bool:
        """Return whether the subject, which the server names in small letters, is one of this sender's."""
        ...

    def forbidden(self, said: str) -> None: ...


class Connection:
    """A connection that never recovers: once it is over, `lost` has the reason.

    `timeout`: seconds that a call of JetStream's API may take.
    """

    def __init__(self, address: Address, on_lost: Callable[["Connection"], None], timeout: float) -> None:
        self.address = address
        self.place = f"NATS at {address.place}"
        self.lost: str | None = None
        self.complaint = ""  # the server's last words about missing rights that concern no known request
        self.queues = KnownQueues()
        self._patience = Patience(0.4 * timeout, 0.6 * timeout, 0.0)
        self._on_lost = on_lost
        self._client = OneLifeClient(self._fail, self._refuse_forbidden, needs_tls=address.tls is not None)
        self._inbox = b""
        self._sent = 0
        self._awaiting: dict[bytes, Replies] = {}
        self._heard_at = 0.0  # the loop's time of the last answer to anything
        self._now = asyncio.get_running_loop().time
        self._senders: dict[int, OneWaySender] = {}  # by their subscriptions

    async def open(self, timeout: float) -> None:
        """Connect. Raises BrokerUnavailable when the server cannot be reached, BrokerError when it refuses.

        The caller sets the limit of time; `timeout` is for nats-py.
        """
        is_open = False
        try:
            await self._client.connect(**self._options(timeout))
            if not self._client.is_connected:
                raise BrokerUnavailable(f"{self.place} hung up while connecting")
            self._inbox = self._client.new_inbox().encode() + b"."
            self._require_alive()
            self._client.listen(f"{self._inbox.decode()}*", self._replied)
            await self._require_jetstream()
            is_open = True
        except (OSError, nats.errors.Error) as error:
            if isinstance(error, TimeoutError):
                raise
            raise self._cannot_connect(error) from error
        finally:
            if not is_open:
                await self._give_up()

    async def _require_jetstream(self) -> None:
        (answer,) = await self.ask_many([("INFO", None)])
        if answer is NOBODY or (isinstance(answer, ApiError) and answer.err_code in _NO_JETSTREAM):
            remedy = "start nats-server with -js, and where accounts are set up, enable jetstream for this one"
            raise BrokerError(f"{self.place} has no JetStream for this account: {remedy}")
        if isinstance(answer, ApiError):
            raise self.refusal(answer, "INFO")

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    @property
    def version(self) -> str:
        version = self._client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    @property
    def heard(self) -> int:
        """The number of messages that have come. While it does not change, the server may be frozen."""
        return self._client.heard

    def fail(self, why: str) -> None:
        self._client.fail(why)

    # -- requests -------------------------------------------------------------------------------------------------

    def send(self, messages: Iterable[tuple[str, bytes]], reply: str = "") -> None:
        """Send bodies to subjects without waiting for anything. Raises BrokerUnavailable."""
        self._require_alive()
        answer = reply.encode()
        lines = [b"PUB %b %b %d\r\n%b\r\n" % (to.encode(), answer, len(body), body) for to, body in messages]
        if lines:
            self._client.write(b"".join(lines))

    async def exchange(
        self, requests: Sequence[Request], read: Read[Answer], patience: Patience
    ) -> Sequence[Answer | None]:
        """Send the requests and return the answers in order.

        None stands for a request without an answer, while the server answers otherwise. Raises TimeoutError when the
        server is silent.
        """
        self._require_alive()
        if not requests:
            return []
        with self._asking(requests, read) as replies:
            while not await self._are_complete(replies, patience.silence):
                asked_at = self._now()
                await self._require_proof(patience)
                if not await replies.wait(patience.grace) and replies.heard_at < asked_at:
                    break
            return replies.answers

    async def _are_complete(self, replies: Replies, silence: float) -> bool:
        """Wait for all answers. Return False once none has come for so many seconds."""
        began = self._now()
        while (left := max(began, replies.heard_at) + silence - self._now()) > 0:
            if await replies.wait(left):
                return True
        return False

    async def _require_proof(self, patience: Patience) -> None:
        """Ask the server whether it works. Raises TimeoutError, or BrokerUnavailable when it does not.

        The question waits behind what was sent before. While that is answered, the server is at work.
        """
        asked_at = self._now()
        with self._asking([Request(f"{_API}INFO", b"")], read_answer) as replies:
            while (left := max(asked_at, self._heard_at) + patience.proof - self._now()) > 0:
                if await replies.wait(left):
                    (answer,) = replies.answers
                    if isinstance(answer, ApiError):
                        raise self.refusal(answer, "INFO")
                    return
        raise TimeoutError

    @contextmanager
    def _asking(self, requests: Sequence[Request], read: Read[Any]) -> Iterator[Replies]:
        tokens = [b"%d" % number for number in range(self._sent, self._sent + len(requests))]
        self._sent += len(requests)
        replies = Replies(dict(zip(tokens, requests, strict=True)), read)
        self._awaiting.update(dict.fromkeys(tokens, replies))
        try:
            inbox = self._inbox
            lines = [_command(request, inbox + token) for token, request in replies.requests.items()]
            self._client.write(b"".join(lines))
            yield replies
        finally:
            for token in tokens:
                self._awaiting.pop(token, None)

    def _require_alive(self) -> None:
        if self._client.is_closing:
            self._client.fail("it was closed")
        if self.lost:
            raise BrokerUnavailable(self.lost)

    async def barrier(self) -> None:
        """Return once the server has read all that was sent before: a message to oneself comes back in its turn."""
        self._require_alive()
        with self._asking([Request(f"{self._inbox.decode()}{self._sent}", b"barrier")], lambda data, _: data) as echo:
            await echo.wait()

    # -- JetStream's API ------------------------------------------------------------------------------------------

    async def ask_many(self, calls: Iterable[tuple[str, Any]]) -> list[ApiAnswer]:
        """Make calls of a verb and an object, and return the answers in order.

        UNANSWERED stands for a call about a stream without a leader. Raises TimeoutError when the server is silent.
        """
        requests = [Request(_API + verb, msgspec.json.encode(what) if what else b"") for verb, what in calls]
        answers: list[ApiAnswer] = []
        for window in pages(requests, _API_WINDOW):
            some: Sequence[ApiAnswer | None] = await self.exchange(window, read_answer, self._patience)
            answers += [UNANSWERED if answer is None else answer for answer in some]
        return answers

    async def ask_each(self, calls: Mapping[str, tuple[str, Any]]) -> dict[str, ApiAnswer]:
        """Make one call for each queue."""
        return dict(zip(calls, await self.ask_many(calls.values()), strict=True))

    async def ask(self, verb: str, what: Any = None) -> dict[str, Any]:
        """Make one call that must succeed."""
        (answer,) = await self.ask_many([(verb, what)])
        if isinstance(answer, ApiError):
            raise self.refusal(answer, verb)
        return answer

    async def streams(self, queues: Collection[str]) -> dict[str, ApiAnswer]:
        return await self.ask_each({queue: (f"STREAM.INFO.{stream_of(queue)}", None) for queue in queues})

    async def consumers(self, queues: Collection[str]) -> dict[str, ApiAnswer]:
        return await self.ask_each(
            {queue: (f"CONSUMER.INFO.{stream_of(queue)}.{stream_of(queue)}", None) for queue in queues}
        )

    def refusal(self, error: ApiError, what: str, remedy: str = "") -> BrokerError:
        """Return the error for people, of the type that says whether a retry may help."""
        if error.is_forbidden:
            return BrokerError(f"{self.place} does not allow it: {error.description}")
        if error is UNANSWERED:
            return QueueDown(f"{self.place} was asked {what} and gave no answer, while it answers otherwise")
        sentence = f"{self.place} refused {what}: {error.description} ({error.err_code or error.code}){remedy}"
        passes = error.is_temporary or error.is_full or error.is_missing  # which was there a moment ago
        return BrokerUnavailable(sentence) if passes else BrokerError(sentence)

    # -- receiving ------------------------------------------------------------------------------------------------

    def subscribe(self, receive: Receive, sender: OneWaySender) -> tuple[str, int]:
        """Return a new subject, to which others may be asked to send, and the number of the subscription to it."""
        self._require_alive()
        subject = f"{self._inbox.decode()}to.{self._sent}"
        self._sent += 1
        number = self._client.listen(subject, receive)
        self._senders[number] = sender
        return subject, number

    def stop_deliveries(self, number: int) -> None:
        """Let the server stop sending. Messages that are on their way are still received."""
        self._require_alive()
        self._client.stop_deliveries(number)

    def forget(self, number: int) -> None:
        self._client.forget(number)
        self._senders.pop(number, None)

    def _replied(self, subject: bytes, _reply: bytes, data: bytes, headers: bytes | None) -> None:
        token = subject[len(self._inbox) :]
        if (replies := self._awaiting.get(token)) is not None:
            replies.heard_at = self._heard_at = self._now()
            replies.receive(token, data, headers)

    def _refuse_forbidden(self, complaint: str) -> None:
        """Answer the requests that the server forbids, because it answers them nothing itself."""
        found = _FORBIDDEN_SUBJECT.search(complaint)
        subject = found[1] if found else ""
        waiting = [
            (token, replies)
            for token, replies in self._awaiting.items()
            if found is None or replies.asks(token, subject)  # or the inbox is forbidden, and no answer can be heard
        ]
        senders = [sender for sender in self._senders.values() if sender.sends_to(subject)]
        refusal = msgspec.json.encode({"error": {"code": FORBIDDEN, "description": complaint}})
        for token, replies in waiting:
            replies.receive(token, refusal, None)
        for sender in senders:
            sender.forbidden(complaint)
        if not waiting and not senders:
            self.complaint = complaint

    # -- the end --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close at once. A caller that wants its last messages to be read waits for the barrier first."""
        if not self.lost:
            self.lost = f"the connection to {self.place} is closed"
        await self._give_up()

    async def _give_up(self) -> None:
        self._client.abort()
        self._fail_all(self.lost or f"the connection to {self.place} was not made")
        await self._client.ended()

    def _fail(self, why: str) -> None:
        if not self.lost:
            self.lost = f"the connection to {self.place} was lost: {why}"
            self._fail_all(self.lost)
            self._on_lost(self)

    def _fail_all(self, why: str) -> None:
        for replies in set(self._awaiting.values()):
            replies.fail(BrokerUnavailable(why))
        self._awaiting.clear()

    # -- the beginning --------------------------------------------------------------------------------------------

    def _options(self, timeout: float) -> dict[str, Any]:
        address = self.address
        options: dict[str, Any] = {
            "servers": [f"nats://{address.place}"],
            "name": "oraculo",
            "connect_timeout": timeout,
            "error_cb": self._client.note,
            "tls": address.tls,
            "ping_interval": PING_INTERVAL,
            "max_outstanding_pings": 2,
            # Two quick attempts and no reconnecting: the next call to the broker does that.
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0,
            # Nothing is buffered for a connection that is gone, and no call waits for the writer, because that wait
            # cannot be cancelled.
            "pending_size": 0,
            "flusher_queue_size": 0,
        }
        if address.password is not None:
            options |= {"user": address.user or "", "password": address.password}
        elif address.user is not None:
            options["token"] = address.user
        if "credentials" in address.parameters:
            options["user_credentials"] = _checked_credentials(address.parameters["credentials"])
        return options

    def _cannot_connect(self, error: Exception) -> BrokerError:
        if isinstance(error, nats.errors.NoServersError) and self._client.problem is not None:
            error = self._client.problem
        said = str(error).removeprefix("nats: ").strip("'\"") or type(error).__name__
        if isinstance(error, nats.errors.SecureConnWantedError):
            return BrokerError(f"{self.place} has no TLS, and the URL asks for it with tls://")
        if "authorization" in said.lower() or ("authentication" in said.lower() and "timeout" not in said.lower()):
            return BrokerError(f"{self.place} refused the credentials in the URL: {said}")
        if "certificate" in said.lower():
            return BrokerError(f"{self.place} could not be trusted: {said}")
        return BrokerUnavailable(f"{self.place} cannot be reached: {said}")


def _command(request: Request, reply: bytes) -> bytes:
    subject, body, headers, _ = request
    if headers is None:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, len(body), body)
    block = header_block(headers)
    sizes = (len(block), len(block) + len(body))
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % (subject.encode(), reply, *sizes, block, body)


def _checked_credentials(path: str) -> str:
    try:
        import nkeys  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
    except ImportError as error:
        raise BrokerError(f"a credentials file needs the package nkeys: {how_to_add('nkeys')}") from error
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BrokerError(f"the credentials file {path} cannot be read: {error}") from error
    if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
        raise BrokerError(f"{path} is no NATS credentials file: it has no user JWT or no seed")
    return path
