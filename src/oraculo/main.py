"""`uvicorn oraculo.main:app`: the API and the engine, with the settings of oraculo.toml and the environment."""

import sys

import click  # which uvicorn's command line is made with
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
    """Return the `--host` of uvicorn's command line. Under other servers nobody knows it yet: there the API itself
    refuses each call that comes from another machine."""
    context = click.get_current_context(silent=True)
    return context.params.get("host") if context else None


app = _app()
