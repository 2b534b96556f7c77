"""The routes of pipelines: list, show, put and delete definitions."""

from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from oraculo.api.bodies import read_body
from oraculo.api.context import Door, Shared
from oraculo.api.openapi import PIPELINE_EXAMPLE, header, problems, reply
from oraculo.api.parameters import Cursor, ExactQuery, Name, NoQuery
from oraculo.api.paths import PIPELINE, PIPELINES
from oraculo.api.replies import json_reply, page_of
from oraculo.api.schemas import ref
from oraculo.engine.operations import Operations
from oraculo.engine.pipeline_folder import BadFile
from oraculo.engine.pipelines import Origin
from oraculo.errors import Fault
from oraculo.pipeline.definition import Definition, content_hash, encode_definition, pipeline_document
from oraculo.pipeline.text import MAX_TEXT

router = APIRouter(tags=["pipelines"], default_response_class=Response)

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": ref("PipelinePedido")},
            "application/yaml": {"schema": {"type": "string"}, "example": PIPELINE_EXAMPLE},
        },
    }
}


class _PipelinesQuery(ExactQuery):
    cursor: Cursor = None


@router.get(
    PIPELINES,
    summary="All pipelines, by name",
    description="All on one page, unless they have over 8 MiB; then `cursor` goes on.",
    responses={200: reply("Their names and steps.", "Pipelines"), **problems()},
)
async def list_pipelines(operations: Door, asked: Annotated[_PipelinesQuery, Query()]) -> Response:
    after = asked.cursor
    left = [each for each in operations.pipelines() if after is None or each[0].name > after]
    page = page_of(_listed(definition, origin) for definition, origin in left)
    following = left[len(page) - 1][0].name if len(left) > len(page) else None
    bad = [_bad_file(file) for file in operations.bad_pipeline_files()]
    return json_reply({"pipelines": page, "cursor": following, "arquivos_invalidos": bad})


def _listed(definition: Definition, origin: Origin) -> dict[str, Any]:
    return {
        "name": definition.name,
        "description": definition.description,
        "origem": origin,
        "hash": _hash(definition),
        "steps": [step.id for step in definition.steps],
    }


def _bad_file(bad: BadFile) -> dict[str, Any]:
    faults = _faults(bad.faults)
    return {"arquivo": bad.file, "pipeline": bad.pipeline, "versao_anterior_em_uso": bad.in_use, "erros": faults}


def _faults(faults: Iterable[Fault]) -> list[dict[str, str]]:
    return [{"campo": fault.field, "motivo": fault.problem} for fault in faults]


def _hash(definition: Definition) -> str:
    return content_hash(encode_definition(definition))


@router.get(
    PIPELINE,
    summary="One pipeline",
    dependencies=[NoQuery],
    responses={200: reply("Its definition.", "Pipeline"), **problems(404)},
)
async def show_pipeline(operations: Door, name: Name) -> Response:
    return json_reply(await _shown(operations, *operations.pipeline(name)))


async def _shown(operations: Operations, definition: Definition, origin: Origin) -> dict[str, Any]:
    warnings = _faults(await operations.pipeline_warnings(definition))
    return pipeline_document(definition) | {"origem": origin, "hash": _hash(definition), "avisos": warnings}


@router.put(
    PIPELINE,
    summary="Define or replace a pipeline",
    dependencies=[NoQuery],
    description="YAML or JSON. Runs that have started keep the definition they started with. `avisos` names types that "
    "look mistyped and queues that nobody serves now.",
    responses={
        200: reply("Replaced.", "Pipeline"),
        201: reply("New.", "Pipeline", headers=header("Location", "Where it is.")),
        **problems(404, 408, 409, 413, 429),
    },
    openapi_extra=_BODY,
)
async def put_pipeline(request: Request, shared: Shared, name: Name) -> Response:
    text = await read_body(request, min(MAX_TEXT, shared.settings.limits.request_bytes), shared.room)
    definition, is_new = await shared.operations.put_pipeline(name, text)
    document = await _shown(shared.operations, definition, Origin.STORED)
    return json_reply(document, 201, {"Location": f"{PIPELINES}/{name}"}) if is_new else json_reply(document)


@router.delete(
    PIPELINE,
    summary="Delete a pipeline that was put here",
    dependencies=[NoQuery],
    description="One that it replaced, built in or of the folder, is there again afterwards.",
    status_code=204,
    responses={204: reply("Deleted."), **problems(404, 409)},
)
async def delete_pipeline(operations: Door, name: Name) -> Response:
    await operations.delete_pipeline(name)
    return Response(status_code=204)
