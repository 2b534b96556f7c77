"""For whoever watches over the process: alive, able to take work, metrics."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
from fastapi import APIRouter, Response

from oraculo import __version__
from oraculo.api.context import Door, Shared
from oraculo.api.openapi import reply
from oraculo.api.replies import json_reply
from oraculo.core.run import RunStatus
from oraculo.engine.operations import Operations
from oraculo.errors import OraculoError
from oraculo.ports.broker_admin import QueueState
from oraculo.telemetry.metrics import Metrics

router = APIRouter(tags=["saude"], default_response_class=Response)

_SCRAPE_PATIENCE = 5.0  # seconds; Prometheus gives up after ten


@router.get("/health", summary="Alive", responses={200: reply("It is.", "Saude")})
async def alive() -> Response:
    return json_reply({"status": "ok", "versao": __version__})


@router.get(
    "/health/ready",
    summary="Able to take work",
    responses={200: reply("It is.", "Prontidao"), 503: reply("It is not: `partes` says why.", "Prontidao")},
)
async def ready(operations: Door) -> Response:
    health = await operations.health()
    parts = {part: {"ok": fault is None, "problema": fault} for part, fault in health.parts.items()}
    status = "indisponivel" if not health.is_ready else "degradado" if any(health.parts.values()) else "ok"
    return json_reply({"status": status, "versao": __version__, "partes": parts}, 200 if health.is_ready else 503)


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    responses={200: {"description": "As text.", "content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def show_metrics(shared: Shared) -> Response:
    await asyncio.gather(
        _look_at_queues(shared.operations, shared.metrics), _look_at_store(shared.operations, shared.metrics)
    )
    return Response(shared.metrics.render(), media_type=shared.metrics.content_type)


async def _look_at_queues(operations: Operations, metrics: Metrics) -> None:
    """Without an answer there are no numbers: old ones would look like new. Nor is there one of dead letters that lacks
    those of a broker which is away: they wait for it, while its commands are sent again by another and counted there.
    """
    before = operations.brokers()
    states: Sequence[QueueState] = ()
    with suppress(OraculoError, TimeoutError):
        async with asyncio.timeout(_SCRAPE_PATIENCE):
            states = await operations.queues()
    named = [msgspec.structs.replace(state, queue=operations.queue_name(state)) for state in states]
    links = operations.brokers()
    # The only one is asked though it has trouble: it may be full, say, and tell all the same.
    all_told = len(links) == 1 or all(link.trouble is None for link in (*before, *links))
    metrics.set_brokers(links)
    metrics.set_queues(named, operations.own_queues(), knows_dead_letters=all_told)


async def _look_at_store(operations: Operations, metrics: Metrics) -> None:
    engines: int | None = None
    census: Mapping[RunStatus, int] | None = None
    with suppress(OraculoError, TimeoutError):  # the counters are worth having without it
        async with asyncio.timeout(_SCRAPE_PATIENCE):
            engines = len(await operations.engines())
            census = await operations.census()
    metrics.set_engines(engines)  # at last: another who asks just now has what was known before
    metrics.set_census(census)
