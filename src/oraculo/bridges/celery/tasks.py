"""Commands as Celery tasks: names, ids, arguments, and the callbacks that bring the replies.

The callbacks `oraculo.retornou` and `oraculo.falhou` are links to tasks that no Celery app has. Celery publishes them
as messages to the bridge's exchange when the task ends. Each carries the return address of its command, so the bridge
need not remember what it sent.

A link gets the task's value. A link_error gets only the task's id, because an exception is no JSON. The reason comes
with the workers' events, and `failure_reasons` joins the two.
"""

import uuid
from datetime import UTC, datetime
from typing import Any

import msgspec
from celery import Celery

from oraculo.errors import Fault, InvalidMessage
from oraculo.pipeline import bridges
from oraculo.pipeline.bridges import Bridge
from oraculo.wire.message import Message
from oraculo.wire.timestamps import from_iso

RETURNED = "oraculo.retornou"
FAILED = "oraculo.falhou"
ADDRESS = "comando"  # the keyword argument of both callbacks that holds the return address

_IDS = uuid.UUID("6f1d2a0e-5a55-5c0c-9d7e-0aac1105e1e5")
_STEP_PAYLOAD = frozenset({"config", "entrada", "resultados"})  # the payload of a pipeline's step
_ECHOED = ("correlation_id", "tipo_evento", "tarefa", "tentativa", "responder_em", "traceparent")
_NO_PAYLOAD = msgspec.Raw(b"{}")
_MAX_ARGUMENTS_SHOWN = 500

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_protocol = Celery("oraculo", set_as_current=False).amqp  # writes headers; it connects to nothing


class ReturnAddress(Message):
    """The part of a command that its answer needs, and the broker that brought the command."""

    via: str | None = None


class CeleryTask(msgspec.Struct, frozen=True):
    """A task in version 2 of Celery's protocol, ready to be published."""

    id: str
    queue: str
    body: bytes
    headers: dict[str, Any]
    properties: dict[str, Any]


def read_destination(command: Message) -> Bridge:
    """Return which task a command means. Raises InvalidMessage."""
    try:
        found = msgspec.convert(command.ponte, Bridge)
    except msgspec.ValidationError as error:
        raise InvalidMessage(Fault("ponte", f"does not say which task is meant: {error}")) from None
    if found.kind != bridges.CELERY:
        raise InvalidMessage(Fault("ponte.tipo", f"must be {bridges.CELERY} on this queue; got {found.kind!r}"))
    return found


def task_id_of(command: Message) -> str:
    """Return the same id for each repeat of a command. A command of a plain publisher has no identity and no repeat."""
    if command.tarefa is None or command.tentativa is None:
        return str(uuid.uuid4())
    return str(uuid.uuid5(_IDS, f"{command.correlation_id}\0{command.tarefa}\0{command.tentativa}"))


def address_of(command: Message, via: str | None) -> ReturnAddress:
    echoed = {name: getattr(command, name) for name in _ECHOED}
    return ReturnAddress(payload=_NO_PAYLOAD, timestamp="", via=via, **echoed)


def read_address(address: object) -> ReturnAddress:
    """Return the address that a callback carries. Raises InvalidMessage."""
    if not isinstance(address, dict):
        raise InvalidMessage(Fault(ADDRESS, "is missing: it says whose answer this is"))
    try:
        return msgspec.convert({"payload": _NO_PAYLOAD, "timestamp": "", **address}, ReturnAddress)
    except msgspec.ValidationError as error:
        raise InvalidMessage(Fault(ADDRESS, f"does not say whose answer this is: {error}")) from None


def task_headers(task_id: str, name: str, *, arguments: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a task's headers and properties. `arguments`: what Flower and the worker's log show of them."""
    made = _protocol.as_task_v2(task_id, name, argsrepr=arguments, kwargsrepr="", origin="oraculo", **options)
    return made.headers, made.properties


def make_task(
    command: Message,
    destination: Bridge,
    *,
    address: ReturnAddress,
    reply_exchange: str,
    default_queue: str,
    priority: int = 0,
) -> CeleryTask:
    """Make the task of a command. Raises InvalidMessage if the payload cannot be the task's arguments."""
    args, kwargs = _arguments(command, destination)
    task_id = task_id_of(command)
    shown = msgspec.json.encode([args, kwargs])[:_MAX_ARGUMENTS_SHOWN].decode(errors="replace")
    headers, properties = task_headers(task_id, destination.target, arguments=shown, expires=_expiry(command))
    if command.traceparent:
        headers["traceparent"] = command.traceparent
    echoed = {name: value for name in (*_ECHOED, "via") if (value := getattr(address, name)) is not None}
    embed = {
        "callbacks": [_callback(RETURNED, echoed, reply_exchange)],
        "errbacks": [_callback(FAILED, echoed, reply_exchange)],
        "chain": None,
        "chord": None,
    }
    # The payload is copied as JSON, so that numbers which Python cannot hold stay as they came.
    body = msgspec.json.encode([args, kwargs, embed])
    return CeleryTask(task_id, destination.queue or default_queue, body, headers, properties | {"priority": priority})


def _arguments(command: Message, destination: Bridge) -> tuple[list[Any], dict[str, Any]]:
    if destination.send == bridges.PAYLOAD:
        return [command.payload, *destination.args], destination.kwargs
    fields = _object.decode(command.payload)
    if fields.keys() == _STEP_PAYLOAD and bytes(fields["config"]).startswith(b"{"):
        fields = _object.decode(fields["config"])
    return destination.args, fields | destination.kwargs


def _expiry(command: Message) -> str | None:
    """Return the deadline, after which Celery's workers leave the task."""
    at = None if command.prazo is None else from_iso(command.prazo)
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


def _callback(name: str, address: dict[str, Any], exchange: str) -> dict[str, Any]:
    return {
        "task": name,
        "args": [],
        "kwargs": {ADDRESS: address},
        # An exchange, because a worker declares the queue that it sends to, and may not be allowed to.
        # JSON, whatever the app's own serializers are: the bridge reads no pickle.
        "options": {"exchange": exchange, "routing_key": exchange, "serializer": "json"},
        "subtask_type": None,
        "immutable": False,
    }
