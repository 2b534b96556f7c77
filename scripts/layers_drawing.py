"""The drawing of the layers in ARCHITECTURE.md, from the contract of import-linter in pyproject.toml."""

import re
import tomllib
from pathlib import Path

_WHAT = {
    "__main__": "`python -m oraculo`",
    "cli": "the commands",
    "main": "for uvicorn",
    "celery_app": "for Celery: the app `orquestrador_core`",
    "bootstrap": "makes the adapters that the settings name, and puts the parts together",
    "samples": "the workers of `oraculo dev`",
    "api": "FastAPI",
    "testing": "harness, conformance suites and simulation, shipped to users",
    "engine": "takes, decides, commits, sends",
    "worker": "the SDK",
    "brokers": "RabbitMQ, Redis Streams, NATS, memory, and several of them as one",
    "stores": "SQLite, PostgreSQL, Redis, MongoDB; large results",
    "bridges": "to Celery and BullMQ",
    "telemetry": "metrics and logs",
    "clients": "of Redis; what the URLs of servers say; keeps a queue subscribed",
    "ports": "Broker, Store, Clock, Entropy, Telemetry, …: small Protocols",
    "core": "plan, run, machine, aggregate, …: pure",
    "pipeline": "what users write: definitions, retries, steps of other systems",
    "wire": "what travels: messages, names, JSON, timestamps",
    "settings": "what can be set",
    "errors": "what is raised on purpose",
}
_DRAWING = re.compile(r"(?<=<!-- layers, from pyproject.toml by `make docs` -->\n```\n).*?(?=```\n)", re.DOTALL)


def with_layers(page: str, pyproject: Path) -> str:
    """The page with its drawing made anew. Raises KeyError for a layer that nothing is said of here."""
    assert _DRAWING.search(page), "the mark before the drawing is gone"
    return _DRAWING.sub(lambda _: _drawn(_layers(pyproject)), page)


def _layers(pyproject: Path) -> list[list[str]]:
    contracts = tomllib.loads(pyproject.read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [layer.split(" | ") for layer in layers]


def _drawn(layers: list[list[str]]) -> str:
    """A line for each room; those of one layer stand behind one bar."""
    lines = []
    for layer in layers:
        for number, room in enumerate(layer):
            bar = " " if len(layer) == 1 else "┌" if number == 0 else "└" if number == len(layer) - 1 else "│"
            lines.append(f"{bar} {room:<12} {_WHAT[room]}\n")
    return "".join(lines)
