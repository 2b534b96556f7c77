"""The app for `uvicorn oraculo.main:app`: the API and the engine."""

import sys

import click  # uvicorn's command line uses it
from fastapi import FastAPI

from oraculo.api.server import bind_every_server_of
from oraculo.bootstrap import build, expect_keys, make_app
from oraculo.errors import InvalidSettings
from oraculo.settings import load_settings
from oraculo.telemetry.logs import configure_logging


def _app() -> FastAPI:
    try:
        settings = load_settings()
        expect_keys(settings.api, _host() or "localhost")
        configure_logging(settings.log)
        app = make_app(build(settings))
    except InvalidSettings as error:
        print(f"oraculo: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    bind_every_server_of(app, settings.api)
    return app


def _host() -> str | None:
    """Return the `--host` of uvicorn's command line; None under other servers.

    There the API itself refuses calls from other machines when it has no keys.
    """
    context = click.get_current_context(silent=True)
    return context.params.get("host") if context else None


app = _app()
