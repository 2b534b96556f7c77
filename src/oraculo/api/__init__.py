"""The HTTP door: `create_app` makes the FastAPI application over a running engine."""

from oraculo.api.app import create_app

__all__ = ["create_app"]
