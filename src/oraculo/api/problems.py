"""Errors as `application/problem+json` (RFC 9457), and the status of each error class."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match, Mount
from starlette.types import Scope

from oraculo.errors import (
    BrokerError,
    BrokerUnavailable,
    Conflict,
    Fault,
    IdempotencyKeyReused,
    InvalidInput,
    InvalidJson,
    InvalidPipeline,
    InvalidRequest,
    NotFound,
    ObjectsUnavailable,
    OraculoError,
    PayloadTooLarge,
    QueueUnavailable,
    StoreUnavailable,
    TooManyNewQueues,
    WrittenByNewer,
)
from oraculo.pipeline.definition import MAX_FAULTS
from oraculo.wire import naming

PROBLEM_JSON = "application/problem+json"
RETRY_SECONDS = "1"

_logger = logging.getLogger("oraculo.api")
_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
# The first class that matches decides; the last line is for unforeseen errors.
_KINDS: Sequence[tuple[type[Exception], int, str, str]] = (
    (InvalidJson, 400, "invalid-json", "The body is not acceptable JSON"),
    (InvalidRequest, 422, "invalid-request", "The request breaks a rule"),
    (InvalidPipeline, 422, "invalid-pipeline", "The pipeline breaks a rule"),
    (InvalidInput, 422, "invalid-input", "The input breaks a rule"),
    (PayloadTooLarge, 413, "payload-too-large", "Larger than the limit"),
    (NotFound, 404, "not-found", "There is no such thing"),
    (IdempotencyKeyReused, 422, "idempotency-key-reused", "The Idempotency-Key was used for another request"),
    (Conflict, 409, "conflict", "It clashes with what is there"),
    (TooManyNewQueues, 429, "too-many-new-queues", "A minute brought as many new queues as it may"),
    (WrittenByNewer, 503, "written-by-newer", "A newer ORÁCULO wrote it"),
    (StoreUnavailable, 503, "store-unavailable", "The store cannot be reached now"),
    (QueueUnavailable, 503, "broker-unavailable", "The broker did not take it now: a queue is full, or does not work"),
    (BrokerUnavailable, 503, "broker-unavailable", "The broker cannot be reached now"),
    (BrokerError, 502, "broker-refused", "The broker refused"),
    (ObjectsUnavailable, 503, "objects-unavailable", "The object store cannot be reached now"),
    (Exception, 500, "internal-error", "Something went wrong inside"),
)


class Problem(msgspec.Struct, omit_defaults=True):
    type: str
    title: str
    status: int
    detail: str
    instance: str = ""
    erros: list[dict[str, str]] = []


class FieldConflict(Exception):
    """A conflict over one field of the request: a 409 that names it."""

    def __init__(self, field: str, error: Conflict) -> None:
        super().__init__(str(error))
        self.field = field


def problem_of(error: Exception) -> Problem:
    status, slug, title = next((status, slug, title) for kind, status, slug, title in _KINDS if isinstance(error, kind))
    detail = "The error was logged; try again, or ask the operator." if status == 500 else str(error)
    faults = [{"campo": fault.field, "motivo": fault.problem} for fault in _faults(error)]
    return Problem(_urn(slug), title, status, detail, erros=faults)


def _faults(error: Exception) -> Sequence[Fault]:
    if isinstance(error, InvalidInput | PayloadTooLarge):
        return error.faults
    if isinstance(error, IdempotencyKeyReused):
        return [Fault("Idempotency-Key", str(error))]
    return []


def _urn(slug: str) -> str:
    return f"urn:oraculo:problem:{slug}"


def problem_reply(scope: Scope, problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    problem.instance = _address(scope)
    return Response(_encoded(problem), problem.status, headers, PROBLEM_JSON)


def _address(scope: Scope) -> str:
    raw: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    return quote(raw, safe="/%:@!$&'()*+,;=~-._")


def _encoded(problem: Problem) -> bytes:
    try:
        return msgspec.json.encode(problem)
    except UnicodeEncodeError:  # the message quotes half a surrogate pair
        return json.dumps(msgspec.to_builtins(problem)).encode()


def install_problems(app: FastAPI) -> None:
    app.add_exception_handler(OraculoError, _refused)
    app.add_exception_handler(FieldConflict, _field_conflict)
    app.add_exception_handler(RequestValidationError, _invalid_parameters)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)


async def _refused(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    if problem.status == 500:
        _logger.error("%s %s failed", request.method, _address(request.scope), exc_info=error)
    wait = str(error.wait) if isinstance(error, TooManyNewQueues) else RETRY_SECONDS
    headers = {"Retry-After": wait} if problem.status in (429, 503) else None
    return problem_reply(request.scope, problem, headers)


async def _field_conflict(request: Request, error: Exception) -> Response:
    assert isinstance(error, FieldConflict)
    problem = problem_of(Conflict(str(error)))
    problem.erros = [{"campo": error.field, "motivo": str(error)}]
    return problem_reply(request.scope, problem)


async def _invalid_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [_parameter_fault(request, item) for item in error.errors()[:MAX_FAULTS]]
    return problem_reply(request.scope, problem_of(InvalidRequest(faults)))


def _parameter_fault(request: Request, item: Mapping[str, Any]) -> Fault:
    # A place is ("query", "status"), and of one of several values ("query", "status", 1).
    name = str(item["loc"][1])
    if item["type"] != "extra_forbidden":
        return Fault(name, _our_words(item["msg"]))
    queries = [parameter.field_info.annotation for parameter in request.scope["route"].dependant.query_params]
    return unknown_parameter(name, [known for query in queries for known in query.model_fields])


def unknown_parameter(name: str, known: Iterable[str] = ()) -> Fault:
    """Return the fault of a query parameter that a call does not have, with the one that may be meant."""
    return Fault(name, f"is not a known parameter{naming.nearest(name, known) or '; this call takes none'}")


def _our_words(message: str) -> str:
    return message.replace("Input should", "must").replace("String should", "must")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return _method_not_allowed(request)
    if error.status_code == HTTPStatus.NOT_FOUND and error.detail == HTTPStatus.NOT_FOUND.phrase:
        error.detail = "There is nothing at this address; GET /docs shows what there is."
    return http_problem(request.scope, error)


def http_problem(scope: Scope, error: HTTPException) -> Response:
    """Return the answer for an error that names its own status."""
    phrase = HTTPStatus(error.status_code).phrase
    problem = Problem(_urn(phrase.lower().replace(" ", "-")), phrase, error.status_code, error.detail)
    return problem_reply(scope, problem, error.headers)


def _method_not_allowed(request: Request) -> Response:
    allow = ", ".join(_allowed_methods(request))
    if request.method == "OPTIONS":
        return Response(status_code=204, headers={"Allow": allow})
    detail = f"{request.method} is not possible here; allowed: {allow}"
    problem = Problem(_urn("method-not-allowed"), "Method Not Allowed", 405, detail)
    return problem_reply(request.scope, problem, {"Allow": allow})


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes with this path: Starlette's own `Allow` names those of the first only."""
    found = _methods_at(request.scope["path"], request)
    return sorted(found | ({"HEAD"} if "GET" in found else set()) | {"OPTIONS"})


def _methods_at(path: str, request: Request) -> set[str]:
    # Inside a mount `root_path` includes the mount's path.
    root = request.scope.get("app_root_path", request.scope.get("root_path", ""))
    place = {"type": "http", "path": path, "root_path": root}
    return {
        method
        for method in _METHODS
        if any(_takes(route, method, place | {"method": method}) for route in request.app.routes)
    }


def _takes(route: BaseRoute, method: str, scope: Scope) -> bool:
    """Return whether a route takes the method. The mounts here have files, which take GET only."""
    return route.matches(scope)[0] is Match.FULL and (method == "GET" or not isinstance(route, Mount))


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it: the client left before its body was complete


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises it again once this answer is sent, and the server logs the traceback.
    _logger.error("%s %s failed: %s", request.method, _address(request.scope), type(error).__name__)
    return problem_reply(request.scope, problem_of(error))
