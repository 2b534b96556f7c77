"""The application: routes, errors and the OpenAPI document put together."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI

from oraculo import __version__
from oraculo.api import asyncapi, docs_page, events, health, pipelines, queues, runs
from oraculo.api.auth import ApiKeys
from oraculo.api.bodies import room_for_bodies
from oraculo.api.context import ApiContext, OnceStarted
from oraculo.api.doors import Doors
from oraculo.api.openapi import DESCRIPTION, TITLE, document_of
from oraculo.api.paths import ExactPaths, HeadAsGet
from oraculo.api.problems import install_problems
from oraculo.api.replies import room_for_replies
from oraculo.api.unserved import AnswersUnserved
from oraculo.engine.operations import Operations
from oraculo.engine.service import Engine
from oraculo.settings import Settings
from oraculo.telemetry.metrics import Metrics

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(
    engine: Engine,
    operations: Operations,
    settings: Settings,
    metrics: Metrics,
    *,
    lifespan: Lifespan | None = None,
    only_health: bool = False,
) -> FastAPI:
    """Make the application. Without a `lifespan` it starts and stops the engine with itself."""
    app = FastAPI(
        title=TITLE,
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan or _lifespan_of(engine),
        docs_url=None,  # FastAPI's page loads its scripts from another host; `docs_page` serves them from here
        swagger_ui_oauth2_redirect_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,  # clients made from the document get these names
        # A redirect would show the mark that `paths` puts in the place of encoded slashes.
        redirect_slashes=False,
    )
    largest = max(settings.limits.request_bytes, settings.limits.payload_bytes)
    replies = room_for_replies(settings.limits.replies_bytes)
    app.state.context = ApiContext(operations, settings, metrics, room_for_bodies(largest), replies)
    install_problems(app)
    app.include_router(health.router)
    for part in () if only_health else (events, runs, pipelines, queues, asyncapi):
        app.include_router(part.router, dependencies=[OnceStarted])
    docs_page.install(app)
    app.add_middleware(ExactPaths)
    if settings.api.keys:
        app.add_middleware(ApiKeys, keys=settings.api.keys)
    app.add_middleware(Doors, is_locked=bool(settings.api.keys) or settings.api.insecure)
    app.add_middleware(HeadAsGet)
    app.add_middleware(AnswersUnserved, is_stopping=lambda: not engine.accepting)
    app.openapi = document_of(app, with_keys=bool(settings.api.keys))  # type: ignore[method-assign]
    return app


def _lifespan_of(engine: Engine) -> Lifespan:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.stop()

    return lifespan
