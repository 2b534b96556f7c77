"""`uvicorn oraculo.main:app`: the API and the engine, with the settings of oraculo.toml and the environment."""

import sys

from fastapi import FastAPI

from oraculo.bootstrap import build, make_app
from oraculo.errors import InvalidSettings
from oraculo.settings import load_settings
from oraculo.telemetry.logs import configure_logging


def _app() -> FastAPI:
    try:
        settings = load_settings()
        configure_logging(settings.log)
        return make_app(build(settings))
    except InvalidSettings as error:
        print(f"oraculo: {error}", file=sys.stderr)
        raise SystemExit(2) from None


app = _app()
