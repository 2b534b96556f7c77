"""The message of the wire: its type, its schema, how it is read and written."""

import re
from collections.abc import Iterable, Mapping
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
    tipo_evento: Annotated[str, msgspec.Meta(min_length=1, description="What the message asks for or tells.")]
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


_RIGHT = {
    "": "must be one JSON object",
    "correlation_id": "must be a text of 1 to 128 characters",
    "tipo_evento": "must be a text that is not empty",
    "timestamp": "must be a text: ISO 8601 with an offset or Z, as 2025-10-14T12:00:00Z",
    "tarefa": "must be a text: the id of a subtask",
    "tentativa": "must be a whole number from 1",
    "responder_em": "must be a text: the name of a queue",
    "prazo": "must be a text: ISO 8601 with an offset or Z, as 2025-10-14T12:00:00Z",
    "traceparent": "must be a text",
}
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_KINDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "a boolean",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
_KINDS_BY_SIGN = {b"[": "array", b'"': "str", b"t": "bool", b"f": "bool", b"n": "null"}
_GOT = re.compile("got `([a-z]+)`$")
_ENCODED_TWICE = ": was it encoded twice?"
_FIRST_FIELD = re.compile(rb'\s*\{\s*"correlation_id"\s*:\s*"(?:[^"\\]|\\.){1,1000}"')
_UNKNOWN = "is not a known field"
_PLACE = re.compile(r"\[[0-9]+\]")

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
        raise InvalidMessage(in_our_words(fault_of(error), _RIGHT)) from None
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
        message = _float_decoder.decode(body)
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
    kind = _KINDS_BY_SIGN.get(value[:1], "float")
    return Fault(field, f"must be an object; got {_KINDS[kind]}{_ENCODED_TWICE if kind == 'str' else ''}")


def fault_of(error: msgspec.ValidationError) -> Fault:
    """Return msgspec's «Expected `str`, got `int` - at `$.x`» as a Fault on field `x`."""
    text, _, path = str(error).partition(" - at `")
    field = path.removesuffix("`").removeprefix("$").removeprefix(".")
    for opening in ("Object missing required field `", "Object contains unknown field `"):
        if text.startswith(opening):
            name = text.removeprefix(opening).removesuffix("`")
            field = f"{field}.{name}" if field else name
            text = "is required" if "missing" in opening else _UNKNOWN
    return Fault(field, text[0].lower() + text[1:] if text else "is not valid")


def in_our_words(fault: Fault, right: Mapping[str, str]) -> Fault:
    """Return the fault with the text that `right` has for its field, instead of msgspec's words.

    In the keys of `right`, `[]` stands for any place in a list.
    """
    text = right.get(_PLACE.sub("[]", fault.field))
    if text is None or not fault.problem.startswith(("expected `", "integer value out of", "number out of")):
        return fault
    if "out of range" in fault.problem:
        return Fault(fault.field, f"{text}; got a number that is too large")
    got = _GOT.search(fault.problem)
    if not fault.field and got and got[1] == "str":
        return Fault("", f"{text}; got a text{_ENCODED_TWICE}")
    return Fault(fault.field, f"{text}; got {_KINDS.get(got[1], got[1])}" if got else text)


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
