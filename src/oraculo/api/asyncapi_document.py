"""The AsyncAPI 3 document: the queues, the messages on them, and what ORÁCULO does with each.

It is built from the present pipelines and routes. The caller passes the API's schemas of requests and aggregates.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit

from oraculo.api.asyncapi_messages import DEAD_LETTER, Object, components, ref
from oraculo.pipeline.bridges import queue_of
from oraculo.pipeline.definition import Definition
from oraculo.settings.urls import node_urls
from oraculo.wire import naming
from oraculo.wire.naming import QueueNames, numbered

SPECIFICATION = "3.0.0"

MAX_USES = 50  # of one queue that its description names: a pipeline may have 100,000 steps

_AMQP_BINDING = {"bindingVersion": "0.3.0"}
_ANSWERS = (naming.COLLECTED, naming.EXECUTED, naming.PROGRESS)
_REPLY_CHANNEL = "resposta"
_DESCRIPTION = """\
Orchestrates work that many services do together, over plain JSON messages. Every message is one JSON object with the
same envelope; `tipo_evento` names it, and `correlation_id` names its run.

To take part, a worker in any language reads the queue of its name, does what the command's `payload` asks, and
publishes to `{answers}` with the same `correlation_id`, and `tarefa` where it can. A message leaves its queue only
after it was handled; one that cannot be is never dropped: it goes to `<queue>.dlq`, with the reason.

Operations are named from ORÁCULO's side: it receives requests and answers, and sends commands and aggregates."""


def asyncapi_document(
    *,
    version: str,
    broker_urls: Iterable[str],
    prefix: str,
    routes: Mapping[str, Sequence[str]],
    pipelines: Iterable[Definition],
    schemas: Mapping[str, Object],
) -> Object:
    """Return the document. `schemas` has `Pedido`, `Agregado` and every schema that they refer to."""
    names, brokers = QueueNames(prefix), _read_brokers(broker_urls)
    destinations = _destinations(routes, pipelines)
    writer = _Writer(names, brokers, _free_name(_REPLY_CHANNEL, destinations))
    servers = {"servers": {broker.name: _server(broker) for broker in brokers}} if brokers else {}
    return {
        "asyncapi": SPECIFICATION,
        "info": {"title": "ORÁCULO", "version": version, "description": _DESCRIPTION.format(answers=names.answers)},
        **servers,
        "defaultContentType": "application/json",
        "channels": writer.channels(destinations),
        "operations": writer.operations(destinations),
        "components": components(schemas),
    }


# -- brokers ----------------------------------------------------------------------------------------------------------


class _BrokerKind(NamedTuple):
    """A kind of broker: its name, its protocol, and its form of a queue."""

    name: str
    protocol: str
    layout: str


_AMQP = "amqp"
_RABBITMQ = _BrokerKind(
    "rabbitmq",
    _AMQP,
    "RabbitMQ. A channel is a durable queue of that name on the default exchange: publish with the name as the routing "
    "key, persistently, with publisher confirms. A plain client may declare it passively.",
)
_REDIS = _BrokerKind(
    "redis",
    "redis",
    "Redis Streams. A channel is a stream whose key is the address, with the JSON in the field `body`; its consumer "
    "group has the same name.",
)
_NATS = _BrokerKind(
    "nats",
    "nats",
    "NATS JetStream. A channel is a subject, kept by a file-backed stream of its own; messages are acked explicitly.",
)
_BROKER_KINDS = {
    "amqp": _RABBITMQ,
    "amqps": _RABBITMQ._replace(protocol="amqps"),
    "redis": _REDIS,
    "rediss": _REDIS,
    "nats": _NATS,
    "tls": _NATS,
}
_TLS_SCHEMES = frozenset({"amqps", "rediss", "tls"})


class _Broker(NamedTuple):
    name: str
    kind: _BrokerKind
    host: str
    others: str  # the other nodes of the same cluster
    path: str  # percent-encoded, without the leading slash
    is_secure: bool
    has_password: bool


def _read_brokers(urls: Iterable[str]) -> list[_Broker]:
    """Return the brokers that other processes can reach, with the names that `GET /filas` uses."""
    clusters = [[urlsplit(node) for node in node_urls(url)] for url in urls]
    found = [(_BROKER_KINDS[nodes[0].scheme], nodes) for nodes in clusters if nodes[0].scheme in _BROKER_KINDS]
    names = numbered([kind.name for kind, _ in found])
    return [_read_broker(name, kind, nodes) for name, (kind, nodes) in zip(names, found, strict=True)]


def _read_broker(name: str, kind: _BrokerKind, nodes: Sequence[SplitResult]) -> _Broker:
    """Return the broker without user, password and query, which readers of the document must not see."""
    first, others = nodes[0], ", ".join(map(_host, nodes[1:]))
    # An `@` behind the host belongs to a password that is not encoded, so the rest is not shown.
    is_odd = "@" in first.path + first.query + first.fragment
    return _Broker(
        name,
        kind,
        (first.hostname or "localhost") if is_odd else _host(first),
        "" if is_odd else others,
        "" if is_odd else first.path.removeprefix("/"),
        is_secure=first.scheme in _TLS_SCHEMES,
        has_password=first.password is not None,
    )


def _host(parts: SplitResult) -> str:
    host = parts.hostname or "localhost"
    host = f"[{host}]" if ":" in host else host
    return host if parts.port is None else f"{host}:{parts.port}"


def _server(broker: _Broker) -> Object:
    notes = (" Over TLS." if broker.is_secure else "") + (
        f" Other nodes of the same cluster: {broker.others}." if broker.others else ""
    )
    server = {"host": broker.host, "protocol": broker.kind.protocol, "description": broker.kind.layout + notes}
    if broker.path:
        server["pathname"] = "/" + quote(broker.path, safe="/%")  # AsyncAPI takes braces for a variable
    return server | ({"security": [{"type": "userPassword"}]} if broker.has_password else {})


# -- who uses a queue -------------------------------------------------------------------------------------------------


def _destinations(routes: Mapping[str, Sequence[str]], pipelines: Iterable[Definition]) -> dict[str, str]:
    """Return the description of each destination, with the routes and steps that send to it."""
    users: dict[str, list[str]] = {}
    for route, destinations in sorted(routes.items()):
        for queue in dict.fromkeys(map(queue_of, destinations)):
            users.setdefault(queue, []).append(f"- route `{route}`")
    for definition in sorted(pipelines, key=lambda definition: definition.name):
        for step in definition.steps:
            users.setdefault(step.queue, []).append(f"- pipeline `{definition.name}`, step `{step.id}`")
    return {queue: _description(queue, users[queue]) for queue in sorted(users)}


def _description(queue: str, users: Sequence[str]) -> str:
    more = [f"- and {len(users) - MAX_USES} more"] if len(users) > MAX_USES else []
    return "\n".join([f"Commands for `{queue}`. Used by:", "", *users[:MAX_USES], *more])


def _free_name(wish: str, taken: Mapping[str, object]) -> str:
    while wish in taken:
        wish += "_"
    return wish


# -- channels and operations ------------------------------------------------------------------------------------------


class _Writer:
    """The writer of channels and operations. Logical queue names keep references the same under any prefix."""

    def __init__(self, names: QueueNames, brokers: Sequence[_Broker], reply_channel: str) -> None:
        self._names = names
        self._reply_channel = reply_channel
        self._vhosts = {unquote(broker.path) or "/" for broker in brokers if broker.kind.name == _RABBITMQ.name}

    def channels(self, destinations: Mapping[str, str]) -> Object:
        own = {
            naming.REQUESTS: self._queue(naming.REQUESTS, [naming.START_RUN], "Requests: whoever wants a run."),
            naming.ANSWERS: self._queue(naming.ANSWERS, _ANSWERS, "Answers and progress, from every worker."),
        }
        commands = {
            queue: self._queue(queue, [naming.command_event(queue)], description)
            for queue, description in destinations.items()
        }
        dead_letters = {
            naming.dlq_of(queue): self._queue(naming.dlq_of(queue), [DEAD_LETTER], f"The dead letters of `{queue}`.")
            for queue in own | commands
        }
        return own | commands | dead_letters | {self._reply_channel: self._reply_queue()}

    def _queue(self, queue: str, messages: Iterable[str], description: str) -> Object:
        address = self._names.physical(queue)
        channel = {"address": address, "description": description, "messages": _channel_messages(messages)}
        if self._vhosts:
            channel["bindings"] = {_AMQP: {"is": "queue", "queue": self._amqp_queue(address), **_AMQP_BINDING}}
        return channel

    def _amqp_queue(self, address: str) -> Object:
        queue: Object = {"name": address, "durable": True, "exclusive": False, "autoDelete": False}
        return queue | ({"vhost": next(iter(self._vhosts))} if len(self._vhosts) == 1 else {})

    def _reply_queue(self) -> Object:
        prefixed = f", behind the prefix `{self._names.prefix}`" if self._names.prefix else ""
        return {
            "address": None,
            "title": "responder_em",
            "description": f"The queue that a request names in `responder_em`{prefixed}: where its aggregate is sent.",
            "messages": _channel_messages([naming.RUN_ENDED]),
        }

    def operations(self, destinations: Iterable[str]) -> Object:
        queues = [naming.REQUESTS, naming.ANSWERS, *destinations]
        own = {
            "receber_pedidos": self._receive(naming.REQUESTS, [naming.START_RUN], "Takes requests for runs.")
            | {"reply": self._aggregate_reply()},
            "receber_resultados": self._receive(
                naming.ANSWERS, _ANSWERS, "Takes what workers answer, and the signs of life that they give."
            ),
            "entregar_agregado": self._send(
                self._reply_channel,
                [naming.RUN_ENDED],
                "Brings the aggregate of an ended run to whoever asked; again, under the next `versao`, when a late "
                "answer amends it.",
            ),
        }
        commands = {f"comandar.{queue}": self._command(queue) for queue in destinations}
        dead_letters = {f"isolar.{queue}": self._dead_letters(queue) for queue in (naming.REQUESTS, naming.ANSWERS)}
        return own | commands | dead_letters | {f"reenviar.{queue}": self._redrive(queue) for queue in queues}

    def _command(self, queue: str) -> Object:
        """Return the operation that sends commands. The reply has a fixed channel, although `responder_em` names it."""
        answers = _message_refs(naming.ANSWERS, [naming.answer_event(queue), naming.PROGRESS])
        reply = {"channel": ref("channels", naming.ANSWERS), "messages": answers}
        summary = f"Asks `{queue}` for one subtask of a run, and awaits the answer until `prazo`."
        return self._send(queue, [naming.command_event(queue)], summary) | {"reply": reply}

    def _aggregate_reply(self) -> Object:
        where = "A logical name: the prefix is put before it." if self._names.prefix else "None given: no reply."
        return {
            "address": {"location": "$message.payload#/payload/responder_em", "description": where},
            "channel": ref("channels", self._reply_channel),
            "messages": _message_refs(self._reply_channel, [naming.RUN_ENDED]),
        }

    def _dead_letters(self, queue: str) -> Object:
        summary = f"Sets apart what came on `{queue}` and could not be handled, with the reason."
        return self._send(naming.dlq_of(queue), [DEAD_LETTER], summary)

    def _redrive(self, queue: str) -> Object:
        summary = f"Takes dead letters out, back to `{queue}` or away, when `POST /filas/{queue}/dlq/reenviar` asks."
        return self._receive(naming.dlq_of(queue), [DEAD_LETTER], summary)

    def _send(self, channel: str, messages: Iterable[str], summary: str) -> Object:
        return self._operation("send", channel, messages, summary, {"deliveryMode": 2})

    def _receive(self, channel: str, messages: Iterable[str], summary: str) -> Object:
        return self._operation("receive", channel, messages, summary, {"ack": True})

    def _operation(self, action: str, channel: str, messages: Iterable[str], summary: str, amqp: Object) -> Object:
        bindings = {"bindings": {_AMQP: {**amqp, **_AMQP_BINDING}}} if self._vhosts else {}
        return {
            "action": action,
            "channel": ref("channels", channel),
            "summary": summary,
            "messages": _message_refs(channel, messages),
            **bindings,
        }


def _channel_messages(events: Iterable[str]) -> Object:
    return {event: ref("components", "messages", event) for event in events}


def _message_refs(channel: str, events: Iterable[str]) -> list[Object]:
    """Return references through the channel: AsyncAPI allows an operation only messages of its channel."""
    return [ref("channels", channel, "messages", event) for event in events]
