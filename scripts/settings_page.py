"""The page `docs/reference/settings.md`: each field of `settings/sections.py`, with the comment beside it."""

import inspect
import io
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec

from oraculo.settings import BUILT_IN_ROUTES, Settings
from oraculo.settings.loading import _VARIABLES, ROUTES, Place

_INTRODUCTION = """\
# Settings

<!-- Made by scripts/generate_docs.py from src/oraculo/settings/sections.py: change that, then run `make docs`. -->

ORÁCULO reads `oraculo.toml` in the working directory, and the environment over it. `ORACULO_CONFIG` names another file.
`ORACULO_BROKER_URL` in the environment is `url` under `[broker]` in the file. A list in the environment is text with
commas, and an empty variable counts as not set. A command reports all wrong values at once when it starts.

```toml
[broker]
url = "amqp://guest:guest@localhost"

[store]
url = "postgresql://oraculo:senha@db/oraculo"
```
"""

_ROUTES = """\
## `[rotas]`

Routes stand in the file only. A request names one as its `tipo`. One is built in:
"""

_COMMAND_LINE = """\
## Command line

| variable | meaning |
|---|---|
| `ORACULO_CONFIG` | file to read instead of `oraculo.toml` |
| `ORACULO_URL` | server that the commands ask; default `http://127.0.0.1:8000`, whatever `[api]` says |
| `ORACULO_API_KEY` | key that they send |
"""


def settings_page() -> str:
    sections = {field.name: field.type for field in msgspec.structs.fields(Settings) if isinstance(field.type, type)}
    parts = [_INTRODUCTION]
    for name, section in sections.items():
        parts += [f"## `[{name}]`\n", *_table(name, section)]
    parts += ["## Outside any section\n", *_table("", Settings)]
    return "\n".join([*parts, _ROUTES, *_built_in_routes(), _COMMAND_LINE])


def _table(section: str, kind: type[msgspec.Struct]) -> Iterator[str]:
    comments = _comments(kind)
    yield "| variable | default | meaning | takes |"
    yield "|---|---|---|---|"
    for field in msgspec.structs.fields(kind):
        if not isinstance(field.type, type) and field.name != ROUTES:
            variables = " or ".join(f"`{name}`" for name, at in _VARIABLES.items() if at == Place(section, field.name))
            takes = get_args(field.type)[1].description
            yield f"| {variables} | {_shown(field.default)} | {comments[field.name]} | {takes} |"
    yield ""


def _comments(kind: type) -> Mapping[str, str]:
    """Return the comment behind each field. A field without one breaks the page: a name alone says little."""
    fields: dict[int, str] = {}
    comments: dict[str, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(kind)).readline):
        line = token.start[0]
        if token.type == tokenize.NAME:
            fields.setdefault(line, token.string)
        elif token.type == tokenize.COMMENT and line in fields:
            comments[fields[line]] = token.string.removeprefix("# ")
    return comments


def _shown(default: Any) -> str:
    if default in ("", ()):
        return ""
    text = default if isinstance(default, str) else msgspec.json.encode(default).decode().removesuffix(".0")
    return f"`{text}`"


def _built_in_routes() -> Iterator[str]:
    yield "```toml"
    yield f"[{ROUTES}]"
    for name, queues in BUILT_IN_ROUTES.items():
        listed = ", ".join(f'"{queue}"' for queue in queues)
        yield f"{name} = [{listed}]"
    yield "```\n"
