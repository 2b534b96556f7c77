"""The page `docs/reference/cli.md`: every command with its arguments and options, as its `--help` has them."""

import re
from collections.abc import Iterator
from typing import Any

import typer

from oraculo.cli.app import app

_SHARED = {
    "--url": "The server's address.  [env var: ORACULO_URL; default: http://127.0.0.1:8000]",
    "--api-key": "The API key that each request carries.  [env var: ORACULO_API_KEY]",
    "--json": "Print JSON and nothing else.",
    "--help": "Show the command's help. `-h` does the same.",
}
_INTRODUCTION = """\
# Command line

<!-- Made by scripts/generate_docs.py from src/oraculo/cli: change that, then run `make docs`. -->

`oraculo COMMAND --help` shows the same. `python -m oraculo` does what `oraculo` does.

```console
$ oraculo submit --pipeline viral-copy-only --payload '{}' --wait 30
$ oraculo runs explain 3f9a
$ oraculo dlq redrive executador_relatorio
```

## What all commands share

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | the run did not succeed, or not in time; `doctor`, `simulate` or `check-worker` found a fault |
| 2 | bad usage or settings; a server does not answer or refuses |
| 130 | Ctrl-C ended the command |

| option | meaning |
|---|---|
SHARED

A command below lists an option of this table by its name alone. You may shorten the id of a run or of a dead letter to
its unique beginning. Times are local on a terminal and UTC in JSON.

`oraculo --install-completion` installs completion for your shell, and `oraculo --version` prints the version.
"""
_KINDS = {
    "str": "TEXT",
    "int": "N",
    "int range": "N",
    "float": "NUMBER",
    "float range": "NUMBER",
    "path": "FILE",
    "list[str]": "TEXT",
}


def cli_page() -> str:
    command: Any = typer.main.get_command(app)
    root = typer.Context(command, info_name="oraculo")
    rows = [f"| `{name}` | {_cell(said)} |" for name, said in _SHARED.items()]
    parts = [_INTRODUCTION.replace("SHARED", "\n".join(rows))]
    for name, child in command.commands.items():
        parts += _command(child, typer.Context(child, info_name=name, parent=root), 2)
    return "\n".join(parts)


def _command(command: Any, context: typer.Context, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{context.command_path}`\n"
    children = getattr(command, "commands", None)
    if children is None:
        yield f"{_prose(command.help)}\n"
        yield from _usage(command, context)
        yield from _options(command, context)
    for name, child in (children or {}).items():
        yield from _command(child, typer.Context(child, info_name=name, parent=context), level + 1)


def _usage(command: Any, context: typer.Context) -> Iterator[str]:
    pieces = [piece.strip("{}") for piece in command.collect_usage_pieces(context)[1:]]
    if pieces:
        yield f"```text\n{' '.join([context.command_path, *map(_usage_piece, pieces)])} [OPTIONS]\n```\n"


def _usage_piece(piece: str) -> str:
    """Write `[[ID]...]...` as `[ID]...`, `{FILE...}...` as `FILE...` and `file` as `FILE`."""
    name = piece.strip("{}[].").upper()
    return f"{f'[{name}]' if '[' in piece else name}{'...' if '...' in piece else ''}"


def _options(command: Any, context: typer.Context) -> Iterator[str]:
    shared, rows = [], []
    for parameter in command.get_params(context):
        names, said = parameter.get_help_record(context)
        option = names.split()[0]
        if option in _SHARED and option != "--help" and "only" not in said and "none unless" not in said:
            shared.append(f"`{option}`")
        elif option != "--help":
            rows.append(f"| `{_named(names)}` | {_cell(said)} |")
    if rows:
        yield "| argument or option | meaning |\n|---|---|"
        yield from rows
        yield ""
    if shared:
        yield f"Also: {', '.join(shared)}.\n"


def _named(names: str) -> str:
    """Write `--wait <float range>` as `--wait NUMBER`, and the argument `ID <str>` as `ID`."""
    if not names.startswith("-"):
        name = names.partition(" ")[0]
        return name.upper() if name.islower() else name
    return re.sub(r"<(.*)>", lambda found: _KINDS.get(found[1], found[1]), names).replace("|", "\\|")


def _cell(said: str) -> str:
    """Write the `[env var: X; default: 1; 0<=x<=9]` behind a help text as words."""
    text, _, extra = said.partition("  [")
    parts = [_extra(part) for part in extra.rstrip("]").split("; ") if part]
    bounds = f" ({', '.join(parts)})" if parts else ""
    return f"{_prose(text)}{bounds}".replace("|", "\\|")


def _extra(part: str) -> str:
    kind, mark, value = part.partition(": ")
    if mark:
        return f"{'variable' if kind == 'env var' else kind} `{value}`"
    return part.replace("<=x<=", " to ").replace("x>=", "at least ")


def _prose(text: str) -> str:
    """Put options and queue names in code, as Markdown."""
    return re.sub(r"(?<![`\w-])(--[a-z][a-z-]*)", r"`\1`", text)
