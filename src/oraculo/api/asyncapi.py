"""The route of the AsyncAPI document, made from the pipelines that exist at the call."""

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Response

from oraculo import __version__
from oraculo.api.asyncapi_document import asyncapi_document
from oraculo.api.context import Shared
from oraculo.api.openapi import problems, reply
from oraculo.api.replies import json_reply
from oraculo.api.schemas import COMPONENTS
from oraculo.pipeline.definition import Definition
from oraculo.ports.threads import handed_over
from oraculo.settings import Settings

router = APIRouter(tags=["filas"], default_response_class=Response)

# Messages share these schemas with HTTP. The aggregate refers to the last one.
_SCHEMAS = ("Pedido", "Agregado", "Resumo")


@router.get(
    "/asyncapi.json",
    summary="The queues and messages, as AsyncAPI 3",
    description="For workers and for tools: channels, operations and the schema of every message, as they are now.",
    responses={200: reply("The document.", "AsyncApi"), **problems(503)},
)
async def show_asyncapi(shared: Shared) -> Response:
    definitions = [definition for definition, _ in shared.operations.pipelines()]
    # In a thread: a document of 100,000 steps would hold up the event loop.
    return await handed_over(None, lambda: json_reply(document_of(shared.settings, definitions)))


def document_of(settings: Settings, definitions: Iterable[Definition]) -> dict[str, Any]:
    return asyncapi_document(
        version=__version__,
        broker_urls=settings.broker.urls,
        prefix=settings.broker.prefix,
        routes=settings.routes,
        pipelines=definitions,
        schemas={name: COMPONENTS[name] for name in _SCHEMAS},
    )
