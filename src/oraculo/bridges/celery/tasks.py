"""A command as a Celery task: its name, arguments and id, and the callbacks that report what became of it.

The callbacks are links to tasks that no Celery app has: whoever ends the task only sends them on, to an exchange of the
bridge's. They carry the return address of the command, so the bridge need not remember anything.

A link gets the task's value. A link_error that the worker does not know gets the task's id and no reason, for an
exception is no JSON. The reason comes with the workers' events; `reasons.py` puts the two together.
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
ADDRESS = "comando"  # the keyword argument of both that holds the return address

_IDS = uuid.UUID("6f1d2a0e-5a55-5c0c-9d7e-0aac1105e1e5")
_STEP_PAYLOAD = frozenset({"config", "entrada", "resultados"})  # what a pipeline's step is sent
_ECHOED = ("correlation_id", "tipo_evento", "tarefa", "tentativa", "responder_em", "traceparent")
_NO_PAYLOAD = msgspec.Raw(b"{}")

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ReturnAddress(Message):
    """As much of a command as its answer needs, and of several brokers the one that brought it."""

    via: str | None = None


class Task(msgspec.Struct, frozen=True):
    """A task in Celery's protocol (version 2), ready to be published."""

    id: str
    queue: str
    body: bytes
    headers: dict[str, Any]
    properties: dict[str, Any]


def read_destination(command: Message) -> Bridge:
    """Raises InvalidMessage."""
    try:
        found = msgspec.convert(command.ponte, Bridge)
    except msgspec.ValidationError as error:
        raise InvalidMessage(Fault("ponte", f"does not say which task is meant: {error}")) from None
    if found.kind != bridges.CELERY:
        raise InvalidMessage(Fault("ponte.tipo", f"must be {bridges.CELERY} on this queue; got {found.kind!r}"))
    return found


def task_id_of(command: Message) -> str:
    """The same for each repeat of a command; commands of plain publishers, without an identity, are all different."""
    if command.tarefa is None or command.tentativa is None:
        return str(uuid.uuid4())
    return str(uuid.uuid5(_IDS, f"{command.correlation_id}\0{command.tarefa}\0{command.tentativa}"))


def address_of(command: Message, via: str | None) -> ReturnAddress:
    echoed = {name: getattr(command, name) for name in _ECHOED}
    return ReturnAddress(payload=_NO_PAYLOAD, timestamp="", via=via, **echoed)


def read_address(address: object) -> ReturnAddress:
    """Raises InvalidMessage."""
    if not isinstance(address, dict):
        raise InvalidMessage(Fault(ADDRESS, "is missing: it says whose answer this is"))
    try:
        return msgspec.convert({"payload": _NO_PAYLOAD, "timestamp": "", **address}, ReturnAddress)
    except msgspec.ValidationError as error:
        raise InvalidMessage(Fault(ADDRESS, f"does not say whose answer this is: {error}")) from None


def make_task(
    app: Celery,
    command: Message,
    destination: Bridge,
    *,
    address: ReturnAddress,
    reply_exchange: str,
    default_queue: str,
    priority: int = 0,
) -> Task:
    """Raises InvalidMessage when the payload cannot be the task's arguments. `priority`: as Celery's broker has it."""
    positional, keywords = _arguments(command, destination)
    task_id = task_id_of(command)
    # Celery writes the headers, out of arguments as people see them; the body is ours, so that JSON stays as it came.
    made = app.amqp.as_task_v2(
        task_id,
        destination.target,
        argsrepr=_shown(positional),
        kwargsrepr=_shown(keywords),
        expires=_expiry(command),
        origin="oraculo",
    )
    headers = made.headers | ({"traceparent": command.traceparent} if command.traceparent else {})
    back = {name: value for name in (*_ECHOED, "via") if (value := getattr(address, name)) is not None}
    embed = {
        "callbacks": [_signature(RETURNED, back, reply_exchange)],
        "errbacks": [_signature(FAILED, back, reply_exchange)],
        "chain": None,
        "chord": None,
    }
    body = msgspec.json.encode([positional, keywords, embed])
    return Task(task_id, destination.queue or default_queue, body, headers, made.properties | {"priority": priority})


def _arguments(command: Message, destination: Bridge) -> tuple[list[Any], dict[str, Any]]:
    if destination.send == bridges.PAYLOAD:
        return [command.payload, *destination.args], destination.kwargs
    fields = _object.decode(command.payload)
    if fields.keys() == _STEP_PAYLOAD and bytes(fields["config"]).startswith(b"{"):
        fields = _object.decode(fields["config"])
    return destination.args, fields | destination.kwargs


def _expiry(command: Message) -> str | None:
    """Nobody needs what begins after the deadline; Celery's workers then leave it."""
    at = None if command.prazo is None else from_iso(command.prazo)
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


def _shown(arguments: object) -> str:
    """For Flower and the worker's log."""
    return msgspec.json.encode(arguments)[:500].decode(errors="replace")


def _signature(name: str, address: dict[str, Any], exchange: str) -> dict[str, Any]:
    return {
        "task": name,
        "args": [],
        "kwargs": {ADDRESS: address},
        # An exchange and not a queue: the app need not be allowed to make queues, and declares nothing of ours.
        # JSON whatever the app's own serializers are: a pickle would not be read.
        "options": {"exchange": exchange, "routing_key": exchange, "serializer": "json"},
        "subtask_type": None,
        "immutable": False,
    }
