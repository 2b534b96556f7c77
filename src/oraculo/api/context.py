"""What every route works with, kept in the application's state."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from oraculo.engine.operations import Operations
from oraculo.settings import Settings
from oraculo.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Context:
    operations: Operations
    settings: Settings
    metrics: Metrics


async def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


async def _operations(request: Request) -> Operations:
    return (await _context(request)).operations


Shared = Annotated[Context, Depends(_context)]
Door = Annotated[Operations, Depends(_operations)]
