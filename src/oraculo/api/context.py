"""The objects that every route needs, from the application's state."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from oraculo.api.room import Room
from oraculo.engine.deliver.webhooks import ID_HEADER
from oraculo.engine.operations import Operations
from oraculo.errors import Conflict
from oraculo.settings import Settings
from oraculo.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ApiContext:
    operations: Operations
    settings: Settings
    metrics: Metrics
    room: Room  # for requests
    replies: Room


async def _context(request: Request) -> ApiContext:
    context: ApiContext = request.app.state.context
    return context


async def _operations(request: Request) -> Operations:
    return (await _context(request)).operations


async def _no_webhook(request: Request) -> None:
    """Raise Conflict for a call with a webhook's headers: a run that its own webhook reopens would never end."""
    if ID_HEADER in request.headers:
        raise Conflict(f"This call has the header {ID_HEADER} of a webhook, and no webhook may change a run.")


async def _expect_started(request: Request) -> None:
    await (await _operations(request)).expect_started()


Shared = Annotated[ApiContext, Depends(_context)]
Door = Annotated[Operations, Depends(_operations)]
NotForWebhooks = Depends(_no_webhook)
OnceStarted = Depends(_expect_started)
