"""The message of the wire: its type, its schema, how it is read and written."""

import re
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from oraculo.errors import Fault, InvalidJson, InvalidMessage
from oraculo.wire import naming
from oraculo.wire.json_guard import HANDED_ON_DEPTH, UNREADABLE, check_json_text, json_fault
from oraculo.wire.timestamps import from_iso

SCHEMA_ID = "urn:oraculo:mensagem_schema"
HIGHEST_PRIORITY = 9


_RunId = Annotated[
    str, msgspec.Meta(min_length=1, max_length=128, description="One for each run; a worker copies it to its answer.")
]


class Message(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One JSON object of the wire. Reading ignores unknown fields; the bytes of the message keep them."""

    correlation_id: _RunId
    tipo_evento: Annotated[str, msgspec.Meta(min_length=1, description="What the message asks for or reports.")]
    payload: Annotated[msgspec.Raw, msgspec.Meta(description="The event's data.")]
    timestamp: Annotated[str, msgspec.Meta(description="ISO 8601 with an offset or Z.")]
    tarefa: Annotated[
        str | None,
        msgspec.Meta(description="Id of the subtask; on every command; a worker echoes it when it can."),
    ] = None
    tentativa: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        msgspec.Meta(description="Attempt number of that subtask, from 1."),
    ] = None
    responder_em: Annotated[
        str | None,
        msgspec.Meta(description="Queue on which the answer is awaited; `resultados` unless it says otherwise."),
    ] = None
    prazo: Annotated[str | None, msgspec.Meta(description="ISO 8601; after it the answer is late.")] = None
    traceparent: Annotated[str | None, msgspec.Meta(description="W3C trace context.")] = None
    prioridade: Annotated[
        Any,
        msgspec.Meta(description="On commands: the run's, from 1 to 9, the higher first. Bridges hand it on."),
    ] = None
    ponte: Annotated[
        Any,
        msgspec.Meta(description="On commands for a bridge: the Celery task or BullMQ queue where it is to go on."),
    ] = None


class _Address(msgspec.Struct):
    """The fields that are read from a message with faults."""

    correlation_id: _RunId
    tarefa: msgspec.Raw = msgspec.Raw(b"null")  # unparsed, so that an odd value does not hide the other field


class _WithFloat(Message, kw_only=True):
    """A message whose attempt is written as 1.0, because some languages write every number so."""

    tentativa: float | None = None  # type: ignore[assignment]


_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_KINDS_BY_SIGN = {b"[": "array", b'"': "str", b"t": "bool", b"f": "bool", b"n": "null"}
_FIRST_FIELD = re.compile(rb'\s*\{\s*"correlation_id"\s*:\s*"(?:[^"\\]|\\.){1,1000}"')
_UNKNOWN = "is not a known field"

_decoder = msgspec.json.Decoder(Message)
_address_decoder = msgspec.json.Decoder(_Address)
_float_decoder = msgspec.json.Decoder(_WithFloat)
_encoder = msgspec.json.Encoder()


def decode_message(body: bytes, max_depth: int = HANDED_ON_DEPTH) -> Message:
    """Return the message in `body`. Raises InvalidJson, or InvalidMessage with the field and the right value.

    The default depth admits messages that ORÁCULO wrote itself, which hold a payload from outside.
    """
    check_json_text(body, max_depth)
    try:
        message = _decode(body)
    except msgspec.ValidationError as error:
        raise InvalidMessage(fault_of(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidJson(json_fault(body, error)) from None
    if (fault := object_fault("payload", bytes(message.payload))) is not None:
        raise InvalidMessage(fault)
    if from_iso(message.timestamp) is None:
        raise InvalidMessage(Fault("timestamp", "must be ISO 8601 with an offset or Z, as 2025-10-14T12:00:00Z"))
    if message.prazo is not None and from_iso(message.prazo) is None:
        raise InvalidMessage(Fault("prazo", "must be ISO 8601 with an offset or Z, as 2025-10-14T12:00:00Z"))
    return message


def _decode(body: bytes) -> Message:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        if fault_of(error).field != "tentativa":
            raise
        try:
            message = _float_decoder.decode(body)
        except msgspec.ValidationError:
            raise error from None
        if message.tentativa is None or message.tentativa < 1 or message.tentativa % 1:
            raise
    message.tentativa = int(message.tentativa)
    return message


def correlation_id_of(body: bytes) -> str | None:
    """Return the id of the run that a message with faults names, or None when it names no valid one."""
    address = _address_of(body)
    return None if address is None else address.correlation_id


def correlation_id_at_start(beginning: bytes) -> str | None:
    """Return the id of the run when it is the first field of a message of which only the beginning is known."""
    found = _FIRST_FIELD.match(beginning)
    return correlation_id_of(found[0] + b"}") if found else None


def task_named_in(body: bytes) -> str | None:
    """Return the id of the task that a message with faults names, or None."""
    address = _address_of(body)
    try:
        return None if address is None else msgspec.json.decode(address.tarefa, type=str)
    except UNREADABLE:
        return None


def _address_of(body: bytes) -> _Address | None:
    try:
        address = _address_decoder.decode(body)
    except UNREADABLE:
        return None
    return None if "\0" in address.correlation_id else address  # no id holds a NUL, and a store may choke on it


def priority_of(message: Message) -> int:
    """Return the priority of a command, or 0 when it has no valid one."""
    given = message.prioridade
    return given if type(given) is int and 0 <= given <= HIGHEST_PRIORITY else 0


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def object_fault(field: str, value: bytes) -> Fault | None:
    """Return the fault of an unparsed value that is not an object, by its first character."""
    if value.startswith(b"{"):
        return None
    return Fault(field, _hinted(f"expected `object`, got `{_KINDS_BY_SIGN.get(value[:1], 'number')}`"))


def fault_of(error: msgspec.ValidationError) -> Fault:
    """Return msgspec's «Expected `str`, got `int` - at `$.x`» as a Fault on field `x`."""
    text, _, path = str(error).partition(" - at `")
    field = path.removesuffix("`").removeprefix("$").removeprefix(".")
    for opening in ("Object missing required field `", "Object contains unknown field `"):
        if text.startswith(opening):
            name = text.removeprefix(opening).removesuffix("`")
            field = f"{field}.{name}" if field else name
            text = "is required" if "missing" in opening else _UNKNOWN
    return Fault(field, _hinted(text[0].lower() + text[1:]) if text else "is not valid")


def _hinted(problem: str) -> str:
    return f"{problem}: was it encoded twice?" if problem == "expected `object`, got `str`" else problem


def with_nearest(fault: Fault, known: Iterable[str]) -> Fault:
    """Return the fault of an unknown field with the `known` field that may be meant."""
    if fault.problem != _UNKNOWN:
        return fault
    return Fault(fault.field, fault.problem + naming.nearest(fault.field.rpartition(".")[2], known))


def valid_traceparent(text: str | None) -> str | None:
    """Return the W3C trace context, or None for a broken one, which is no reason to refuse work."""
    return text if text is not None and _TRACEPARENT.fullmatch(text) else None


def message_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a message, made from its type."""
    (_,), components = msgspec.json.schema_components([Message])
    schema = components["Message"]
    properties = schema["properties"]
    properties["payload"] |= {"type": "object"}
    properties["timestamp"] |= {"format": "date-time"}
    for name in ("tarefa", "tentativa", "responder_em", "prazo", "traceparent"):
        properties[name].pop("default", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        "title": "Mensagem do ORÁCULO",
        "description": "One message between the orchestrator, its collectors and its processors.",
        "type": "object",
        "properties": properties,
        "required": schema["required"],
        "additionalProperties": True,
    }
