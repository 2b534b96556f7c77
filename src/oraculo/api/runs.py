"""The routes of runs: start, list, show, explain, cancel and repeat."""

from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import Field

from oraculo.api.bodies import read_body
from oraculo.api.context import Door, NotForWebhooks, Shared
from oraculo.api.openapi import REQUEST_EXAMPLES, header, header_parameter, json_body, problems, reply
from oraculo.api.parameters import (
    BLANKS,
    MOMENT,
    Cursor,
    ExactQuery,
    NoQuery,
    OptionalMoment,
    OptionalName,
    RunId,
    Statuses,
    TaskId,
    when_empty,
)
from oraculo.api.paths import RUN, RUNS
from oraculo.api.preferences import applied, wait_of
from oraculo.api.problems import FieldConflict
from oraculo.api.replies import encoded_reply, json_reply
from oraculo.core.views import accepted_view, head_view
from oraculo.errors import Conflict, IdempotencyKeyReused
from oraculo.ports.browse import RunQuery
from oraculo.wire.timestamps import from_iso

router = APIRouter(tags=["orquestracoes"], default_response_class=Response)

_PAGE = 50
_WAIT = header_parameter(
    "Prefer",
    "`wait=N` (RFC 7240): up to N seconds for the aggregate; `wait` alone means 30. N is capped; a bad N and other "
    "preferences are ignored. When the server stops meanwhile, it answers `202` early.",
)
_APPLIED = header("Preference-Applied", "The wait that the server applied.")
_NOT_FOR_WEBHOOKS = "A call with the header `webhook-id`, which every webhook has, is refused with `409`."
_LOCATION = header("Location", "Where the run is.")


@router.post(
    RUNS,
    summary="Start a run",
    status_code=202,
    dependencies=[NoQuery],
    responses={
        200: reply("The run ended within the wait: its aggregate.", "Agregado", headers=_LOCATION | _APPLIED),
        202: reply("The run is stored and will not be lost.", "Aceita", headers=_LOCATION | _APPLIED),
        **problems(400, 408, 409, 413, 429),
    },
    openapi_extra={**json_body("Pedido", examples=REQUEST_EXAMPLES), "parameters": [_WAIT]},
)
async def start_run(
    request: Request,
    shared: Shared,
    idempotency_key: Annotated[
        str | None,
        Header(alias="Idempotency-Key", description="The same key and body give the same run."),
    ] = None,
    traceparent: Annotated[str | None, Header(description="W3C trace context; a broken one is ignored.")] = None,
) -> Response:
    wait = wait_of(request.headers.getlist("prefer"), shared.settings.api.max_wait)
    try:
        submitted = await shared.operations.submit(
            # Not assigned to a variable, which would keep the body in memory during the wait.
            await read_body(request, shared.settings.limits.request_bytes, shared.room),
            idempotency_key=idempotency_key and idempotency_key.strip(BLANKS),
            traceparent=traceparent,
            wait=wait or 0,
        )
    except IdempotencyKeyReused:
        raise
    except Conflict as error:
        raise FieldConflict("correlation_id", error) from None
    headers = {"Location": _address(submitted.run_id), **applied(wait)}
    if submitted.aggregate is not None and shared.replies.has(len(submitted.aggregate)):
        return encoded_reply(submitted.aggregate, 200, headers)
    return json_reply(accepted_view(submitted.run_id, submitted.status), 202, headers)


def _address(run_id: str) -> str:
    return f"{RUNS}/{quote(run_id, safe='')}"


class _RunsQuery(ExactQuery):
    status: Statuses = ()
    pipeline: Annotated[OptionalName, Query(description="Only runs of this pipeline or route.")] = None
    q: Annotated[OptionalName, Query(description="Only runs with this text in their id or name, in any case.")] = None
    desde: Annotated[OptionalMoment, Query(description=f"Only runs created at this time or later; {MOMENT}.")] = None
    ate: Annotated[OptionalMoment, Query(description=f"Only runs created before this time; {MOMENT}.")] = None
    limit: Annotated[int, Field(ge=1, le=500), when_empty(_PAGE)] = _PAGE
    cursor: Cursor = None


@router.get(
    RUNS,
    summary="List runs, newest first",
    responses={200: reply("A page of runs.", "Orquestracoes"), **problems()},
)
async def list_runs(operations: Door, asked: Annotated[_RunsQuery, Query()]) -> Response:
    query = RunQuery(
        statuses=frozenset(asked.status),
        name=asked.pipeline,
        text=asked.q,
        since=None if asked.desde is None else from_iso(asked.desde),
        until=None if asked.ate is None else from_iso(asked.ate),
        limit=asked.limit,
        cursor=asked.cursor,
    )
    page = await operations.runs(query)
    return json_reply({"orquestracoes": [head_view(head) for head in page.heads], "cursor": page.cursor})


# Paths with a word after the id come first; `paths.RunConvertor` keeps the id from swallowing that word.


@router.get(
    RUN + "/explicacao",
    summary="Explain in one sentence why a run is not finished",
    dependencies=[NoQuery],
    responses={200: reply("What it waits for, until when, and what happens then.", "Explicacao"), **problems(404)},
)
async def explain_run(operations: Door, correlation_id: RunId) -> Response:
    run = await operations.run(correlation_id)
    explanation = await operations.explained(run)
    return json_reply({"correlation_id": run.id, "status": run.head.status, "explicacao": explanation})


@router.post(
    RUN + "/cancelar",
    summary="Cancel a run",
    description=_NOT_FOR_WEBHOOKS,
    dependencies=[NotForWebhooks, NoQuery],
    responses={200: reply("The cancelled run.", "Orquestracao"), **problems(404, 409)},
)
async def cancel_run(operations: Door, correlation_id: RunId) -> Response:
    return json_reply(await operations.view(await operations.cancel(correlation_id)))


@router.post(
    RUN + "/repetir",
    summary="Run again only what failed",
    description=_NOT_FOR_WEBHOOKS,
    status_code=202,
    dependencies=[NotForWebhooks, NoQuery],
    responses={
        202: reply("The run, open again.", "Orquestracao", headers=_LOCATION),
        **problems(404, 409),
    },
)
async def repeat_run(operations: Door, correlation_id: RunId) -> Response:
    run = await operations.repeat(correlation_id)
    return json_reply(await operations.view(run), 202, {"Location": _address(run.id)})


@router.get(
    RUN + "/resultados/{tarefa:segment}",
    summary="The result of one subtask, whatever its size",
    dependencies=[NoQuery],
    responses={200: reply("The payload of its answer, exactly as it came.", "Resultado"), **problems(404)},
)
async def show_result(operations: Door, correlation_id: RunId, tarefa: TaskId) -> Response:
    return encoded_reply(await operations.result(correlation_id, tarefa))


@router.get(
    RUN,
    summary="The state of a run and of each subtask",
    dependencies=[NoQuery],
    responses={200: reply("The run; once it ended, with its aggregate.", "Orquestracao"), **problems(404)},
)
async def show_run(operations: Door, correlation_id: RunId) -> Response:
    return json_reply(await operations.view(await operations.run(correlation_id)))
