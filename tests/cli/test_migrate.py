"""`oraculo migrate`, and the start that asks for it."""

import asyncio
import json
import sqlite3
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from typer.testing import CliRunner

from oraculo.cli.app import app
from oraculo.stores.migrations import Migration
from oraculo.stores.sql import migrations
from oraculo.stores.sqlite import connections
from tests.servers.fleet import Fleet
from tests.stores.postgres_stage import opened, with_schema, with_user


def invoke(*args: str, **settings: str) -> Any:
    return CliRunner().invoke(app, list(args), env=settings)


def test_a_new_file_and_then_nothing_more_to_do(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'oraculo.db'}"
    first = invoke("migrate", ORACULO_STORE_URL=url)
    labels = [migration.label for migration in migrations("sqlite")]
    assert (first.exit_code, first.stdout.splitlines()) == (
        0,
        [*(f"sqlite: {label}" for label in labels), "sqlite: the schema is up to date"],
    )
    again = invoke("migrate", "--json", ORACULO_STORE_URL=url)
    assert json.loads(again.stdout) == {"store": "sqlite", "migracoes": []}


@pytest.fixture
def older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of today, for a program that knows one migration more."""
    path, known = tmp_path / "oraculo.db", migrations("sqlite")
    assert invoke("migrate", ORACULO_STORE_URL=f"sqlite:///{path}").exit_code == 0
    later = Migration(len(known) + 1, "later", "CREATE TABLE later (x);\n")
    monkeypatch.setattr(connections, "migrations", lambda _dialect: [*known, later])
    return path


def test_an_older_file_is_read_after_it(older_file: Path) -> None:
    done = json.loads(invoke("migrate", "--json", ORACULO_STORE_URL=f"sqlite:///{older_file}").stdout)
    assert done["migracoes"] == ["0002 later"]


def test_an_older_file_is_not_changed_by_looking_at_it(older_file: Path) -> None:
    result = invoke("doctor", "--json", ORACULO_STORE_URL=f"sqlite:///{older_file}")
    store = next(check for check in json.loads(result.stdout)["verificacoes"] if check["nome"] == "store")
    assert store["estado"] == "aviso"
    assert "made by an older ORÁCULO" in store["detalhe"]
    with closing(sqlite3.connect(older_file)) as connection:
        assert connection.execute("PRAGMA user_version").fetchall() == [(1,)]


_KEEP_OPEN = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("SELECT * FROM runs").fetchall()
print("open", flush=True)
sys.stdin.read()
"""


def test_an_older_file_is_left_alone_for_as_long_as_a_process_has_it_open(
    older_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BUSY_SECONDS", 0.05)
    with subprocess.Popen(
        [sys.executable, "-c", _KEEP_OPEN, str(older_file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        refused = invoke("migrate", ORACULO_STORE_URL=f"sqlite:///{older_file}")
        holder.kill()
    (line,) = refused.stderr.splitlines()
    assert (refused.exit_code, line.count("stop all others first")) == (2, 1)
    assert invoke("migrate", ORACULO_STORE_URL=f"sqlite:///{older_file}").exit_code == 0


def test_a_server_that_cannot_be_reached_is_one_line() -> None:
    result = invoke("migrate", ORACULO_STORE_URL="postgresql://user:segredo@127.0.0.1:9/x")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "127.0.0.1:9" in line
    assert "segredo" not in line


@pytest.fixture
def older_schema(fleet: Fleet) -> str:
    """A PostgreSQL schema as the version before left it."""
    url, schema = fleet.url("postgres"), f"test_{uuid.uuid4().hex[:10]}"

    async def age() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(f"CREATE SCHEMA {schema}")
        await connection.close()

    asyncio.run(age())
    place = f"{url}?search_path={schema}"
    assert invoke("migrate", ORACULO_STORE_URL=place).exit_code == 0

    async def forget_the_last() -> None:
        connection = await asyncpg.connect(url)
        last = len(migrations("postgres"))
        await connection.execute(f"DELETE FROM {schema}.oraculo_migrations WHERE number = {last}")
        await connection.close()

    asyncio.run(forget_the_last())
    return place


def test_a_user_who_may_only_read_the_schema_learns_that_there_is_nothing_to_do(fleet: Fleet) -> None:
    server = fleet.server("postgres").url

    async def lay_out() -> str:
        place = await with_schema(fleet.url("postgres"))
        async with opened(place):
            return await with_user(server, place, "SELECT ON {schema}.oraculo_migrations")

    result = invoke("migrate", ORACULO_STORE_URL=asyncio.run(lay_out()))
    assert (result.exit_code, result.stdout) == (0, "postgresql: the schema is up to date\n")


def test_a_start_on_an_older_schema_says_what_to_run(older_schema: str) -> None:
    result = invoke("serve", "--port", "0", ORACULO_STORE_URL=older_schema)
    assert result.exit_code == 2
    assert "run `oraculo migrate`" in result.stderr.splitlines()[-1]
