"""Makes the Celery app `orquestrador_core`: its tasks start runs, and its workers run handlers."""

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from celery import Celery

from oraculo.bridges.celery.command_consumer import register_handlers
from oraculo.bridges.celery.connections import missing_package, scheme_of
from oraculo.bridges.celery.entry import MAX_RETRIES, register_entry
from oraculo.bridges.celery.failback import BackToFirst
from oraculo.bridges.celery.publisher import BlockingPublisher
from oraculo.bridges.celery.tls import SecuredAMQP, verified
from oraculo.errors import Fault, InvalidSettings
from oraculo.ports.broker import Broker
from oraculo.ports.objects import Objects
from oraculo.settings import Settings
from oraculo.settings.urls import node_urls
from oraculo.worker import App

NAME = "orquestrador_core"

_PORTS = {"amqp": 5672, "amqps": 5671}
_REDIS = ("redis", "rediss")


class OraculoCelery(Celery):  # type: ignore[misc, unused-ignore]
    """A Celery app whose broker is the one of its settings.

    Celery itself prefers the variables CELERY_BROKER_URL, CELERY_BROKER_READ_URL and CELERY_BROKER_WRITE_URL. Set for
    another app, they would let our worker wait where no command comes.
    """

    def connection_for_read(self, url: str | None = None, **options: Any) -> Any:
        return super().connection_for_read(url or self.conf["broker_url"], **options)

    def connection_for_write(self, url: str | None = None, **options: Any) -> Any:
        return super().connection_for_write(url or self.conf["broker_url"], **options)

    def connection(self, hostname: str | None = None, **options: Any) -> Any:
        return super().connection(hostname or self.conf["broker_url"], **options)


def make_app(
    settings: Settings,
    apps: Sequence[App],
    make_broker: Callable[[], Broker],
    make_objects: Callable[[], Objects | None],
) -> Celery:
    """Make the app. Its workers run the handlers of `apps`. Raises InvalidSettings."""
    url = _handlers_url(settings) if apps else _entry_url(settings)
    if missing := missing_package(url):
        variable = "ORACULO_CELERY_BROKER_URL" if settings.celery.broker_url else "ORACULO_BROKER_URL"
        raise InvalidSettings(Fault(variable, missing))
    made = OraculoCelery(NAME, broker=url, amqp=SecuredAMQP, set_as_current=False)
    made.steps["consumer"].add(BackToFirst)
    made.conf.update(
        task_default_queue=settings.broker.prefix + NAME,
        task_ignore_result=True,
        task_acks_late=True,  # the request of a killed worker goes to another
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"confirm_publish": True} if scheme_of(url) in _PORTS else {},
        task_publish_retry_policy={"max_retries": MAX_RETRIES},
    )
    publisher = BlockingPublisher(make_broker)
    register_entry(made, settings, publisher)
    handlers = [handler for app in apps for handler in app.handlers.values()]
    if handlers:
        register_handlers(made, handlers, publisher, settings, make_objects)
    return made


def _entry_url(settings: Settings) -> str:
    if settings.celery.broker_url:
        return settings.celery.broker_url
    found = next((url for url in settings.broker.urls if scheme_of(url) in (*_PORTS, *_REDIS)), None)
    if found is None:
        problem = "names no broker that Celery knows (amqp://, redis://); set ORACULO_CELERY_BROKER_URL to Celery's own"
        raise InvalidSettings(Fault("ORACULO_BROKER_URL", problem))
    return _amqp_urls(settings) if scheme_of(found) in _PORTS else verified(found)


def _handlers_url(settings: Settings) -> str:
    if not settings.broker.urls or scheme_of(settings.broker.urls[0]) not in _PORTS:
        problem = (
            "must name a RabbitMQ (amqp://…) first: Celery reads neither Redis Streams nor NATS; "
            "`oraculo worker MODULE:APP` without --engine reads all"
        )
        raise InvalidSettings(Fault("ORACULO_BROKER_URL", problem))
    return _amqp_urls(settings)


def _amqp_urls(settings: Settings) -> str:
    """Return every RabbitMQ as Celery writes a list. Other brokers are left out: Celery cannot mix them."""
    urls = [url for url in settings.broker.urls if scheme_of(url) in _PORTS]
    return ";".join(_in_full(node) for url in urls for node in node_urls(url))


def _in_full(url: str) -> str:
    """Add the port and virtual host, which kombu would take from the URL before."""
    parts = urlsplit(verified(url))
    port = "" if parts.port else f":{_PORTS[parts.scheme]}"
    path = parts.path if parts.path.strip("/") else "/%2F"
    return urlunsplit(parts._replace(netloc=parts.netloc + port, path=path))
