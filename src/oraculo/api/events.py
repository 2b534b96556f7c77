"""The route of a run's history: a page of JSON, or a live stream of server-sent events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from pydantic import Field
from starlette.types import Receive, Scope, Send

from oraculo.api.context import Door
from oraculo.api.openapi import problems, reply
from oraculo.api.parameters import ExactQuery, OptionalSeq, RunId, Seq, when_empty
from oraculo.api.paths import RUN
from oraculo.api.preferences import EVENT_STREAM, wants_events
from oraculo.api.replies import json_reply, json_text, page_of
from oraculo.core.history import HistoryEntry
from oraculo.core.plan import Plan
from oraculo.core.run import RunStatus
from oraculo.core.views import entry_view
from oraculo.engine.operations import Operations
from oraculo.errors import OraculoError

KEEP_ALIVE = 15.0  # seconds of silence after which proxies might take a stream for dead
END = "fim"
_PAGE = 500

_logger = logging.getLogger("oraculo.api")
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_STREAM_SCHEMA = {"type": "string", "description": "Server-sent events; `id` is the `seq`; `fim` is the last."}

router = APIRouter(tags=["orquestracoes"], default_response_class=Response)


def _answers() -> dict[int | str, dict[str, Any]]:
    page = reply("A page of the history; with `Accept: text/event-stream` live, until the run has ended.", "Eventos")
    page["content"][EVENT_STREAM] = {"schema": _STREAM_SCHEMA}
    return {200: page, **problems(404)}


class _HistoryQuery(ExactQuery):
    apos: Annotated[Seq, when_empty(0), Query(description="Only entries behind this `seq`.")] = 0
    limite: Annotated[
        int,
        Field(ge=1, le=1000),
        when_empty(_PAGE),
        Query(description="Entries on a page; a stream has no pages."),
    ] = _PAGE


@router.get(RUN + "/eventos", summary="The history of a run", responses=_answers())
async def show_history(
    request: Request,
    operations: Door,
    correlation_id: RunId,
    asked: Annotated[_HistoryQuery, Query()],
    last_event_id: Annotated[
        OptionalSeq, Header(alias="Last-Event-ID", description="Where a stream goes on; wins over `apos`.")
    ] = None,
) -> Response:
    plan = await operations.plan(correlation_id)
    if wants_events(request.headers.get("accept", "")):
        after = asked.apos if last_event_id is None else last_event_id
        return EventStream(_live(operations, correlation_id, plan, after))
    entries = await operations.history(correlation_id, after=asked.apos, limit=asked.limite)
    page = page_of(entry_view(plan, entry) for entry in entries)
    return json_reply({"eventos": page, "proximo": entries[len(page) - 1].seq if page else None})


async def _live(operations: Operations, run_id: str, plan: Plan, after: int) -> AsyncGenerator[bytes, None]:
    """Yield the history as it grows. An error or a stop of the server ends it without `fim`; the client reconnects.

    `fim` has only the status: many may follow a run whose aggregate has hundreds of megabytes.
    """
    try:
        source = operations.follow(run_id, after)
        assert isinstance(source, AsyncGenerator), "closing it gives back the watch that it holds"
        async with aclosing(source), aclosing(_with_pauses(source)) as entries:
            async for entry in entries:
                yield KEEPALIVE_COMMENT if entry is None else _event(plan, entry)
        status = (await operations.head(run_id)).status
        if status is not RunStatus.RUNNING:  # else the server stops
            end = json_text({"correlation_id": run_id, "status": status})
            yield format_sse_event(event=END, data_str=end.decode())
    except OraculoError as error:
        _logger.warning("the event stream of run %s broke off: %s", run_id, error)


def _event(plan: Plan, entry: HistoryEntry) -> bytes:
    data = json_text(entry_view(plan, entry)).decode()
    return format_sse_event(id=str(entry.seq), event=entry.what, data_str=data)


async def _with_pauses(entries: AsyncIterator[HistoryEntry]) -> AsyncGenerator[HistoryEntry | None, None]:
    """Yield the entries, and None after each silence of KEEP_ALIVE seconds."""
    while True:
        coming = asyncio.ensure_future(_next(entries))
        coming.add_done_callback(_heard)
        try:
            while not (await asyncio.wait([coming], timeout=KEEP_ALIVE))[0]:
                yield None
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait([coming])
        if (entry := coming.result()) is None:
            return
        yield entry


def _heard(coming: "asyncio.Task[HistoryEntry | None]") -> None:
    """Read the exception of a task that ends with the stream: asyncio would log it as never retrieved."""
    if not coming.cancelled():
        coming.exception()


async def _next(entries: AsyncIterator[HistoryEntry]) -> HistoryEntry | None:
    return await anext(entries, None)


class EventStream(EventSourceResponse):
    """A stream that ends as soon as its reader is gone, not at the next write."""

    body_iterator: AsyncGenerator[bytes, None]

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, headers=_STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self.stream_response(send))
        leaving = asyncio.create_task(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.wait([sending, leaving])
            await self.body_iterator.aclose()
        if not sending.cancelled() and (error := sending.exception()) and not isinstance(error, OSError):
            raise error
