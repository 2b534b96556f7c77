"""The messages that a worker or a bridge sends: success, failure, refusal and progress."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from oraculo.wire import naming
from oraculo.wire.json_guard import check_json_text
from oraculo.wire.message import Message, encode_message
from oraculo.wire.timestamps import to_iso
from oraculo.wire.tracebacks import bounded_traceback

MAX_ERROR_TEXT = 2000
MAX_PROGRESS_TEXT = 500
NOT_IN_TIME = "deadline passed before it was started"

_encoder = msgspec.json.Encoder()
_any_json = msgspec.json.Decoder(msgspec.Raw)


class Answer:
    """A payload that a handler returns to be sent unchanged, without `{"status": "ok", …}` around it.

    A mapping that is a result payload, such as `{"status": "erro", "erros": ["no such channel"]}`, needs no Answer.
    """

    __slots__ = ("payload",)

    def __init__(self, payload: dict[str, Any]) -> None:
        self.payload = payload


class Refusal(NamedTuple):
    """The consequence of an answer that the broker refused."""

    reason: str
    stand_in: bytes | None  # published instead; None when the command goes to the dead letters


class Now(Protocol):
    """A clock, as far as this module needs one."""

    def now(self) -> float: ...


class AnswerWriter:
    """Encodes answers and progress. Its callers give queue names without the prefix."""

    def __init__(self, clock: Now, names: naming.QueueNames) -> None:
        self._clock = clock
        self._names = names
        self._now = (0, "")

    def reply_queue(self, command: Message) -> str:
        """Return the queue for the answer. A command's `responder_em` is a whole name and gets no prefix."""
        return command.responder_em or self._names.answers

    def success(self, queue: str, command: Message, value: object) -> bytes:
        """Return the answer with the handler's value, or a failure when that value is not JSON."""
        try:
            payload = _payload_of(queue, value)
            # msgspec writes a `msgspec.Raw` in the value unread. Skipping over the result is the cheapest check of it.
            _any_json.decode(payload)
            return self._encoded(naming.answer_event(queue), command, payload)
        except Exception as error:  # noqa: BLE001 - encoding runs the value's own code, which may raise anything
            reason = f"the handler's answer cannot be sent: {describe(error)}"
            return self.failure(queue, command, [reason], retry=False)

    def failure(
        self,
        queue: str,
        command: Message,
        errors: Sequence[str],
        *,
        retry: bool = True,
        traceback: str | None = None,
    ) -> bytes:
        payload: dict[str, Any] = {"status": "erro", "erros": [_sendable(text) for text in errors]}
        if not retry:
            payload["repetir"] = False
        if traceback is not None:
            payload["rastreamento"] = bounded_traceback(traceback)
        return self._encoded(naming.answer_event(queue), command, _encoder.encode(payload))

    def refused(self, queue: str, command: Message, error: Exception, *, stands_in: bool) -> Refusal:
        """Return a small failure to send instead of the refused answer.

        When the broker refused that failure too (`stands_in`), the command goes to the dead letters. Another attempt
        would end the same way.
        """
        reason = f"the broker refused the answer: {error}"
        return Refusal(reason, None if stands_in else self.failure(queue, command, [reason], retry=False))

    def progress(self, command: Message, percent: float | None, text: str) -> bytes:
        payload = _encoder.encode({"percentual": percent, "mensagem": _sendable(text)})
        return self._encoded(naming.PROGRESS, command, payload)

    def _timestamp(self) -> str:
        """Return the time, written once a millisecond, because a busy worker writes dozens of answers in each."""
        now = self._clock.now()
        if (moment := int(now * 1000)) != self._now[0]:
            self._now = (moment, to_iso(now))
        return self._now[1]

    def _encoded(self, event: str, command: Message, payload: bytes) -> bytes:
        body = encode_message(
            Message(
                correlation_id=command.correlation_id,
                tipo_evento=event,
                payload=msgspec.Raw(payload),
                timestamp=self._timestamp(),
                tarefa=command.tarefa,
                tentativa=command.tentativa,
                traceparent=command.traceparent,
            )
        )
        check_json_text(body)  # the orchestrator would refuse an answer that fails this
        return body


def describe(error: BaseException) -> str:
    """Return `TypeName: text` for an error, even when its own text cannot be made."""
    name = type(error).__name__
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - a broken __str__ must not hide that the handler failed
        text = "(its text cannot be shown)"
    return f"{name}: {text}" if text else name


def _payload_of(queue: str, value: object) -> bytes:
    if not isinstance(value, Answer):
        return _encoder.encode({"status": "ok", "dados" if naming.is_collector(queue) else "resultado": value})
    payload = _encoder.encode(value.payload)
    if not payload.startswith(b"{"):
        raise TypeError(f"Answer needs a dict; got {type(value.payload).__name__}")
    return payload


def _sendable(text: str) -> str:
    """Return a short text without NUL and half characters, which JSON readers refuse."""
    return text[:MAX_ERROR_TEXT].replace("\0", "\ufffd").encode(errors="replace").decode()
