"""The first picture of ARCHITECTURE.md: the layers of pyproject.toml, top to bottom, and who stands outside them."""

import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path

_WHAT = {
    "__main__": "python -m oraculo",
    "cli": "the commands",
    "main": "the app for uvicorn",
    "celery_app": "the app for Celery",
    "bootstrap": "turns settings into adapters, and puts the parts together",
    "samples": "the workers of oraculo dev",
    "api": "HTTP",
    "testing": "harness, conformance suites, simulation",
    "engine": "decides",
    "worker": "the SDK",
    "brokers": "adapters",
    "stores": "adapters",
    "bridges": "two bridges",
    "telemetry": "metrics, logs",
    "clients": "connections to Redis, addresses of servers, lasting subscriptions",
    "ports": "small Protocols: broker, store, clock, telemetry",
    "settings": "every setting, read once",
    "core": "runs and their rules: pure",
    "pipeline": "what users write: definitions and their faults",
    "wire": "what travels: messages, names, JSON",
    "errors": "what is raised on purpose",
}
_CALLERS = {"cli": ("people at a shell",), "main": ("uvicorn, Celery",), "api": ("HTTP clients", "and your tests")}
_SERVERS = {
    "engine": ("RabbitMQ, Redis, NATS", "SQLite, PostgreSQL,", "Redis, MongoDB", "Celery, BullMQ", "workers anywhere")
}
_SIDE, _MIDDLE, _GAP, _LINE = 170, 640, 10, 17  # pixels: beside the stack, its width, between boxes, a line of text
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2430; text-anchor: middle }
.name { font: 600 14px ui-monospace, monospace }
.outside { fill: #5b6270 }
.room { fill: #eef1fb; stroke: #3f51b5 }
.server { fill: #fff7e6; stroke: #c98a1b }
.arrow { stroke: #5b6270; stroke-width: 1.5; marker-end: url(#head) }
"""
_HEAD = """\
<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">
<path d="M0,0 L8,4 L0,8 z" fill="#5b6270"/></marker></defs>
"""


def layers_picture(pyproject: Path) -> str:
    """Return the picture as SVG. Raises KeyError for a package that `_WHAT` does not describe."""
    rows, top = [], _GAP
    for layer in _layers(pyproject):
        height = 50 if len(layer) > 1 else 34
        rows.extend([*_rooms(layer, top, height), *_callers(layer, top, height), *_servers(layer, top, height)])
        top += height + _GAP
    width = _MIDDLE + 2 * (_SIDE + 2 * _GAP)
    note = _text(width / 2, top + _LINE, "A package imports from rows below it, never from above or beside.", "outside")
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 2 * _LINE}" role="img">\n'
    title = "<title>The packages of ORÁCULO in layers, and who stands outside</title>\n"
    paper = '<rect width="100%" height="100%" rx="8" fill="#fff"/>\n'
    body = "".join(f"{line}\n" for line in (*rows, note))
    return f"{opening}{title}<style>\n{_STYLE}</style>\n{_HEAD}{paper}{body}</svg>\n"


def _layers(pyproject: Path) -> list[list[str]]:
    contracts = tomllib.loads(pyproject.read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [layer.split(" | ") for layer in layers]


def _rooms(layer: list[str], top: int, height: int) -> Iterator[str]:
    """Draw one box for each package: a lone one has its description beside the name, others below it."""
    wide = (_MIDDLE - _GAP * (len(layer) - 1)) / len(layer)
    for number, room in enumerate(layer):
        left = _SIDE + 2 * _GAP + number * (wide + _GAP)
        yield _box(left, top, wide, height, "room")
        if len(layer) == 1:
            what = f'<tspan class="name">{escape(room)}</tspan> &#160; {escape(_WHAT[room])}'
            yield f'<text x="{left + wide / 2:g}" y="{top + 22}">{what}</text>'
        else:
            yield _text(left + wide / 2, top + 21, room, "name")
            yield _text(left + wide / 2, top + 39, _WHAT[room])


def _callers(layer: list[str], top: int, height: int) -> Iterator[str]:
    for lines in (_CALLERS[room] for room in layer if room in _CALLERS):
        middle = top + height / 2
        first = middle + 4 - _LINE * (len(lines) - 1) / 2
        yield from (_text(_SIDE / 2, first + _LINE * number, line, "outside") for number, line in enumerate(lines))
        yield f'<path class="arrow" d="M{_SIDE - 12},{middle:g} H{_SIDE + 2 * _GAP - 2}"/>'


def _servers(layer: list[str], top: int, height: int) -> Iterator[str]:
    for lines in (_SERVERS[room] for room in layer if room in _SERVERS):
        left, tall = _SIDE + _MIDDLE + 4 * _GAP, _LINE * len(lines) + 14
        above = top + height / 2 - tall / 2
        yield _box(left, above, _SIDE - 2 * _GAP + 10, tall, "server")
        middle = left + (_SIDE - 2 * _GAP + 10) / 2
        yield from (_text(middle, above + 20 + _LINE * number, line) for number, line in enumerate(lines))
        yield f'<path class="arrow" d="M{left - 2 * _GAP},{top + height / 2:g} H{left - 2}"/>'


def _box(left: float, top: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="5"/>'


def _text(middle: float, base: float, words: str, kind: str = "") -> str:
    styled = f' class="{kind}"' if kind else ""
    return f'<text{styled} x="{middle:g}" y="{base:g}">{escape(words)}</text>'
