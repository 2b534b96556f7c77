"""Every call that the application has, in one table: who may make it, what a page of another site gets, and what
becomes of an unknown query parameter. The tests of roles, doors and queries try each cell, and one fails when a route
is not in the table."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fastapi import FastAPI
from starlette.routing import BaseRoute, Mount, Route

from oraculo.settings import KeyRole

READER, OPERATOR, ADMIN = KeyRole

_PLACES = {
    "{correlation_id:run}": "conhecida",
    "{tarefa:segment}": "escavador_x",
    "{name:segment}": "conhecido",
    "{fila:segment}": "escavador_y",
    "{letter_id:segment}": "1",
    "{path}": "swagger-ui.css",
}
_BODIES: dict[str, dict[str, Any]] = {
    "POST /orquestracoes": {"destinos": ["escavador_x"]},
    "PUT /pipelines/{name:segment}": {"steps": [{"type": "fila_x"}]},
}


class Foreign(Enum):
    """What a page of another site gets, whatever it sends with the call."""

    BLOCKED = "403, with and without keys"
    UNREADABLE = "an answer that its browser does not let it read"


class Unknown(Enum):
    """What becomes of a query parameter that the call does not have."""

    REFUSED = "422"
    IGNORED = "nothing: probes, scrapers and browsers add their own"


BLOCKED, UNREADABLE = Foreign
REFUSED, IGNORED = Unknown


@dataclass(frozen=True)
class Call:
    method: str
    path: str  # as the route has it
    role: KeyRole | None  # the least that may make it where there are keys; None: it needs no key
    foreign: Foreign
    unknown: Unknown

    @property
    def good_body(self) -> dict[str, Any] | None:
        return _BODIES.get(str(self))

    @property
    def is_safe(self) -> bool:
        return self.method == "GET"

    @property
    def address(self) -> str:
        """A path that this call may be made with."""
        return re.sub(r"{[^}]*}", lambda found: _PLACES[found[0]], self.path)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


CALLS = (
    Call("GET", "/", None, UNREADABLE, IGNORED),
    Call("GET", "/asyncapi.json", READER, UNREADABLE, IGNORED),
    Call("GET", "/docs", None, UNREADABLE, IGNORED),
    Call("GET", "/filas", READER, UNREADABLE, REFUSED),
    Call("GET", "/filas/{fila:segment}/dlq", READER, UNREADABLE, REFUSED),
    Call("POST", "/filas/{fila:segment}/dlq/reenviar", OPERATOR, BLOCKED, REFUSED),
    Call("DELETE", "/filas/{fila:segment}/dlq/{letter_id:segment}", OPERATOR, BLOCKED, REFUSED),
    Call("GET", "/health", None, UNREADABLE, IGNORED),
    Call("GET", "/health/ready", None, UNREADABLE, IGNORED),
    Call("GET", "/metrics", READER, UNREADABLE, IGNORED),
    Call("GET", "/openapi.json", READER, UNREADABLE, IGNORED),
    Call("GET", "/orquestracoes", READER, UNREADABLE, REFUSED),
    Call("POST", "/orquestracoes", OPERATOR, BLOCKED, REFUSED),
    Call("GET", "/orquestracoes/{correlation_id:run}", READER, UNREADABLE, REFUSED),
    Call("POST", "/orquestracoes/{correlation_id:run}/cancelar", OPERATOR, BLOCKED, REFUSED),
    Call("GET", "/orquestracoes/{correlation_id:run}/eventos", READER, UNREADABLE, REFUSED),
    Call("GET", "/orquestracoes/{correlation_id:run}/explicacao", READER, UNREADABLE, REFUSED),
    Call("POST", "/orquestracoes/{correlation_id:run}/repetir", OPERATOR, BLOCKED, REFUSED),
    Call("GET", "/orquestracoes/{correlation_id:run}/resultados/{tarefa:segment}", READER, UNREADABLE, REFUSED),
    Call("GET", "/pipelines", READER, UNREADABLE, REFUSED),
    Call("GET", "/pipelines/{name:segment}", READER, UNREADABLE, REFUSED),
    Call("PUT", "/pipelines/{name:segment}", ADMIN, BLOCKED, REFUSED),
    Call("DELETE", "/pipelines/{name:segment}", ADMIN, BLOCKED, REFUSED),
    Call("GET", "/swagger/{path}", None, UNREADABLE, IGNORED),
)
SAFE = [call for call in CALLS if call.is_safe]
UNSAFE = [call for call in CALLS if not call.is_safe]


def calls_of(app: FastAPI) -> Iterator[str]:
    """Those that the application really has; HEAD is GET without the body."""
    return _calls_of(app.routes)


def _calls_of(routes: Iterable[BaseRoute]) -> Iterator[str]:
    for route in routes:
        if isinstance(route, Mount):
            yield f"GET {route.path}/{{path}}"
        elif isinstance(route, Route):
            yield from (f"{method} {route.path}" for method in (route.methods or set()) - {"HEAD"})
        else:  # FastAPI's own kind, for what `include_router` was given
            yield from _calls_of(route.original_router.routes)  # type: ignore[attr-defined]
