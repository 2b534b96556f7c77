"""Every call that the application has, in one table: what holds for all of them is tried on all of them."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Call:
    method: str
    path: str  # as the route has it
    role: KeyRole | None = READER  # the least that may make it; None: no key is asked for

    @property
    def refuses_unknown(self) -> bool:
        """Whether a query parameter that it does not have is refused. Probes, scrapers and browsers add their own, so
        what they ask for ignores it."""
        return self.path.startswith(("/orquestracoes", "/pipelines", "/filas"))

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
    Call("GET", "/"),
    Call("GET", "/asyncapi.json"),
    Call("GET", "/docs"),
    Call("GET", "/filas"),
    Call("GET", "/filas/{fila:segment}/dlq"),
    Call("POST", "/filas/{fila:segment}/dlq/reenviar", OPERATOR),
    Call("DELETE", "/filas/{fila:segment}/dlq/{letter_id:segment}", OPERATOR),
    Call("GET", "/health", None),
    Call("GET", "/health/ready", None),
    Call("GET", "/metrics"),
    Call("GET", "/openapi.json"),
    Call("GET", "/orquestracoes"),
    Call("POST", "/orquestracoes", OPERATOR),
    Call("GET", "/orquestracoes/{correlation_id:run}"),
    Call("POST", "/orquestracoes/{correlation_id:run}/cancelar", OPERATOR),
    Call("GET", "/orquestracoes/{correlation_id:run}/eventos"),
    Call("GET", "/orquestracoes/{correlation_id:run}/explicacao"),
    Call("POST", "/orquestracoes/{correlation_id:run}/repetir", OPERATOR),
    Call("GET", "/orquestracoes/{correlation_id:run}/resultados/{tarefa:segment}"),
    Call("GET", "/pipelines"),
    Call("GET", "/pipelines/{name:segment}"),
    Call("PUT", "/pipelines/{name:segment}", ADMIN),
    Call("DELETE", "/pipelines/{name:segment}", ADMIN),
    Call("GET", "/swagger/{path}"),
)
SAFE = [call for call in CALLS if call.is_safe]
UNSAFE = [call for call in CALLS if not call.is_safe]


def calls_of(app: FastAPI) -> Iterator[Call]:
    """Those that the application really has; HEAD is GET without the body."""
    return _calls_of(app.routes)


def _calls_of(routes: Iterable[BaseRoute]) -> Iterator[Call]:
    for route in routes:
        if isinstance(route, Mount):
            yield Call("GET", f"{route.path}/{{path}}")
        elif isinstance(route, Route):
            yield from (Call(method, route.path) for method in (route.methods or set()) - {"HEAD"})
        else:  # FastAPI's own kind, for what `include_router` was given
            yield from _calls_of(route.original_router.routes)  # type: ignore[attr-defined]
