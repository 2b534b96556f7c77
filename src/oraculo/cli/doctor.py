"""`oraculo doctor`: what is set, what works, what does not, and what to do about it."""

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from oraculo import __version__
from oraculo.cli import output
from oraculo.cli.client import Refused, Server, Unreachable
from oraculo.cli.options import DEFAULT_URL, LOOPBACK, ApiKey, AsJson
from oraculo.cli.pipelines import check_files
from oraculo.errors import InvalidSettings, OraculoError

if TYPE_CHECKING:
    from oraculo.ports.objects import Objects
    from oraculo.settings import Settings

OK, WARNING, ERROR = "ok", "aviso", "erro"
_PATIENCE = 10.0
_SQLITE = "sqlite:///"
_SET_BY_THE_USER = {"settings", "pipelines"}  # checks whose fault is bad usage, not something that is away

GivenUrl = Annotated[
    str | None,
    typer.Option("--url", envvar="ORACULO_URL", show_envvar=True, help=f"Where the server is; {DEFAULT_URL}."),
]


class Check(msgspec.Struct, rename={"name": "nome", "state": "estado", "detail": "detalhe", "remedy": "o_que_fazer"}):
    name: str
    state: str
    detail: str
    remedy: str | None = None


def doctor(url: GivenUrl = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Check settings, broker, store and server.

    Exit status 1 when something is wrong, 2 when a setting or a pipeline file is.
    """
    from oraculo.settings import load_settings

    checks = [_python()]
    shown: dict[str, Any] | None = None
    try:
        settings = load_settings()
        shown = _shown(settings)
        checks += _settings_checks(settings)
        checks += asyncio.run(_parts(settings))
    except InvalidSettings as error:
        checks += [
            Check("settings", ERROR, str(fault), "mend it in the environment or in oraculo.toml")
            for fault in error.faults
        ]
    checks.append(_server(url, api_key))
    _report(checks, shown, as_json)
    raise typer.Exit(_status_of(checks))


def _status_of(checks: list[Check]) -> int:
    wrong = {check.name for check in checks if check.state == ERROR}
    if wrong & _SET_BY_THE_USER:
        return output.BAD_USAGE
    return output.NOT_SUCCEEDED if wrong else 0


def _report(checks: list[Check], settings: dict[str, Any] | None, as_json: bool) -> None:
    if as_json:
        document = {"versao": __version__, "configuracao": settings, "verificacoes": msgspec.to_builtins(checks)}
        output.print_json(document)
        return
    output.print_line(f"oraculo {__version__}")
    for key, value in (settings or {}).items():
        output.print_line(f"  {key} = {value}")
    rows = [(check.name, check.state, _sentence(check)) for check in checks]
    output.print_table(("what", "state", "detail"), rows, empty="")


def _sentence(check: Check) -> str:
    return f"{check.detail}; {check.remedy}" if check.remedy else check.detail


def _shown(settings: "Settings") -> dict[str, Any]:
    """As read; secrets are told by their presence only."""
    from oraculo.settings.urls import redacted

    return {
        "broker.url": ",".join(map(redacted, settings.broker.urls)),
        "broker.prefix": settings.broker.prefix,
        "store.url": redacted(settings.store.url),
        "store.retention_days": settings.store.retention_days,
        "objects.url": redacted(settings.objects.url),
        "objects.threshold_bytes": settings.objects.threshold_bytes,
        "api.keys": f"{len(settings.api.keys)} set",
        "webhook.secret": "set" if settings.webhook.secret else "not set",
        "runs.timeout": settings.runs.timeout,
        "runs.max_attempts": settings.runs.max_attempts,
        "pipelines": settings.pipelines,
        "rotas": sorted(settings.routes),
    }


# -- the checks ------------------------------------------------------------------------------------------------------


def _python() -> Check:
    missing = [name for name in ("uvloop", "httptools") if find_spec(name) is None]
    detail = f"Python {platform.python_version()}"
    if missing:
        return Check(
            "python", OK, f"{detail}, without {' and '.join(missing)}", "pip install 'oraculo[speed]' is faster"
        )
    return Check("python", OK, f"{detail} with uvloop and httptools")


def _settings_checks(settings: "Settings") -> Iterator[Check]:
    if settings.webhook.secret:
        yield Check("webhooks", OK, "signed")
    else:
        yield Check("webhooks", WARNING, "sent unsigned", "set ORACULO_WEBHOOK_SECRET to whsec_… if you use them")
    if settings.api.host not in LOOPBACK and not settings.api.keys:
        yield Check("api keys", WARNING, f"none, and it listens on {settings.api.host}", "set ORACULO_API_KEYS")
    if settings.pipelines:
        yield _pipelines(Path(settings.pipelines))


def _pipelines(folder: Path) -> Check:
    if not folder.is_dir():
        return Check("pipelines", ERROR, f"{folder} is not a folder", "make it, or mend ORACULO_PIPELINES")
    findings = list(check_files([folder]))
    bad = [finding["arquivo"] for finding in findings if not finding["valido"]]
    if bad:
        return Check("pipelines", ERROR, f"bad: {', '.join(bad)}", f"see `oraculo pipelines validate {folder}`")
    return Check("pipelines", OK, f"{len(findings)} in {folder}")


async def _parts(settings: "Settings") -> list[Check]:
    """Raises InvalidSettings for what this version has no adapter for."""
    from oraculo.bootstrap import make_adapters, make_objects, make_store
    from oraculo.ports.clock import SystemClock

    brokers, store = make_adapters(_by_node(settings), SystemClock()), make_store(settings)
    checks = [
        await _part(_labelled("broker", url, len(brokers)), broker.start, broker.check, broker.close)
        for url, broker in brokers
    ]
    if not brokers[0][1].capabilities.shared:
        detail = "memory:// is inside one process"
        checks.append(Check("workers", WARNING, detail, "run them with `oraculo dev --app` or `serve --app`"))
    if (missing := _missing_file(settings.store.url)) is not None:
        checks.append(missing)
    else:
        checks.append(await _part("store", store.start, store.check, store.close))
    checks.append(await _large_results(settings, make_objects(settings)))
    return checks


def _by_node(settings: "Settings") -> "Settings":
    """With each node of a cluster by itself: one that is away is not to hide behind the others."""
    from oraculo.settings.urls import node_urls

    nodes = [node for url in settings.broker.urls for node in node_urls(url)]
    replace = msgspec.structs.replace
    return replace(settings, broker=replace(settings.broker, url=",".join(nodes)))


async def _large_results(settings: "Settings", objects: "Objects | None") -> Check:
    if objects is None or not settings.objects.threshold_bytes:
        why = "ORACULO_OBJECTS_THRESHOLD_BYTES is 0" if objects else "no object store is set"
        remedy = None if objects else "set ORACULO_OBJECTS_URL to a place that all engines reach if they are many"
        return Check("objects", OK, f"large results stay in the store: {why}", remedy)
    return await _part("objects", _nothing_to_start, objects.check, objects.close)


async def _nothing_to_start() -> None:
    pass


def _labelled(name: str, url: str, count: int) -> str:
    """With several of a kind, which one."""
    from oraculo.settings.urls import redacted

    return name if count == 1 else f"{name} {redacted(url).rpartition('@')[2].removeprefix('//')}"


async def _part(
    name: str,
    start: Callable[[], Awaitable[None]],
    check: Callable[[], Awaitable[str]],
    close: Callable[[], Awaitable[None]],
) -> Check:
    remedy = f"start it, or mend ORACULO_{name.partition(' ')[0].upper()}_URL"
    try:
        async with asyncio.timeout(_PATIENCE):
            await start()
            version = await check()
    except OraculoError as error:
        return Check(name, ERROR, str(error), remedy)
    except TimeoutError:
        return Check(name, ERROR, f"no answer in {_PATIENCE:g} s", remedy)
    finally:
        await close()
    return Check(name, OK, f"{version}; schema up to date, can be written" if name == "store" else version)


def _missing_file(url: str) -> Check | None:
    """A file that is not there yet is not made by looking at it."""
    path = Path(url.removeprefix(_SQLITE)).absolute()
    if not url.startswith(_SQLITE) or path.exists():
        return None
    parent = next(folder for folder in path.parents if folder.exists())
    if os.access(parent, os.W_OK | os.X_OK):
        return Check("store", OK, f"{path} is not there yet; it is made at the first start")
    return Check("store", ERROR, f"{path} cannot be made: {parent} is not writable", "mend ORACULO_STORE_URL")


def _server(url: str | None, api_key: str | None) -> Check:
    try:
        with Server(url or DEFAULT_URL, api_key) as server:
            version = server.get("/health/ready").get("versao")
    except Refused as error:
        return Check("server", ERROR, f"at {url or DEFAULT_URL}, not ready: {error}")
    except Unreachable as error:
        # Nobody named a server: that none is running is worth knowing, not wrong.
        return Check("server", ERROR if url else WARNING, str(error))
    except OraculoError as error:
        return Check("server", ERROR, str(error))
    if version != __version__:
        return Check("server", WARNING, f"at {server.url}, ready, but its version is {version}")
    return Check("server", OK, f"at {server.url}, ready, version {version}")
