"""`oraculo doctor`: checks of settings, brokers, store and server, each fault with its remedy."""

import asyncio
import os
import platform
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from oraculo import __version__
from oraculo.cli import output
from oraculo.cli.client import Refused, ServerClient, Unreachable, failing
from oraculo.cli.options import DEFAULT_URL, ApiKey, AsJson
from oraculo.cli.pipelines import check_files
from oraculo.cli.table import Column, print_table
from oraculo.cli.times import localized
from oraculo.core.loopback import is_loopback
from oraculo.errors import (
    BrokerError,
    BrokerUnavailable,
    InvalidPipeline,
    InvalidSettings,
    ObjectsError,
    ObjectsUnavailable,
    OraculoError,
    StoreRefuses,
    StoreUnavailable,
    how_to_add,
)

if TYPE_CHECKING:
    from oraculo.cli.rehearsal import Failed
    from oraculo.ports.broker_admin import FullBroker
    from oraculo.ports.objects import Objects
    from oraculo.ports.store import Storage
    from oraculo.settings import Settings

OK, WARNING, ERROR = "ok", "aviso", "erro"
_PATIENCE = 10.0  # seconds for one check
_SQLITE = "sqlite:///"
_IN_MEMORY = "broker memory"  # among the parts of a server
_EMPTY = "empty: it is laid out at the first start"
_WARNED_OF = "; "  # separates a warning from the words of a check
_ENVELOPE = 4096  # bytes that a command may have around its payload
_GIVE_RIGHTS = "give the user of ORACULO_BROKER_URL the rights that docs/reference/limits-brokers.md lists"
_MEND_OR_GIVE_RIGHTS = f"mend what it says, or {_GIVE_RIGHTS}"
_SAID_OF_RIGHTS = ("NOPERM", "ACCESS_REFUSED", "does not allow it")
_REMEDIES = {  # for faults that no right mends, by a mark in the error: these are error codes of NATS
    "(10065)": "take the subject from the other stream, or set ORACULO_PREFIX to one that it does not cover",
    "(10027)": "raise max_streams of the account: a queue has two, its own and that of its dead letters",
    "(10113)": "take max_bytes_required from the account, or make all streams yourself, with max_bytes and discard new",
}
_VARIABLES = {
    "broker": "ORACULO_BROKER_URL",
    "store": "ORACULO_STORE_URL",
    "objects": "ORACULO_OBJECTS_URL",
    "celery": "ORACULO_CELERY_BROKER_URL",
    "bullmq": "ORACULO_BULLMQ_URL",
}
_SET_BY_THE_USER = {"settings", "pipelines"}  # checks whose faults are bad usage

GivenUrl = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="ORACULO_URL", show_envvar=True, help=f"Address of the server; {DEFAULT_URL} unless given."
    ),
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
    from structlog.testing import capture_logs

    from oraculo.settings import load_settings

    server = ServerClient(url or DEFAULT_URL, api_key)  # a bad URL or key ends the command before any check
    checks = [_python()]
    shown: dict[str, Any] | None = None
    try:
        settings = load_settings()
        shown = _shown(settings)
        checks += _settings_checks(settings)
        if parts := _parts_in_memory(ServerClient(server.url, api_key)):
            checks += _looked_at_by(server, parts)
        else:
            with capture_logs():  # the checks report what adapters log, and `--json` prints JSON only
                checks += asyncio.run(_parts(settings))
                checks += asyncio.run(_bridges(settings))
    except InvalidSettings as error:
        checks += [
            Check("settings", ERROR, str(fault), "mend it in the environment or in oraculo.toml")
            for fault in error.faults
        ]
    checks.append(_server(server, is_named=bool(url), has_key=bool(api_key)))
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
    rows = [(check.name, output.state_word(check.state), _sentence(check)) for check in checks]
    print_table((Column("what"), Column("state"), Column("detail", prose=True)), rows, empty="")


def _sentence(check: Check) -> str:
    return f"{check.detail}; {check.remedy}" if check.remedy else check.detail


def _shown(settings: "Settings") -> dict[str, Any]:
    """Return the settings in use; secrets only as set or not set."""
    from oraculo.settings.urls import redacted

    return {
        "broker.url": ",".join(map(redacted, settings.broker.urls)),
        "broker.prefix": settings.broker.prefix,
        "queues.allow": ",".join(settings.queues.allow),
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
    detail = f"Python {platform.python_version()}"
    if find_spec("uvloop") is None:
        return Check("python", OK, f"{detail}, without uvloop", f"faster with it: {how_to_add('speed')}")
    return Check("python", OK, f"{detail} with uvloop")


def _settings_checks(settings: "Settings") -> Iterator[Check]:
    if settings.webhook.secret:
        yield Check("webhooks", OK, "signed")
    else:
        yield Check("webhooks", WARNING, "sent unsigned", "set ORACULO_WEBHOOK_SECRET to whsec_… if you use them")
    if _names_any_queue(settings):
        advice = "set ORACULO_PREFIX, or ORACULO_QUEUES_ALLOW to patterns of your own, as escavador_*,executador_*"
        yield Check("queues", WARNING, "requests may name any queue of the broker, those of others too", advice)
    if not is_loopback(settings.api.host) and not settings.api.keys:
        is_meant = settings.api.insecure
        detail = f"none, and it listens on {settings.api.host}{'' if is_meant else '; a server refuses to start'}"
        yield Check("api keys", WARNING if is_meant else ERROR, detail, "set ORACULO_API_KEYS")
    if settings.pipelines:
        yield _pipelines(Path(settings.pipelines))


def _names_any_queue(settings: "Settings") -> bool:
    """Return whether requests may name queues of other users of the broker."""
    is_shared = not settings.broker.url.startswith("memory:")
    return is_shared and not settings.broker.prefix and not settings.queues.allow


def _pipelines(folder: Path) -> Check:
    if not folder.is_dir():
        return Check("pipelines", ERROR, f"{folder} is not a folder", "make it, or mend ORACULO_PIPELINES")
    try:
        findings = list(check_files([folder]))
    except InvalidPipeline as error:
        return Check("pipelines", ERROR, str(error), "mend that, or ORACULO_PIPELINES")
    bad = [finding["arquivo"] for finding in findings if not finding["valido"]]
    if bad:
        return Check("pipelines", ERROR, f"bad: {', '.join(bad)}", f"see `oraculo pipelines validate {folder}`")
    return Check("pipelines", OK, f"{len(findings)} in {folder}")


def _parts_in_memory(server: ServerClient) -> dict[str, Any] | None:
    """Return the parts of a running server whose broker is `memory://`, as of `oraculo dev`; else None."""
    try:
        with server:
            parts: dict[str, Any] = server.get("/health/ready").get("partes", {})
    except (Refused, Unreachable):
        return None
    return parts if _IN_MEMORY in parts else None


def _looked_at_by(server: ServerClient, parts: dict[str, Any]) -> Iterator[Check]:
    """Yield the server's own report on its parts: no other process can reach them."""
    for name, part in parts.items():
        yield Check(name, OK if part["ok"] else ERROR, localized(part["problema"] or "") or f"in use by {server.url}")
    detail = f"{server.url} keeps its queues in memory, so broker, store and bridges of the settings were not looked at"
    yield Check("dev", OK, detail, "stop it to check them")


async def _parts(settings: "Settings") -> list[Check]:
    """Check brokers, store and large results. Raises InvalidSettings for a URL without an adapter."""
    from oraculo.bootstrap import make_adapters, make_objects, make_store
    from oraculo.ports.clock import SystemClock

    brokers, store = make_adapters(_by_node(settings), SystemClock()), make_store(settings)
    checks = [await _broker(_labelled("broker", url, len(brokers)), broker, settings) for url, broker in brokers]
    is_shared = brokers[0][1].capabilities.shared
    if not is_shared:
        detail = "memory:// is inside one process"
        checks.append(Check("workers", WARNING, detail, "run them with `oraculo dev --app` or `serve --app`"))
    fault = _file(settings.store.url, needs_lock=not is_shared)
    try:
        stored = fault or await _proved("store", lambda: _look_and_prove(store))
        is_open = fault is None and stored.state != ERROR and _EMPTY not in stored.detail
        checks += [stored, await _large_results(settings, make_objects(settings), store if is_open else None)]
    finally:
        await store.close()
    return checks


async def _broker(name: str, broker: "FullBroker", settings: "Settings") -> Check:
    """Check one broker by using it: only a rehearsal finds missing rights."""
    from structlog.testing import capture_logs

    from oraculo.cli.rehearsal import Failed, rehearse
    from oraculo.wire.naming import QueueNames

    async def prove() -> str:
        await broker.start()
        try:
            return await broker.check()
        except BrokerUnavailable as error:  # the broker runs, and says why it takes nothing
            raise BrokerError(str(error)) from error

    try:
        found = await _proved(name, prove)
        if found.state != ERROR:
            with capture_logs() as logged:
                await rehearse(broker, QueueNames(settings.broker.prefix), settings.broker.delivery_limit)
            found = _warned(_compared(found, broker, settings.limits.payload_bytes), logged)
    except Failed as failed:
        return await _not_usable(found, failed, prove)
    finally:
        await broker.close()
    return found


def _compared(found: Check, broker: "FullBroker", payload: int) -> Check:
    """Add a warning when the broker takes smaller messages than the settings accept."""
    most, needed = broker.capabilities.max_message, payload + _ENVELOPE
    if most is None or most >= needed:
        return found
    warning = f"commands over its max_payload of {most} bytes are never sent, and payloads of {payload} are accepted"
    remedy = f"raise max_payload to {needed}, or lower ORACULO_LIMITS_PAYLOAD_BYTES"
    return Check(found.name, WARNING, f"{found.detail}{_WARNED_OF}{warning}", remedy)


def _warned(found: Check, logged: Iterable[MutableMapping[str, Any]]) -> Check:
    """Add the warnings that an engine would log about its own queues."""
    from oraculo.ports.broker import MAY_LOSE

    warnings = [f"{line['event']} ({line['queue']}): {line['reason']}" for line in logged if line["event"] == MAY_LOSE]
    if not warnings:
        return found
    remedy = "make it anew as docs/reference/limits-brokers.md says, unless you want it so"
    return Check(
        found.name,
        WARNING,
        _WARNED_OF.join((found.detail, *warnings)),
        f"{found.remedy}; {remedy}" if found.remedy else remedy,
    )


async def _not_usable(found: Check, failed: "Failed", prove: Callable[[], Awaitable[str]]) -> Check:
    remedy = _remedy_for(str(failed.error))
    if isinstance(failed.error, BrokerUnavailable):  # it may be away, or answer all the same
        again = await _proved(found.name, prove)
        if again.state == ERROR and not failed.is_grave:
            return again
        remedy = again.remedy or remedy
    if failed.is_grave:
        return Check(found.name, ERROR, f"{found.detail}, but it cannot be used: {failed}", remedy)
    return Check(found.name, WARNING, f"{found.detail}; an empty queue is left behind: {failed}", remedy)


def _remedy_for(said: str) -> str:
    otherwise = _GIVE_RIGHTS if any(word in said for word in _SAID_OF_RIGHTS) else _MEND_OR_GIVE_RIGHTS
    return next((remedy for mark, remedy in _REMEDIES.items() if mark in said), otherwise)


async def _look_and_prove(store: "Storage") -> str:
    """Check the store. A look lays out no schema in an empty one."""
    from oraculo.engine.cluster.store_clock import read_clock
    from oraculo.ports.clock import SystemClock
    from oraculo.ports.store import LaidOutAtStart

    state, version, clock_fault = _EMPTY, None, None
    if isinstance(store, LaidOutAtStart):
        version = await store.look()
    if version is None:
        await store.start()
        state, version = "schema up to date, can be written", await store.check()
        clock_fault = (await read_clock(store, SystemClock())).fault
    place, mark, warning = version.partition(_WARNED_OF)
    return f"{place}, {state}{mark}{warning}{_WARNED_OF + clock_fault if clock_fault else ''}"


async def _bridges(settings: "Settings") -> list[Check]:
    """Check what is behind the bridges. Raises InvalidSettings, also when a bridge's client is not installed."""
    from oraculo.bootstrap import make_bridges, make_store
    from oraculo.brokers.memory import MemoryBroker
    from oraculo.ports.clock import SystemClock, SystemEntropy
    from oraculo.telemetry.hub import Hub

    clock = SystemClock()
    make_bridges(settings, MemoryBroker(clock), make_store(settings), clock, SystemEntropy(), Hub())
    checks, prefix = [], settings.broker.prefix
    if settings.celery.broker_url:
        from oraculo.cli.bridge_checks import reach_celery

        checks.append(await _proved("celery", lambda: reach_celery(settings.celery, prefix)))
    if settings.bullmq.url:
        from oraculo.cli.bridge_checks import reach_bullmq

        checks.append(await _proved("bullmq", lambda: reach_bullmq(settings.bullmq, prefix)))
    return checks


def _by_node(settings: "Settings") -> "Settings":
    """Return the settings with each node of a cluster as a broker of its own, so that each is checked."""
    from oraculo.settings.urls import node_urls

    nodes = [node for url in settings.broker.urls for node in node_urls(url)]
    replace = msgspec.structs.replace
    return replace(settings, broker=replace(settings.broker, url=",".join(nodes)))


async def _large_results(settings: "Settings", objects: "Objects | None", store: "Storage | None") -> Check:
    """Check the place of large results. Without a store nothing says whose place it is."""
    if objects is None or not settings.objects.threshold_bytes:
        why = "ORACULO_OBJECTS_THRESHOLD_BYTES is 0" if objects else "no object store is set"
        remedy = None if objects else "set ORACULO_OBJECTS_URL to a place that all engines reach if they are many"
        return Check("objects", OK, f"large results stay in the store: {why}", remedy)

    async def prove() -> str:
        from oraculo.engine.results.clean_up import seen_fault

        place = await objects.check()
        if store is not None and (fault := await seen_fault(objects, store)):
            raise ObjectsError(f"{place}: {fault}")
        return place

    try:
        return await _proved("objects", prove)
    finally:
        await objects.close()


def _labelled(name: str, url: str, count: int) -> str:
    """Return the name of a check, with the address when there are several of its kind."""
    from oraculo.settings.urls import redacted

    scheme, mark, place = redacted(url).rpartition("://")
    return name if count == 1 else f"{name} {scheme}{mark}{place.rpartition('@')[2]}"


async def _proved(name: str, prove: Callable[[], Awaitable[str]]) -> Check:
    variable = _VARIABLES[name.partition(" ")[0]]
    remedy, mending = f"start it, or mend {variable}", f"mend that, or {variable}"
    try:
        async with asyncio.timeout(_PATIENCE):
            detail = await prove()
    except StoreRefuses as error:  # the store runs
        return Check(name, ERROR, str(error), mending)
    except (BrokerUnavailable, StoreUnavailable, ObjectsUnavailable) as error:
        return Check(name, ERROR, str(error), remedy)
    except OraculoError as error:
        return Check(name, ERROR, str(error), mending)
    except TimeoutError:
        return Check(name, ERROR, f"no answer in {_PATIENCE:g} s", remedy)
    return Check(name, WARNING if _WARNED_OF in detail else OK, detail)


def _file(url: str, *, needs_lock: bool) -> Check | None:
    """Check SQLite's file without opening it, because opening would make it. None: it can be opened."""
    if not url.startswith(_SQLITE):
        return None
    path = Path(url.removeprefix(_SQLITE)).absolute()
    lock, parent = Path(f"{path}.lock"), next(folder for folder in path.parents if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        return Check("store", ERROR, f"{path} cannot be written: {parent} is not writable", "mend ORACULO_STORE_URL")
    if needs_lock and lock.exists() and not (lock.is_file() and os.access(lock, os.R_OK | os.W_OK)):
        return Check("store", ERROR, f"{lock} is not a file that can be written", "mend it, or ORACULO_STORE_URL")
    if not path.exists():
        return Check("store", OK, f"{path} is not there yet; it is made at the first start")
    return _older_file(path)


def _older_file(path: Path) -> Check | None:
    """Warn of a file of an older version. Opening it would bring it up to date, with no way back."""
    from oraculo.stores.sqlite import is_older_file

    if not is_older_file(str(path)):
        return None
    detail = f"{path} was made by an older ORÁCULO, and the next start brings it up to date"
    return Check("store", WARNING, detail, "back it up before, for the older one will not read it any more")


def _server(server: ServerClient, *, is_named: bool, has_key: bool) -> Check:
    try:
        with server:
            ready = server.get("/health/ready")
            version, wrong = ready.get("versao"), failing(ready.get("partes", {}))
            refusal = _refusal_to_work(server)
    except Refused as error:
        return Check("server", ERROR, f"at {server.url}, not ready: {error}")
    except Unreachable as error:
        # Without --url no server has to run.
        return Check("server", ERROR if is_named else WARNING, str(error))
    other = "" if version == __version__ else f"its version is {version}"
    if problems := "; ".join(filter(None, (other, wrong, refusal))):
        # Without a key a refusal is expected; a key that was given has to work.
        return Check("server", ERROR if refusal and has_key else WARNING, f"at {server.url}, ready, but {problems}")
    return Check("server", OK, f"at {server.url}, ready, version {version}")


def _refusal_to_work(server: ServerClient) -> str | None:
    """Return why the server refuses the API key. `/health/ready` needs none, so a list of runs is asked for."""
    try:
        server.get("/orquestracoes", limit=1)
    except Refused as error:
        return None if error.status == 404 else str(error)  # an engine without an API
    return None
