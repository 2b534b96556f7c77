"""The routes for monitoring: alive, ready, metrics."""

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
    """Set the gauges of queues and brokers. Without an answer there are none: old numbers would look new.

    The gauge of dead letters is left out while one of several brokers is away, because it cannot count its own.
    """
    before = operations.brokers()
    states: Sequence[QueueState] = ()
    with suppress(OraculoError, TimeoutError):
        async with asyncio.timeout(_SCRAPE_PATIENCE):
            states = await operations.queues()
    named = [msgspec.structs.replace(state, queue=operations.queue_name(state)) for state in states]
    brokers = operations.brokers()
    # A single broker counts even with trouble: it may be full, and answer all the same.
    is_complete = len(brokers) == 1 or all(broker.trouble is None for broker in (*before, *brokers))
    metrics.set_brokers(brokers)
    metrics.set_queues(named, operations.own_queues(), knows_dead_letters=is_complete)


async def _look_at_store(operations: Operations, metrics: Metrics) -> None:
    engines: int | None = None
    census: Mapping[RunStatus, int] | None = None
    with suppress(OraculoError, TimeoutError):  # the counters are useful without the store
        async with asyncio.timeout(_SCRAPE_PATIENCE):
            engines = len(await operations.engines())
            census = await operations.census()
    metrics.set_engines(engines)  # last, so that a scrape at the same time sees the numbers before
    metrics.set_census(census)
