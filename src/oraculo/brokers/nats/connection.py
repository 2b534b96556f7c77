"""One connection to a NATS server, which fails at once, for good and with plain words.

nats-py keeps a broken connection to itself: it reconnects in the background, buffers what is published meanwhile, and
on its way out waits for a peer that may be frozen. The orchestrator wants to know, so here a connection that breaks is
over: whoever waits is told, nothing is kept, and the broker opens another when it is next used.

Everything that is answered (confirms of published messages, calls of JetStream's API) shares one inbox, and is written
out in one go before the first answer is awaited. nats-py connects, does TLS, credentials and pings, and reads; the way
of a message from there to whoever waits for it is short, without an object, a queue and a task for each.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import nats.errors

from oraculo.brokers.address import Address
from oraculo.brokers.nats.client import OneLifeClient, Receive
from oraculo.brokers.nats.layout import header_block
from oraculo.brokers.nats.replies import (
    FORBIDDEN,
    NOBODY,
    UNANSWERED,
    Answer,
    ApiError,
    Read,
    Replies,
    Request,
    read_answer,
)
from oraculo.core.chunks import pages
from oraculo.core.queue_health import TroubledQueues
from oraculo.errors import BrokerError, BrokerUnavailable, QueueDown, how_to_add

PING_INTERVAL = 5  # seconds; a peer that leaves two pings unanswered is gone
MOST_KNOWN = 10_000  # queues, or streams, of which something is remembered; the one not used for longest is forgotten
SILENT_FOR = 5.0  # seconds until a queue is tried again that said nothing while the server answered
FULL_FOR = 60.0  # seconds until a full server is tried again to which nothing is sent; canaries are sent more often
_OVERTAKEN = 0.5  # seconds: an answer may come before the confirm of a large message that was sent ahead of it
_API = "$JS.API."
_API_WINDOW = 128  # calls of the API that are out at a time
_PATIENT_WINDOW = 4000  # where some may never be answered: all wait together. JetStream drops calls when 10,000 wait
_NO_JETSTREAM = frozenset({10039, 10076})
_FORBIDDEN_SUBJECT = re.compile(r'permissions violation for publish to "([^"]+)"')
_DEAF_INBOX = re.compile(r'permissions violation for subscription to "[^"]+\.\*"')


class OneWaySender(Protocol):
    """Somebody who sends without being answered, and wants to hear when that is forbidden. Neither call may raise."""

    queue: str

    def sends_to(self, subject: str) -> bool:
        """In small letters, as the server tells it."""
        ...

    def forbidden(self, said: str) -> None: ...


class Patience(NamedTuple):
    """How long confirms are waited for."""

    until: float  # in the loop's time; and longer, while they come in
    silence: float  # seconds without any after which they no longer do
    proof: float  # seconds more, in which the server may show that it works


class Connection:
    """`lost` says why it cannot be used any more; it never recovers."""

    def __init__(self, address: Address, on_lost: Callable[["Connection"], None]) -> None:
        self.address = address
        self.place = f"NATS at {address.place}"
        self.lost: str | None = None
        self.made: dict[str, None] = {}  # queues that it has seen; the name of a quarantine stands for both
        self._silent = TroubledQueues(SILENT_FOR)
        self._unmakeable = TroubledQueues(SILENT_FOR)
        self._full: tuple[str, float] | None = None  # what the server said, and until when that is believed
        self._on_lost = on_lost
        self._client = OneLifeClient(self._fail, self._refuse_forbidden, needs_tls=address.tls is not None)
        self._inbox = b""
        self._sent = 0
        self._awaiting: dict[bytes, Replies] = {}
        self._heard_at = 0.0  # the loop's time when it last answered anything
        self._now = asyncio.get_running_loop().time
        self._senders: dict[int, OneWaySender] = {}  # by their subscriptions

    async def open(self, timeout: float) -> None:
        """Raises BrokerUnavailable when it cannot be reached, BrokerError when it refuses. The caller sets the limit of
        time; `timeout` tells nats-py not to wait longer either."""
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
        if isinstance(answer, ApiError):
            if answer is NOBODY or answer.err_code in _NO_JETSTREAM:
                remedy = "start nats-server with -js, and where accounts are set up, enable jetstream for this one"
                raise BrokerError(f"{self.place} has no JetStream for this account: {remedy}")
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
        """Messages that have come; while it does not change, the server may be frozen."""
        return self._client.heard

    @property
    def complaint(self) -> str:
        return self._client.complaint

    def forget_complaint(self) -> None:
        self._client.complaint = ""

    def fail(self, why: str) -> None:
        self._client.fail(why)

    def note_made(self, queues: Iterable[str]) -> None:
        for queue in queues:
            self.made.pop(queue, None)
            self.made[queue] = None
            if len(self.made) > MOST_KNOWN:
                del self.made[next(iter(self.made))]

    def forget_made(self, queues: Iterable[str]) -> None:
        for queue in queues:
            self.made.pop(queue, None)

    def unmade(self, queues: set[str]) -> set[str]:
        """Those that have to be made before something is sent there, but for those that could not be a moment ago."""
        missing = queues - self.made.keys()
        return missing - self._unmakeable.reasons(time.monotonic()).keys() if missing and self._unmakeable else missing

    def note_unmakeable(self, queues: Iterable[str], why: str) -> None:
        self._unmakeable.note(queues, why, time.monotonic())

    def note_silent(self, queue: str, why: str) -> None:
        self._silent.note([queue], why, time.monotonic())

    def note_working(self, queues: Sequence[str]) -> None:
        self._silent.works(queues)
        self._unmakeable.works(queues)

    def stuck(self) -> dict[str, str]:
        """Queues that do not work, while the server does, and how that was seen."""
        now = time.monotonic()
        return self._silent.reasons(now) | self._unmakeable.reasons(now)

    def forget_stuck(self) -> None:
        """It was not the queues' fault."""
        self._silent.clear()
        self._unmakeable.clear()

    def full(self) -> str | None:
        """Why the server stores no message, while it answers. It does not tell when it has room again: it must be sent
        something, or be believed to have."""
        return self._full[0] if self._full is not None and time.monotonic() < self._full[1] else None

    def note_full(self, why: str) -> None:
        self._full = why, time.monotonic() + FULL_FOR

    def note_stored(self) -> None:
        self._full = None

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, messages: Iterable[tuple[str, bytes]], reply: str = "") -> None:
        """Bodies to subjects, without waiting for anything. Raises BrokerUnavailable."""
        self._require_alive()
        answer = reply.encode()
        lines = [b"PUB %b %b %d\r\n%b\r\n" % (to.encode(), answer, len(body), body) for to, body in messages]
        if lines:
            self._client.write(b"".join(lines))

    async def exchange(self, requests: Sequence[Request], read: Read[Answer]) -> list[Answer]:
        """Sends them all and returns the answers, in their order. It waits for ever: the caller sets the limit."""
        self._require_alive()
        if not requests:
            return []
        with self._asking(requests, read) as replies:
            await replies.complete
        return replies.answers

    async def exchange_until(
        self, requests: Sequence[Request], read: Read[Answer], until: float
    ) -> Sequence[Answer | None]:
        """As above; None for what has no answer by then, in the loop's time, while JetStream answers otherwise, for
        which it waits."""
        self._require_alive()
        if not requests:
            return []
        with self._asking(requests, read) as replies:
            try:
                async with asyncio.timeout_at(until):
                    await replies.complete
            except TimeoutError:
                await self.ask("INFO")  # a server that answers this has read all that was sent before
            return replies.answers

    async def exchange_patiently(
        self, requests: Sequence[Request], read: Read[Answer], patience: Patience
    ) -> Sequence[Answer | None]:
        """As above; over a slow line it takes as long as it takes. Raises TimeoutError when the server falls silent."""
        self._require_alive()
        if not requests:
            return []
        with self._asking(requests, read) as replies:
            while not await self._is_done(
                [replies.complete], lambda: max(patience.until, replies.heard_at + patience.silence)
            ):
                asked_at = self._now()
                await self._require_answer(patience, replies)
                await asyncio.wait([replies.complete], timeout=min(patience.proof, _OVERTAKEN))
                if not replies.complete.done() and replies.heard_at < asked_at:
                    break
            return replies.answers

    async def _require_answer(self, patience: Patience, others: Replies) -> None:
        """To a question, or all the others. The question waits behind what was sent before: while that is answered, the
        server is at work."""
        with self._asking([Request(f"{_API}INFO", b"")], read_answer) as replies:
            if not await self._is_done(
                [replies.complete, others.complete],
                lambda: max(patience.until, self._heard_at + patience.silence) + patience.proof,
            ):
                raise TimeoutError
            (answer,) = replies.answers
            if isinstance(answer, ApiError):
                raise self.refusal(answer, "INFO")

    async def _is_done(self, futures: Sequence["asyncio.Future[None]"], late_at: Callable[[], float]) -> bool:
        """One of them, by then, in the loop's time, which may move on meanwhile. Raises what they raise."""
        began = self._now()
        done = {future for future in futures if future.done()}
        while not done and (left := late_at() - self._now()) > 0:
            if self._heard_at > began:
                self._client.note_answer()
            done, _ = await asyncio.wait(futures, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for fault in [future.exception() for future in done]:  # of all: else asyncio tells of those that nobody took
            if fault is not None:
                raise fault
        return bool(done)

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
        """Returns once the server has read all that was sent before: what is sent to oneself comes back in its turn."""
        await self.exchange([Request(f"{self._inbox.decode()}{self._sent}", b"barrier")], lambda data, _: data)

    async def ask_many(
        self, calls: Iterable[tuple[str, Any]], patience: float | None = None
    ) -> list[dict[str, Any] | ApiError]:
        """Calls of JetStream's API: its verb and its object. With patience, in seconds, those of a stream that has no
        leader are UNANSWERED after that."""
        requests = [Request(_API + verb, msgspec.json.encode(what) if what else b"") for verb, what in calls]
        answers: list[dict[str, Any] | ApiError] = []
        for window in pages(requests, _API_WINDOW if patience is None else _PATIENT_WINDOW):
            if patience is None:
                answers += await self.exchange(window, read_answer)
            else:
                until = asyncio.get_running_loop().time() + patience
                some: Sequence[dict[str, Any] | ApiError | None] = await self.exchange_until(window, read_answer, until)
                answers += [UNANSWERED if answer is None else answer for answer in some]
        return answers

    async def ask(self, verb: str, what: Any = None) -> dict[str, Any]:
        """One call that must succeed."""
        (answer,) = await self.ask_many([(verb, what)])
        if isinstance(answer, ApiError):
            raise self.refusal(answer, verb)
        return answer

    def refusal(self, error: ApiError, what: str, needed: str = "") -> BrokerError:
        """The error for people, and whether it is worth a retry. `needed`: what would be right, if that is known."""
        if error.is_forbidden:
            return BrokerError(f"{self.place} does not allow it: {error.description}")
        if error is UNANSWERED:
            return QueueDown(f"{self.place} was asked {what} and gave no answer, while it answers otherwise")
        sentence = f"{self.place} refused {what}: {error.description} ({error.err_code or error.code}){needed}"
        passes = error.is_temporary or error.is_full or error.is_missing  # which was there a moment ago
        return BrokerUnavailable(sentence) if passes else BrokerError(sentence)

    # -- receiving ------------------------------------------------------------------------------------------------

    def subscribe(self, receive: Receive, sender: OneWaySender) -> tuple[str, int]:
        """A subject of one's own, to which others may be asked to send, and the number of the subscription to it."""
        self._require_alive()
        subject = f"{self._inbox.decode()}to.{self._sent}"
        self._sent += 1
        number = self._client.listen(subject, receive)
        self._senders[number] = sender
        return subject, number

    def stop_deliveries(self, number: int) -> None:
        """The server stops sending; what is on its way is still received."""
        self._require_alive()
        self._client.stop_deliveries(number)

    def forget(self, number: int) -> None:
        self._client.forget(number)
        self._senders.pop(number, None)

    def _replied(self, subject: bytes, _reply: bytes, data: bytes, headers: bytes | None) -> None:
        token = subject[len(self._inbox) :]
        replies = self._awaiting.get(token)
        if replies is not None:
            replies.heard_at = self._heard_at = self._now()
            replies.receive(token, data, headers)

    def _refuse_forbidden(self, complaint: str) -> None:
        """What the account may not send is never answered. Its subject is told in small letters: where two that wait
        differ in nothing else, it may be either's, and silence has to tell."""
        if _DEAF_INBOX.search(complaint):  # no answer to anything may be heard
            self._refuse(self._awaiting.items(), complaint)
        found = _FORBIDDEN_SUBJECT.search(complaint)
        if found is None:
            return
        self._tell_sender(found[1], complaint)
        waiting = [(each, each[1].requests[each[0]].subject) for each in self._awaiting.items()]
        meant = [(each, subject) for each, subject in waiting if subject.lower() == found[1]]
        if len({subject for _, subject in meant}) > 1:
            return
        self.forget_complaint()  # whoever it concerns is told here; another's silence has other reasons
        self._refuse([each for each, _ in meant], complaint)

    def _tell_sender(self, subject: str, complaint: str) -> None:
        concerned = [sender for sender in self._senders.values() if sender.sends_to(subject)]
        if len({sender.queue for sender in concerned}) == 1:  # else it may be either's
            for sender in concerned:
                sender.forbidden(complaint)

    @staticmethod
    def _refuse(waiting: Iterable[tuple[bytes, Replies]], complaint: str) -> None:
        refusal = msgspec.json.encode({"error": {"code": FORBIDDEN, "description": complaint}})
        for token, replies in list(waiting):
            replies.receive(token, refusal, None)

    # -- the end --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """At once; whoever wants what was sent to be read first waits for the barrier."""
        if not self.lost:
            self.lost = f"the connection to {self.place} is closed"
        await self._give_up()

    async def _give_up(self) -> None:
        self._client.abort()
        self._fail_all(self.lost or f"the connection to {self.place} was not made")
        await self._client.ended()

    def _fail(self, why: str) -> None:
        if self.lost:
            return
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
            # Two quick attempts and no reconnecting: that is done by whoever uses the broker next.
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0,
            # Nothing is buffered for a connection that is gone, and no call waits for the writer: a wait in there
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
