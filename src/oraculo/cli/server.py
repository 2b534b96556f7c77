"""`oraculo dev`, `serve`, `api`, `engine` and `worker`: the commands that run as servers."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from oraculo.cli import output
from oraculo.cli.shared_broker import expect_shared_broker
from oraculo.errors import Fault, InvalidSettings

if TYPE_CHECKING:
    from oraculo.settings import Settings
    from oraculo.worker import App

Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default=False)]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
Apps = Annotated[
    list[str] | None,
    typer.Option("--app", metavar="MODULE:APP", help="Worker app to run in this process, too. Repeatable."),
]

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Without API keys, serve any machine: a proxy or firewall guards the server.")
]

_MEMORY = "memory://"
_ANY = ("*",)


def dev(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Port = None,
    app: Apps = None,
    samples: Annotated[
        bool | None,
        typer.Option(
            "--samples/--no-samples",
            help="Start sample workers and submit sample runs, or neither. By default: nothing beside --app; else the "
            "workers, and the runs in a new store.",
            show_default=False,
        ),
    ] = None,
    pace: Annotated[float, typer.Option(min=0, help="Slows the sample workers down, by this factor.")] = 1.0,
    store: Annotated[str | None, typer.Option(metavar="URL", help="Store of the state, as sqlite:///dev.db.")] = None,
    insecure: Insecure = False,
) -> None:
    """Run API, engine and worker apps in one process; no servers needed.

    Without --app sample workers run, and a new store gets a few sample runs. The broker is memory:// and the store
    SQLite, unless --store names another, whatever the settings say: shared servers are left alone.
    """
    from oraculo.cli import serving
    from oraculo.cli.welcome import Welcome
    from oraculo.samples.workers import make_sample_app
    from oraculo.settings import load_settings

    settings = _with_insecure(_dev_settings(load_settings(), store), insecure)
    apps = [_load_app(target) for target in app or ()]
    if samples is None and apps:
        samples = False
    if samples is not False:
        taken = {queue for each in apps for queue in each.handlers}
        sample_app = make_sample_app(pace, without=taken)
        apps += [sample_app] if sample_app.handlers else []
    listener = serving.listen(settings.api, host, port)
    welcome = Welcome(settings, apps, samples=samples)
    serving.serve(settings, apps, listener, welcome, greet=welcome.greet, quiet=True)


def _dev_settings(settings: "Settings", store: str | None) -> "Settings":
    from oraculo.core.webhook_rules import LOOPBACK
    from oraculo.settings import DEFAULT_STORE_URL
    from oraculo.settings.values import store_url_fault

    if store is not None and (fault := store_url_fault(store)):
        raise InvalidSettings(Fault("--store", fault))
    if settings.broker.url != _MEMORY:
        output.note(f"oraculo: dev uses {_MEMORY} and leaves ORACULO_BROKER_URL alone")
    if store is None and not settings.store.url.startswith("sqlite:"):
        output.note(f"oraculo: dev uses {DEFAULT_STORE_URL} and leaves ORACULO_STORE_URL alone")
        store = DEFAULT_STORE_URL
    for name, address in (("CELERY_BROKER_URL", settings.celery.broker_url), ("BULLMQ_URL", settings.bullmq.url)):
        if address:  # a bridge would take results that another server waits for
            output.note(f"oraculo: dev has no bridges and leaves ORACULO_{name} alone")
    if settings.objects.url:
        output.note("oraculo: dev keeps large results with its store and leaves ORACULO_OBJECTS_URL alone")
    if settings.queues.allow:
        output.note("oraculo: dev shares its queues with nobody and leaves ORACULO_QUEUES_ALLOW alone")
    return msgspec.structs.replace(
        settings,
        # There are no bridges here, and nobody shares the broker: every queue is allowed.
        queues=msgspec.structs.replace(settings.queues, allow=()),
        celery=msgspec.structs.replace(settings.celery, broker_url="", tasks_allow=_ANY, queues_allow=_ANY),
        bullmq=msgspec.structs.replace(settings.bullmq, url="", queues_allow=_ANY),
        objects=msgspec.structs.replace(settings.objects, url=""),
        broker=msgspec.structs.replace(settings.broker, url=_MEMORY),
        store=msgspec.structs.replace(settings.store, url=store or settings.store.url),
        webhook=msgspec.structs.replace(settings.webhook, allow=(*settings.webhook.allow, *LOOPBACK)),
    )


def _with_insecure(settings: "Settings", insecure: bool) -> "Settings":
    if not insecure:
        return settings
    return msgspec.structs.replace(settings, api=msgspec.structs.replace(settings.api, insecure=True))


def serve(host: Host = None, port: Port = None, app: Apps = None, insecure: Insecure = False) -> None:
    """Run the API and the engine.

    Settings come from oraculo.toml and, over it, the environment. Any number may share one store and one broker.
    """
    from oraculo.cli import serving
    from oraculo.cli.welcome import Greeting
    from oraculo.settings import load_settings

    settings = _with_insecure(load_settings(), insecure)
    apps = [_load_app(target) for target in app or ()]
    host = host or settings.api.host
    listener = serving.listen(settings.api, host, port)
    serving.serve(settings, apps, listener, Greeting(settings, apps, host))


def api(host: Host = None, port: Port = None, insecure: Insecure = False) -> None:
    """Run the API alone, beside `oraculo engine`.

    It creates runs, sends their first commands and does what people ask. Engines take answers and ring deadlines.
    """
    from oraculo.cli import serving
    from oraculo.cli.welcome import Greeting
    from oraculo.engine.wiring import Role
    from oraculo.settings import load_settings

    settings = _with_insecure(load_settings(), insecure)
    expect_shared_broker(settings, "use `oraculo serve`")
    host = host or settings.api.host
    listener = serving.listen(settings.api, host, port)
    serving.serve(settings, (), listener, Greeting(settings, (), host), role=Role.FRONT)


def engine(
    host: Host = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port for /health and /metrics; none unless given."),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Run an engine without the API, beside `oraculo api`.

    Any number may share one store and one broker. When one dies, the others take over.
    """
    from oraculo.cli import serving
    from oraculo.cli.welcome import Greeting
    from oraculo.settings import load_settings

    if host is not None and port is None:
        raise InvalidSettings(Fault("--host", "is of no use without --port: nothing listens then"))
    settings = _with_insecure(load_settings(), insecure)
    expect_shared_broker(settings, "use `oraculo serve`")
    if port is None:
        serving.run_engine(settings)
        return
    host = host or settings.api.host
    serving.serve(
        settings, (), serving.listen(settings.api, host, port), Greeting(settings, (), host), only_health=True
    )


class Runner(StrEnum):
    """The process that runs the handlers."""

    OWN = "oraculo"
    CELERY = "celery"


def worker(
    context: typer.Context,
    app: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The worker app, as meus_workers:app.")],
    engine: Annotated[
        Runner, typer.Option(help="Where handlers run: in this process, or in a Celery worker (RabbitMQ only).")
    ] = Runner.OWN,
) -> None:
    """Run a worker app as a process of its own.

    With `--engine celery` further options go to `celery worker`, as `--concurrency 8` or `--autoscale 10,2`.
    """
    from oraculo.cli import serving
    from oraculo.settings import load_settings

    if context.args and engine is not Runner.CELERY:
        raise InvalidSettings(Fault(context.args[0], "is no option of `oraculo worker` (see `oraculo worker --help`)"))
    settings = load_settings()
    expect_shared_broker(settings, f"use `oraculo dev --app {app}`")
    if engine is Runner.CELERY:
        serving.work_in_celery(settings, _load_app(app), context.args)
    else:
        serving.work(settings, _load_app(app))


def _load_app(target: str) -> "App":
    from oraculo.worker.loading import load_app

    return load_app(target)
