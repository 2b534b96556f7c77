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

They are read from `oraculo.toml` in the working directory, or from the file that `ORACULO_CONFIG` names, and over it
from the environment. What is `name` under `[section]` in the file is `ORACULO_SECTION_NAME` outside, where a list is
text with commas; a variable that is empty counts as not set. Values that cannot be are told when a command starts, all
of them at once.
"""

_ROUTES = """\
## `[rotas]`

Only in the file: routes, by the name that `tipo` of a request gives. One is built in:
"""

_COMMAND_LINE = """\
## Of the command line

| variable | what |
|---|---|
| `ORACULO_CONFIG` | the file to read in the place of `oraculo.toml` |
| `ORACULO_URL` | where the server is that `submit`, `runs`, `dlq`, `pipelines`, `asyncapi` and `doctor` ask |
| `ORACULO_API_KEY` | the key that they show it |

Unless `ORACULO_URL` is set, they ask `http://127.0.0.1:8000`, whatever `[api]` says.
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
    yield "| variable | in the file | unless set | takes | what |"
    yield "|---|---|---|---|---|"
    for field in msgspec.structs.fields(kind):
        if not isinstance(field.type, type) and field.name != ROUTES:
            variables = " or ".join(f"`{name}`" for name, at in _VARIABLES.items() if at == Place(section, field.name))
            takes = get_args(field.type)[1].description
            yield f"| {variables} | `{field.name}` | {_shown(field.default)} | {takes} | {comments[field.name]} |"
    yield ""


def _comments(kind: type) -> Mapping[str, str]:
    """What stands behind each field on its line. One without a comment breaks the page: a name alone tells little."""
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
