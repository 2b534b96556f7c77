"""The Celery app `orquestrador_core`, for `celery -A oraculo.celery_app worker`.

Its tasks start runs for any Celery client. With `ORACULO_CELERY_APPS=module:app` its workers also run the handlers of
these worker apps; `oraculo worker module:app --engine celery` does so for one app.
"""

import sys
from collections.abc import Sequence
from typing import Any

from celery import Celery

from oraculo.bootstrap import make_broker, make_objects
from oraculo.bridges.celery.app import NAME, make_app
from oraculo.bridges.celery.command_line import name_worker
from oraculo.errors import Fault, InvalidSettings
from oraculo.ports.clock import SystemClock
from oraculo.settings import Settings, load_settings
from oraculo.worker import App
from oraculo.worker.loading import load_app


def make_celery_app(settings: Settings, apps: Sequence[App] = ()) -> Celery:
    """Make the app. Its workers run the handlers of `apps`. Raises InvalidSettings."""
    return make_app(
        settings,
        apps,
        lambda: make_broker(settings, SystemClock()),
        lambda: make_objects(settings) if settings.objects.url else None,
    )


def load_apps(settings: Settings) -> list[App]:
    """Return the worker apps that the settings name. Raises InvalidSettings."""
    try:
        return [load_app(target) for target in settings.celery.apps]
    except InvalidSettings as error:
        raise InvalidSettings([Fault("ORACULO_CELERY_APPS", str(fault)) for fault in error.faults]) from None


def __getattr__(name: str) -> Any:
    """Make `app` at its first use: `oraculo worker --engine celery` imports this module and makes another app."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        settings = load_settings()
        made = make_celery_app(settings, load_apps(settings))
    except InvalidSettings as error:
        print(f"oraculo: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    name_worker(NAME)
    globals()["app"] = made
    return made
