"""`celery -A oraculo.celery_app worker`: the Celery app `orquestrador_core`.

Its tasks start runs for any Celery client. With `ORACULO_CELERY_APPS=module:app` its workers also answer the commands
of these worker apps; `oraculo worker module:app --engine celery` is the same for one app.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from celery import Celery
from celery.utils.imports import symbol_by_name

from oraculo.celery_app.command_line import name_worker
from oraculo.celery_app.commands import register_handlers
from oraculo.celery_app.entry import MAX_RETRIES, DeadLetters, Entry, register_entry
from oraculo.celery_app.own_broker import BackToFirst, OwnAMQP, OwnBrokerCelery, TheirAMQP
from oraculo.celery_app.performing import Performer
from oraculo.celery_app.publishing import Publisher
from oraculo.clients.kombu_redis import missing_for_kombu
from oraculo.errors import Fault, InvalidSettings
from oraculo.ports.clock import SystemClock
from oraculo.settings import Settings, load_settings
from oraculo.settings.urls import node_urls
from oraculo.wire.answers import describe
from oraculo.worker import App

NAME = "orquestrador_core"

_PORTS = {"amqp": 5672, "amqps": 5671}
_AMQP = tuple(_PORTS)
_NO = re.compile(r"(?<=ssl_check_hostname=)(?:0|no)(?=&|$)", re.IGNORECASE)
_CELERY_KNOWS = (*_AMQP, "redis", "rediss")


def make_celery_app(settings: Settings, apps: Sequence[App] = ()) -> Celery:
    """Raises InvalidSettings. `apps`: those whose commands its workers answer."""
    url = _commands_url(settings) if apps else _entry_url(settings)
    if lacking := missing_for_kombu(url):
        variable = "ORACULO_CELERY_BROKER_URL" if settings.celery.broker_url else "ORACULO_BROKER_URL"
        raise InvalidSettings(Fault(variable, lacking))
    amqp = TheirAMQP if settings.celery.broker_url and not apps else OwnAMQP
    made = OwnBrokerCelery(NAME, broker=url, amqp=amqp, set_as_current=False)
    made.steps["consumer"].add(BackToFirst)
    made.conf.update(
        task_default_queue=settings.broker.prefix + NAME,
        task_ignore_result=True,
        task_acks_late=True,  # a worker that is killed leaves the request to another
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"confirm_publish": True} if url.startswith(_AMQP) else {},
        task_publish_retry_policy={"max_retries": MAX_RETRIES},
    )
    clock, publisher = SystemClock(), Publisher(settings)
    register_entry(made, Entry(settings, publisher, DeadLetters(made, publisher), clock))
    performers = {
        queue: Performer(handler, publisher, settings, clock)
        for each in apps
        for queue, handler in each.handlers.items()
    }
    if performers:
        register_handlers(made, performers, publisher, settings.broker.prefix)
    return made


def _entry_url(settings: Settings) -> str:
    if settings.celery.broker_url:
        return settings.celery.broker_url
    found = next((url for url in settings.broker.urls if _scheme(url) in _CELERY_KNOWS), None)
    if found is None:
        told = "names no broker that Celery knows (amqp://, redis://); set ORACULO_CELERY_BROKER_URL to Celery's own"
        raise InvalidSettings(Fault("ORACULO_BROKER_URL", told))
    return _amqp_urls(settings) if _scheme(found) in _AMQP else found


def _commands_url(settings: Settings) -> str:
    if not settings.broker.urls or _scheme(settings.broker.urls[0]) not in _AMQP:
        told = (
            "must name a RabbitMQ (amqp://…), and name it first, for Celery to answer commands: they go to the first "
            "that works, and Celery speaks neither Redis Streams nor NATS; `oraculo worker MODULE:APP` without "
            "--engine speaks all"
        )
        raise InvalidSettings(Fault("ORACULO_BROKER_URL", told))
    return _amqp_urls(settings)


def _amqp_urls(settings: Settings) -> str:
    """All of them, as Celery writes a list: it goes to the next when one is lost. Never one of another kind among them:
    the consumer of a RabbitMQ is none for Redis."""
    urls = [url for url in settings.broker.urls if _scheme(url) in _AMQP]
    return ";".join(_in_full(node) for url in urls for node in node_urls(url))


def _in_full(url: str) -> str:
    """With its port and virtual host: where one of a list says nothing, kombu takes what the one before it said. And
    with the one word for no that kombu knows."""
    parts = urlsplit(url)
    port = "" if parts.port else f":{_PORTS[parts.scheme]}"
    path = parts.path if parts.path.strip("/") else "/%2F"
    query = _NO.sub("false", parts.query)
    return urlunsplit(parts._replace(netloc=parts.netloc + port, path=path, query=query))


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


def load_apps(settings: Settings) -> list[App]:
    """Those that the settings name. Raises InvalidSettings."""
    return [_load_app(target) for target in settings.celery.apps]


def _load_app(target: str) -> App:
    here = str(Path.cwd())
    if here not in sys.path:  # Celery looks where it is run only for what -A names
        sys.path.insert(0, here)
    try:
        found = symbol_by_name(target)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise InvalidSettings(Fault("ORACULO_CELERY_APPS", f"{target} cannot be loaded: {describe(error)}")) from error
    if not isinstance(found, App) or not found.handlers:
        raise InvalidSettings(Fault("ORACULO_CELERY_APPS", f"{target} is no oraculo.worker.App with handlers"))
    return found


def __getattr__(name: str) -> Any:
    """`app`, made when it is first asked for: `oraculo worker --engine celery` makes one of its own."""
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
