"""Requests to JetStream, and its answers."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

NO_RESPONDERS = 503
FORBIDDEN = 403  # JetStream itself never answers it
TOO_MANY_REQUESTS = 429
_NO_ANSWER = 504
_FROM_NOBODY = b"NATS/1.0 503"
_ACCOUNT_FULL = 10002
_SERVER_FULL = 10023
_NOT_STORED = 10077
_OVER_SIZE = 10054
_ID_IN_PROCESS = 10158

Answer = TypeVar("Answer")
Read = Callable[[bytes, bytes | None], Answer | None]  # reads data and headers; None: that was no answer


class ApiError(msgspec.Struct, frozen=True):
    """A refusal by JetStream."""

    code: int = 0
    err_code: int = 0
    description: str = ""

    @property
    def is_missing(self) -> bool:
        return self.code == 404 or self is NOBODY

    @property
    def is_temporary(self) -> bool:
        return self.code >= 500 or self.code == TOO_MANY_REQUESTS

    @property
    def is_full(self) -> bool:
        """Return True when the stream or the account is at its owner's limit; not when the server's disk is full."""
        is_stream_full = self.err_code == _NOT_STORED and self.description.startswith("maximum ")
        return is_stream_full or self.err_code == _ACCOUNT_FULL

    @property
    def is_server_full(self) -> bool:
        """Return True when the server is at its `max_file_store`, so that no queue takes a message."""
        return self.err_code == _SERVER_FULL

    @property
    def is_forbidden(self) -> bool:
        return self.code == FORBIDDEN

    @property
    def is_over_size(self) -> bool:
        """Return True when a message, headers included, is larger than the stream's owner allows."""
        return self.err_code == _OVER_SIZE

    @property
    def is_id_in_process(self) -> bool:
        """Return True when a cluster is storing another message with this id at this moment."""
        return self.err_code == _ID_IN_PROCESS


NOBODY = ApiError(NO_RESPONDERS, 0, "nobody listens there")
UNANSWERED = ApiError(_NO_ANSWER, 0, "no answer in time")

ApiAnswer = dict[str, Any] | ApiError


class PubAck(msgspec.Struct):
    """The confirm of a published message."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


class Request(NamedTuple):
    """A message that is answered on the inbox of the connection."""

    subject: str
    body: bytes
    headers: dict[str, str] | None = None
    is_reply: bool = False  # goes to a queue that is a client's own


_decode_ack = msgspec.json.Decoder(PubAck).decode
_decode_answer = msgspec.json.Decoder(dict[str, Any]).decode


def read_confirm(data: bytes, headers: bytes | None) -> PubAck | None:
    """Return the confirm of a message. None for anything else, because any subscriber of the subject may answer."""
    if _is_from_nobody(data, headers):
        return PubAck(error=NOBODY)
    try:
        ack = _decode_ack(data)
    except msgspec.DecodeError:
        return None
    return ack if ack.stream or ack.error else None


def read_answer(data: bytes, headers: bytes | None) -> ApiAnswer | None:
    """Return an answer of JetStream's API."""
    if _is_from_nobody(data, headers):
        return NOBODY
    try:
        answer = _decode_answer(data)
        return msgspec.convert(answer["error"], ApiError) if "error" in answer else answer
    except msgspec.DecodeError:
        return None


def _is_from_nobody(data: bytes, headers: bytes | None) -> bool:
    return headers is not None and not data and headers.startswith(_FROM_NOBODY)


class Replies:
    """The answers that one call waits for."""

    def __init__(self, requests: Mapping[bytes, Request], read: Read[Any]) -> None:
        self.requests = requests  # by the last part of the subject on which each is answered
        self.heard_at = 0.0  # the loop's time of the last answer
        self._ended = asyncio.Event()
        self._failure: Exception | None = None
        self._got: dict[bytes, Any] = {}
        self._read = read

    @property
    def answers(self) -> list[Any]:
        """The answers in the order of the requests; None for those that have none yet."""
        return [self._got.get(token) for token in self.requests]

    def asks(self, token: bytes, subject: str) -> bool:
        """Return whether that request goes to the subject, which is in small letters."""
        return self.requests[token].subject.lower() == subject

    async def wait(self, seconds: float | None = None) -> bool:
        """Return True once all answers are there, False after so many seconds. Raises the error given to `fail`."""
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def receive(self, token: bytes, data: bytes, headers: bytes | None) -> None:
        answer = self._read(data, headers)
        if answer is None or token in self._got:
            return
        self._got[token] = answer
        if len(self._got) == len(self.requests):
            self._ended.set()

    def fail(self, error: Exception) -> None:
        self._failure = error
        self._ended.set()
