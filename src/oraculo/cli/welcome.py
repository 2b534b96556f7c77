"""The first lines that `oraculo dev` and `serve` print, and the sample runs of `dev`."""

import sys
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from oraculo import __version__
from oraculo.bootstrap import System
from oraculo.cli import output
from oraculo.cli.options import DEFAULT_URL
from oraculo.core.loopback import is_loopback
from oraculo.ports.browse import RunQuery
from oraculo.samples.requests import SAMPLE_REQUESTS
from oraculo.settings import Settings
from oraculo.settings.urls import redacted
from oraculo.worker import App


class Greeting:
    """Prints the address, and warnings about settings that are probably a mistake."""

    def __init__(self, settings: Settings, apps: Sequence[App], host: str) -> None:
        self._settings = settings
        self._apps = apps
        self._host = host

    async def __call__(self, system: System, address: str) -> None:
        if not system.broker.capabilities.shared and not self._apps:
            output.note(
                "oraculo: warning: with memory:// only workers in this process can reach the queues; "
                "add them with --app, or set ORACULO_BROKER_URL"
            )
        if not is_loopback(self._host) and not self._settings.api.keys:
            output.note(f"oraculo: warning: whoever can reach {self._host} can start runs; set ORACULO_API_KEYS")
        _say([f"ORÁCULO {__version__} at {address} (broker {system.broker.name}, store {system.store.name})"])


class Welcome:
    """Prints the banner of `oraculo dev`, and submits the sample runs.

    `samples` decides whether the runs are submitted; None submits them into a store without runs.
    """

    def __init__(self, settings: Settings, apps: Sequence[App], *, samples: bool | None) -> None:
        self._settings = settings
        self._queues = sorted({queue for app in apps for queue in app.handlers})
        self._samples = samples

    def greet(self, address: str) -> None:
        """Print the address, the state, the workers and commands to try."""
        _say(self._lines(address))

    async def __call__(self, system: System, address: str) -> None:
        if self._samples is False:
            return
        if self._samples or await _is_new(system):
            _say(["", "Sample runs:", *[line async for line in _submitted(system)]])
        else:
            _say(["", "Sample runs: none this time, the state has runs already; `oraculo dev --samples` submits them"])

    def _lines(self, address: str) -> Iterator[str]:
        where = "" if address == DEFAULT_URL else f" --url {address}"
        yield f"ORÁCULO {__version__} at {address} (API page at {address}/docs)"
        yield f"  state:   {redacted(self._settings.store.url)} (kept between starts); messages are in memory"
        yield f"  workers: {', '.join(self._queues) or 'none; add yours with --app MODULE:APP'}"
        yield ""
        yield "Try:"
        if request := self._request():
            key = " -H 'Authorization: Bearer KEY'" if self._settings.api.keys else ""
            body = msgspec.json.encode(request).decode()
            yield f"  curl -s {address}/orquestracoes{key} -H 'Content-Type: application/json' -d '{body}'"
        yield f"  oraculo runs list{where}"
        yield f"  oraculo runs watch ID{where}"
        yield f"  oraculo dlq list{where}"
        yield f"  oraculo doctor{where}"

    def _request(self) -> dict[str, object] | None:
        """Return a request that the workers here can serve: of a whole route, else for one queue."""
        if not self._queues:
            return None
        types = self._settings.routes.items()
        served = next((name for name, queues in types if queues and set(queues) <= set(self._queues)), None)
        return {"tipo": served, "payload": {}} if served else {"destinos": self._queues[:1], "payload": {}}


async def _is_new(system: System) -> bool:
    return not (await system.operations.runs(RunQuery(limit=1))).heads


async def _submitted(system: System) -> AsyncIterator[str]:
    for what, request in SAMPLE_REQUESTS.items():
        submitted = await system.operations.submit(msgspec.json.encode(request))
        yield f"  {submitted.run_id}  {what}"


def _say(lines: Sequence[str] | Iterator[str]) -> None:
    print("\n".join(lines))
    sys.stdout.flush()
