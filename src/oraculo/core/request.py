"""A request for a run (the body of `POST /orquestracoes`): how it is read, and how a run is made of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from oraculo.core.plan import Plan
from oraculo.core.run import Channel, Run, RunDelivery, RunHead, Task
from oraculo.errors import Fault, InvalidJson, InvalidRequest, PayloadTooLarge, UnknownPipeline
from oraculo.pipeline import bridges
from oraculo.pipeline.definition import (
    MAX_FAULTS,
    MAX_STEPS,
    NO_JSON,
    Definition,
    Kind,
    Step,
    content_hash,
    encode_definition,
    id_fault,
    quorum_fault,
    seconds_fault,
    text_fault,
)
from oraculo.pipeline.retry import DEFAULT_RETRY, RetryPolicy
from oraculo.wire import naming
from oraculo.wire.json_guard import check_json_text, holds_far_number, json_fault
from oraculo.wire.message import fault_of, object_fault, with_nearest

FIELDS = (
    "destinos",
    "tipo",
    "pipeline",
    "payload",
    "timeout",
    "correlation_id",
    "webhook",
    "responder_em",
    "prioridade",
    "quorum",
)


# The types that a length of time may have in a request. A fault shows a wrong value; a structure is refused unbuilt.
Seconds = int | float | str | bool | None


class Destination(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One item of `destinos` that is written as an object."""

    fila: str | None = None
    id: str | None = None
    payload: msgspec.Raw = NO_JSON
    timeout: Seconds = None


class RunRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request as it came. `read_request` checks all that needs no knowledge of pipelines and routes."""

    destinos: list[str | Destination] | None = None
    tipo: str | None = None
    pipeline: str | None = None
    payload: msgspec.Raw = NO_JSON
    timeout: Seconds = None
    correlation_id: str | None = None
    webhook: str | None = None
    responder_em: str | None = None
    prioridade: int | None = None
    quorum: int | str | None = None


class _WithFloats(RunRequest, forbid_unknown_fields=True, kw_only=True):
    """A request whose whole numbers are written as 1.0, because some languages write every number so."""

    prioridade: float | None = None  # type: ignore[assignment]
    quorum: float | str | None = None  # type: ignore[assignment]


class Catalogue(Protocol):
    """The routes and pipelines that a request may name."""

    @property
    def routes(self) -> Mapping[str, Sequence[str]]: ...
    @property
    def pipelines(self) -> Mapping[str, Definition]: ...


class Limits(msgspec.Struct, frozen=True):
    """The most bytes of a payload and of a whole request."""

    payload_bytes: int = 1024 * 1024
    request_bytes: int = 32 * 1024 * 1024


_decoder = msgspec.json.Decoder(RunRequest)
_float_decoder = msgspec.json.Decoder(_WithFloats)
_WHOLE = ("prioridade", "quorum")
_SUBJECTS = ("destinos", "tipo", "pipeline")


def read_request(body: bytes, limits: Limits) -> RunRequest:
    """Return the request in a body.

    Raises PayloadTooLarge, InvalidJson, or InvalidRequest: with the first value of a wrong type, else with every fault.
    """
    if len(body) > limits.request_bytes:
        raise PayloadTooLarge("request", len(body), limits.request_bytes)
    check_json_text(body)
    try:
        request = _decode(body)
    except msgspec.ValidationError as error:
        fault = fault_of(error)
        known = Destination.__struct_fields__ if fault.field.startswith("destinos") else FIELDS
        raise InvalidRequest(with_nearest(fault, known)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidJson(json_fault(body, error)) from None
    payloads = list(_payloads(request))
    faults = [*_subject_faults(request), *_option_faults(request), *_payload_faults(payloads)]
    if faults:
        raise InvalidRequest(faults[:MAX_FAULTS])
    for field, payload in payloads:
        if len(payload) > limits.payload_bytes:
            raise PayloadTooLarge(field, len(payload), limits.payload_bytes)
    return request


def _decode(body: bytes) -> RunRequest:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        if fault_of(error).field not in _WHOLE:
            raise
        try:
            request = _float_decoder.decode(body)
        except msgspec.ValidationError:
            raise error from None
        floats = {name: number for name in _WHOLE if isinstance(number := getattr(request, name), float)}
        if any(number % 1 for number in floats.values()):
            raise
    return msgspec.structs.replace(request, **{name: int(number) for name, number in floats.items()})


def _payloads(request: RunRequest) -> Iterator[tuple[str, msgspec.Raw]]:
    if request.payload:
        yield "payload", request.payload
    for number, destination in enumerate(request.destinos or ()):
        if isinstance(destination, Destination) and destination.payload:
            yield f"destinos[{number}].payload", destination.payload


def _payload_faults(payloads: Sequence[tuple[str, msgspec.Raw]]) -> Iterator[Fault]:
    for field, payload in payloads:
        if (fault := object_fault(field, bytes(payload))) is not None:
            yield fault
        elif holds_far_number(bytes(payload)):
            yield Fault(field, "holds a number that is too large to be read; put it in quotes, as a text")


def _subject_faults(request: RunRequest) -> list[Fault]:
    given = [name for name in _SUBJECTS if getattr(request, name) is not None]
    if len(given) != 1:
        field, got = (given[1], " and ".join(given)) if given else ("destinos", "none of them")
        return [Fault(field, f"exactly one of destinos, tipo and pipeline is needed; got {got}")]
    if request.destinos is None:
        return []
    if not request.destinos:
        return [Fault("destinos", "is empty: name at least one destination")]
    if len(request.destinos) > MAX_STEPS:
        return [Fault("destinos", f"has {len(request.destinos)} destinations; at most {MAX_STEPS} are allowed")]
    return _destination_faults(request.destinos)


def _destination_faults(destinations: list[str | Destination]) -> list[Fault]:
    faults: list[Fault] = []
    seen: dict[str, int] = {}
    for number, item in enumerate(destinations):
        at = f"destinos[{number}]"
        queue, name = (item, item) if isinstance(item, str) else _queue_and_id(item)
        if queue is None or name is None:
            faults.append(Fault(at, 'needs `fila`, the name of its queue, as {"fila": "escavador_youtube"}'))
            continue
        if fault := bridges.destination_fault(queue):
            given = "" if isinstance(item, str) else ".id" if item.fila is None else ".fila"
            faults.append(Fault(f"{at}{given}", fault))
        elif name is not queue and (fault := id_fault(name)):
            faults.append(Fault(f"{at}.id", fault))
        if isinstance(item, Destination) and item.timeout is not None and (fault := seconds_fault(item.timeout)):
            faults.append(Fault(f"{at}.timeout", fault))
        if (first := seen.setdefault(name, number)) != number:
            faults.append(Fault(at, f"the id '{name}' is destinos[{first}]'s already; give each its own `id`"))
        if len(faults) >= MAX_FAULTS:
            break
    return faults


def _queue_and_id(item: Destination) -> tuple[str | None, str | None]:
    """Return the queue and the id of a destination. Each stands in for the other when that is missing."""
    return item.id if item.fila is None else item.fila, item.fila if item.id is None else item.id


def _option_faults(request: RunRequest) -> list[Fault]:
    faults: list[Fault] = []
    if request.timeout is not None and (fault := seconds_fault(request.timeout)):
        faults.append(Fault("timeout", fault))
    if request.correlation_id is not None and (fault := text_fault(request.correlation_id)):
        faults.append(Fault("correlation_id", fault))
    if request.webhook is not None and (fault := webhook_fault(request.webhook)):
        faults.append(Fault("webhook", fault))
    if request.responder_em is not None and (fault := naming.reply_queue_fault(request.responder_em)):
        faults.append(Fault("responder_em", fault))
    if request.prioridade is not None and not 0 <= request.prioridade <= 9:
        faults.append(
            Fault("prioridade", f"must be a whole number from 0 to 9; got {naming.shown(request.prioridade)}")
        )
    return faults


def webhook_fault(url: str) -> str | None:
    right = "must be an http:// or https:// URL of at most 2048 characters"
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")  # the resolver does so, too
    except ValueError:
        fits = False
    return None if fits and url.isprintable() and " " not in url and len(url) <= 2048 else right


class PlanCache(Protocol):
    """The compiled plans, by the hash of their definition."""

    def plan(self, definition_hash: str, encoded: bytes, definition: Definition | None = None) -> Plan: ...


def definition_of(
    request: RunRequest,
    catalogue: Catalogue,
    *,
    default_timeout: float,
    default_retry: RetryPolicy = DEFAULT_RETRY,
) -> Definition:
    """Return the definition that the request asks to run.

    Raises InvalidRequest for an unknown route or pipeline, with the nearest name, and for a quorum that cannot be met.
    """
    if request.pipeline is None:
        definition = _fan_out(request, catalogue, default_timeout, default_retry)
    elif (found := catalogue.pipelines.get(request.pipeline)) is not None:
        changed = {key: value for key, value in _overrides(request).items() if value is not None}
        definition = msgspec.structs.replace(found, **changed) if changed else found
    else:
        near = naming.nearest(request.pipeline, catalogue.pipelines)
        raise UnknownPipeline(Fault("pipeline", f"there is no pipeline {naming.shown(request.pipeline)}{near}"))
    if fault := quorum_fault(definition.quorum, len(definition.steps)):
        raise InvalidRequest(Fault("quorum", fault))
    return definition


def _overrides(request: RunRequest) -> dict[str, Any]:
    return {"timeout": None if request.timeout is None else float(request.timeout), "quorum": request.quorum}


def _fan_out(
    request: RunRequest, catalogue: Catalogue, default_timeout: float, default_retry: RetryPolicy
) -> Definition:
    destinations: Sequence[str | Destination]
    if request.tipo is not None:
        if request.tipo not in catalogue.routes:
            near = naming.nearest(request.tipo, catalogue.routes)
            raise InvalidRequest(Fault("tipo", f"there is no route {naming.shown(request.tipo)}{near}"))
        destinations = catalogue.routes[request.tipo]
    else:
        destinations = request.destinos or ()
    return Definition(
        name=request.tipo or "",
        steps=tuple(_fan_out_step(item, default_retry) for item in destinations),
        kind=Kind.FAN_OUT,
        timeout=default_timeout if request.timeout is None else float(request.timeout),
        quorum=request.quorum,
    )


def _fan_out_step(item: str | Destination, retry: RetryPolicy) -> Step:
    if isinstance(item, str):
        return _placed(Step(id=item, queue=item, retry=retry))
    queue = item.fila or item.id or ""
    timeout = None if item.timeout is None else float(item.timeout)
    return _placed(Step(id=item.id or queue, queue=queue, payload=item.payload, timeout=timeout, retry=retry))


def _placed(step: Step) -> Step:
    """Return the step with its bridge, when its destination is the URL of one."""
    if not bridges.is_bridge(step.queue):
        return step
    bridge = bridges.read_bridge(step.queue)
    assert isinstance(bridge, bridges.Bridge), "read_request or the settings have checked it"
    return msgspec.structs.replace(step, queue=bridges.QUEUES[bridge.kind], bridge=bridge)


def new_run(
    request: RunRequest,
    definition: Definition,
    *,
    run_id: str,
    now: float,
    plans: PlanCache,
    traceparent: str | None = None,
) -> Run:
    """Return the run before its first event. `core.machine.start` makes its first changes."""
    encoded = encode_definition(definition)
    digest = content_hash(encoded)
    plan = plans.plan(digest, encoded, definition)
    head = RunHead(
        id=run_id,
        name=definition.name,
        definition_hash=digest,
        created_at=now,
        deadline=now + definition.timeout,
        timeout=definition.timeout,
        total=len(plan),
        priority=request.prioridade or 0,
        traceparent=traceparent,
        deliveries=_deliveries(request),
    )
    payload = bytes(request.payload) or b"{}"
    return Run(head, plan, encoded, payload, [Task(number) for number in range(len(plan))])


def _deliveries(request: RunRequest) -> list[RunDelivery]:
    wanted = ((Channel.WEBHOOK, request.webhook), (Channel.QUEUE, request.responder_em))
    return [RunDelivery(channel, target) for channel, target in wanted if target is not None]
