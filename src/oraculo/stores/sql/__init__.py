"""The SQL of the stores, in one folder for each dialect: `queries.sql` and numbered `migrations/`."""

import re
from importlib import resources
from importlib.resources.abc import Traversable

from oraculo.errors import StoreError
from oraculo.stores.migrations import Migration
from oraculo.stores.records import ENTRY, HEAD, TASK

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)
_COLUMNS = re.compile(r"/\* (\w+\.)?(head|task|entry) \*/")
_RECORDS = {"head": HEAD, "task": TASK, "entry": ENTRY}
_MIGRATION = re.compile(r"(\d{4})_(\w+)\.sql")


def named_queries(dialect: str) -> dict[str, str]:
    """Return the statements of the dialect's `queries.sql` by the name in the `-- name:` line above each."""
    return parse_queries(_folder(dialect).joinpath("queries.sql").read_text("utf-8"))


def parse_queries(text: str) -> dict[str, str]:
    # The text before the first name is a comment for the reader.
    _, *parts = _NAME.split(text)
    names = parts[::2]
    if len(set(names)) != len(names):
        raise StoreError("two queries in queries.sql have one name")
    return {name: _without_comments(body) for name, body in zip(names, parts[1::2], strict=True)}


def _without_comments(body: str) -> str:
    lines = (line for line in body.splitlines() if not line.lstrip().startswith("--"))
    return _COLUMNS.sub(_columns, "\n".join(lines)).strip().removesuffix(";")


def _columns(place: re.Match[str]) -> str:
    """Return the columns of a record, each after the table's name if one is given: `/* run.head */`."""
    return ", ".join(f"{place[1] or ''}{column}" for column in _RECORDS[place[2]])


def migrations(dialect: str) -> list[Migration[str]]:
    """Return the migrations in order, from number 1 and without a gap."""
    found = sorted(filter(None, map(_migration, _folder(dialect).joinpath("migrations").iterdir())))
    if [migration.number for migration in found] != list(range(1, len(found) + 1)):
        raise StoreError(f"the migrations of {dialect} are not numbered 1, 2, 3 and so on")
    return found


def _migration(file: Traversable) -> Migration[str] | None:
    match = _MIGRATION.fullmatch(file.name)
    return Migration(int(match[1]), match[2], file.read_text("utf-8")) if match else None


def _folder(dialect: str) -> Traversable:
    return resources.files(__name__).joinpath(dialect)
