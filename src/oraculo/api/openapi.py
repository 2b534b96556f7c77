"""The OpenAPI document: helpers for the answers of routes, and what FastAPI cannot add by itself."""

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from oraculo import __version__
from oraculo.api.auth import OPEN_PATHS, SAFE_METHODS, role_needed
from oraculo.api.paths import PIPELINES, QUEUES, RUNS
from oraculo.api.problems import PROBLEM_JSON
from oraculo.api.schemas import COMPONENTS, Schema, ref
from oraculo.settings import KeyRole

TITLE = "ORÁCULO"
DESCRIPTION = (
    "Orchestrates work that many services do together: fan-out, fan-in and pipelines over plain JSON messages.\n\n"
    "Errors are `application/problem+json` (RFC 9457); `erros` says which field, and what would be right."
)

Responses = dict[int | str, dict[str, Any]]

_PROBLEMS = {
    400: "The body is not acceptable JSON.",
    401: "No API key, or an unknown one.",
    403: "A browser sent it for a page of another site, or the key's role does not allow it.",
    404: "There is no such thing.",
    408: "The rest of the body did not come.",
    409: "It clashes with what is there.",
    413: "Larger than the limit.",
    415: "The body is of a kind that cannot be read.",
    421: "There are no API keys, and the `Host` is no name of this machine.",
    422: "Something given breaks a rule, or is not known, as a query parameter; `erros` names what is wrong.",
    429: "A minute brought as many new queues as ORACULO_QUEUES_NEW_PER_MINUTE allows; try again after `Retry-After` "
    "seconds.",
    502: "The broker refused; `detail` has its words.",
    503: "The store, the broker or the object store cannot be reached now, a newer ORÁCULO wrote what is asked "
    "for, too many large bodies or replies are being read, or there is no room for a thread; try again after "
    "`Retry-After` seconds.",
}
_SUPPOSED = "HTTPValidationError"
# Relative, for any path that a proxy adds.
_SERVERS: list[dict[str, str | Any]] = [{"url": ".", "description": "where this document is"}]
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "api_key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
# One for each way to name what runs.
REQUEST_EXAMPLES = {
    "destinos": {
        "summary": "a list of destinations",
        "value": {
            "destinos": ["escavador_youtube", "escavador_blog", "executador_relatorio"],
            "payload": {"fonte": "…"},
            "timeout": 30,
        },
    },
    "tipo": {"summary": "a route", "value": {"tipo": "coleta_completa", "payload": {}}},
    "pipeline": {
        "summary": "a pipeline",
        "value": {"pipeline": "promotional-video-full", "payload": {"produto": "…"}},
    },
}
PIPELINE_EXAMPLE = """\
name: meu-pipeline
description: Pipeline customizado
timeout: 600
steps:
  - type: ENHANCED_IMAGES
    config: {count: 5}
  - type: PROMOTIONAL_VIDEO
    dependsOn: [ENHANCED_IMAGES]
    config: {duration: 30}
"""


def reply(description: str, schema: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a successful answer, for a route's `responses`."""
    content = {"content": {"application/json": {"schema": ref(schema)}}} if schema else {}
    return {"description": description, **content, **more}


def problems(*statuses: int) -> Responses:
    """Return the refusals of a route, always with 503."""
    content = {PROBLEM_JSON: {"schema": ref("Problema")}}
    answers: Responses = {status: {"description": _PROBLEMS[status], "content": content} for status in (*statuses, 503)}
    for status in answers.keys() & {429, 503}:
        answers[status]["headers"] = header("Retry-After", "Seconds.")
    return answers


def header(name: str, description: str) -> dict[str, Any]:
    return {name: {"description": description, "schema": {"type": "string"}}}


def json_body(schema: str, *, required: bool = True, **more: Any) -> dict[str, Any]:
    """Return a body that the route reads by itself, for its `openapi_extra`."""
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": ref(schema), **more}}}}


def header_parameter(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": {"type": "string"}}


def document_of(app: FastAPI, *, with_keys: bool) -> Callable[[], dict[str, Any]]:
    """Return the function for `app.openapi`, which makes the document at the first call."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, with_keys)
        return app.openapi_schema

    return document


def _document(app: FastAPI, with_keys: bool) -> dict[str, Any]:
    document = get_openapi(
        title=TITLE, version=__version__, description=DESCRIPTION, routes=app.routes, servers=_SERVERS
    )
    components: dict[str, Schema] = document.setdefault("components", {})
    schemas: dict[str, Schema] = components.setdefault("schemas", {})
    schemas.update(COMPONENTS)
    _without_supposed_refusals(document, schemas)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            refusals = [] if method.upper() in SAFE_METHODS else [403, 415]
            refusals += [] if with_keys else [421]
            refusals += [422] if path.startswith((RUNS, PIPELINES, QUEUES)) else []
            _add_refusals(operation, refusals)
            if with_keys and path not in OPEN_PATHS:
                _require_key(operation, role_needed(method.upper(), path))
    if with_keys:
        components["securitySchemes"] = _SECURITY_SCHEMES
    return document


def _without_supposed_refusals(document: dict[str, Any], schemas: dict[str, Schema]) -> None:
    """Remove the 422 that FastAPI adds, with a schema of its own, to every route with a parameter."""
    for operations in document["paths"].values():
        for operation in operations.values():
            if _SUPPOSED in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
    for name in (_SUPPOSED, "ValidationError"):
        schemas.pop(name, None)


def _require_key(operation: dict[str, Any], role: KeyRole) -> None:
    described = operation.get("description")
    operation["description"] = f"{described}\n\n" * bool(described) + f"The key needs the role `{role}`."
    operation["security"] = [{name: []} for name in _SECURITY_SCHEMES]
    _add_refusals(operation, [401])


def _add_refusals(operation: dict[str, Any], statuses: Iterable[int]) -> None:
    content = {PROBLEM_JSON: {"schema": ref("Problema")}}
    for status in statuses:
        operation["responses"][str(status)] = {"description": _PROBLEMS[status], "content": content}
