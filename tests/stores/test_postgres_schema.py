"""The tables of the PostgreSQL store: made, migrated, refused, looked at."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from oraculo.core.events import Answered, Progressed, Sent
from oraculo.errors import StoreError, StoreUnavailable
from oraculo.stores.postgres import PostgresStore, address, schema
from oraculo.stores.postgres.connections import QUERIES
from oraculo.stores.sql import migrations
from oraculo.testing.store_runs import (
    NOW,
    OK,
    UNWRITABLE,
    assert_stored,
    change,
    changed,
    create,
    creation,
    load,
    make_run,
    revived,
)
from tests.servers.fleet import Fleet
from tests.stores import postgres_stage as stage
from tests.stores.postgres_stage import ask, opened, with_user

url = stage.url  # a fixture


LABELS = [migration.label for migration in migrations("postgres")]


# -- the schema -----------------------------------------------------------------------------------------------------


async def test_an_empty_database_gets_its_schema_though_several_start_at_once(url: str) -> None:
    stores = [PostgresStore(url) for _ in range(8)]
    await asyncio.gather(*(store.start() for store in stores))
    for store in stores:
        await store.close()
    rows = await ask(url, "SELECT number FROM oraculo_migrations ORDER BY number")
    assert [number for (number,) in rows] == list(range(1, len(LABELS) + 1))


async def test_migrating_needs_no_start_and_is_done_once(url: str) -> None:
    stores = [PostgresStore(url) for _ in range(5)]
    done = await asyncio.gather(*(store.migrate() for store in stores))
    assert sorted(map(list, done)) == [[], [], [], [], LABELS]
    await create(stores[0], make_run("a"))
    assert await stores[0].migrate() == []
    for store in stores:
        await store.close()


async def test_an_older_schema_is_refused_until_it_is_migrated(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations("postgres")
    next_one = known[0]._replace(
        number=len(known) + 1, name="colour", step="ALTER TABLE oraculo_runs ADD COLUMN colour text"
    )
    async with opened(url) as old:
        await create(old, before := make_run("before"))
        monkeypatch.setattr(schema, "migrations", lambda dialect: [*known, next_one])
        new = PostgresStore(url)
        with pytest.raises(
            StoreError,
            match=rf"schema .* is {len(known)}, and this program needs {len(known) + 1}: run `oraculo migrate`",
        ) as refusal:
            await new.start()
        assert not isinstance(refusal.value, StoreUnavailable)
        assert await new.migrate() == [f"{len(known) + 1:04} colour"]
        await assert_stored(new, before)
        # The one that was running before the migration goes on.
        await change(old, changed(before, Sent(0, 1)))
        await create(old, make_run("after"))
        assert (await load(new, "before")).head == before.head
        await new.close()


async def test_a_newer_schema_is_refused_with_what_to_do(url: str) -> None:
    async with opened(url):
        pass
    await ask(url, "INSERT INTO oraculo_migrations (number, name) VALUES (99, 'tomorrow')")
    store = PostgresStore(url)
    for open_it in (store.start, store.migrate):
        with pytest.raises(StoreError, match=r"newer ORÁCULO \(its schema is 99.*run that version") as refusal:
            await open_it()
        assert not isinstance(refusal.value, StoreUnavailable)
    await store.close()


async def test_a_migration_is_applied_whole_or_not_at_all(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations("postgres")
    bad = known[0]._replace(
        number=len(known) + 1, step="CREATE TABLE oraculo_half (x int); INSERT INTO nowhere VALUES (1);"
    )
    monkeypatch.setattr(schema, "migrations", lambda dialect: [*known, bad])
    with pytest.raises(StoreError, match="nowhere"):
        await stage.start_once(url)
    assert await ask(url, "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace") == []


async def test_tables_are_migrated_where_they_are_though_another_schema_comes_before(
    fleet: Fleet, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is named like the user does: PostgreSQL's own path is `"$user", public`."""
    async with opened(url) as store:
        await create(store, run := make_run("a"))
    later, ours = (await stage.with_schema(fleet.url("postgres"))).partition("=")[2], url.partition("=")[2]
    known = migrations("postgres")
    next_one = known[0]._replace(number=len(known) + 1, step="CREATE TABLE oraculo_colours (colour text)")
    monkeypatch.setattr(schema, "migrations", lambda dialect: [*known, next_one])
    store = PostgresStore(url.replace(ours, f"{later},{ours}"))
    assert len(await store.migrate()) == 1
    await assert_stored(store, run)
    await store.close()
    assert await ask(url, "SELECT 1 FROM pg_class WHERE relnamespace = $1::regnamespace", later) == []


async def test_a_migration_may_take_longer_than_a_call(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations("postgres")
    slow = known[0]._replace(number=len(known) + 1, step="SELECT pg_sleep(1.2)")
    monkeypatch.setattr(schema, "migrations", lambda dialect: [*known, slow])
    store = PostgresStore(url, call_timeout=1.0)
    assert len(await store.migrate()) == len(known) + 1
    await store.close()


async def test_the_tables_of_an_empty_database_may_take_longer_than_a_call(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrations("postgres")
    slow = known[0]._replace(number=len(known) + 1, step="SELECT pg_sleep(1.2)")
    monkeypatch.setattr(schema, "migrations", lambda dialect: [*known, slow])
    async with opened(url, call_timeout=1.0) as store:
        assert "PostgreSQL" in await store.check()


async def test_a_server_that_is_too_old_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "OLDEST_SERVER", 99)
    with pytest.raises(StoreError, match=r"^PostgreSQL 1\d\.\d+.*; 99 or newer is needed") as refusal:
        await stage.start_once(url)
    assert not isinstance(refusal.value, StoreUnavailable)


async def test_a_database_that_cannot_hold_every_text_is_refused(fleet: Fleet) -> None:
    name = f"latin_{os.urandom(4).hex()}"
    address = fleet.url("postgres")
    await ask(address, f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(StoreError, match=r"LATIN1.*make one with ENCODING 'UTF8'"):
        await stage.start_once(address.replace("/postgres", f"/{name}"))


async def test_queries_use_an_index_and_lists_are_not_sorted(url: str) -> None:
    parameters: dict[str, tuple[object, ...]] = {
        "load": (["a"],),
        "load_heads": (["a"],),
        "next_due": (),
        "unsent": ("a", 1, 10),
        "brokers_in_use": (),
        "commands_with": ("b", "a", 10),
        "dead_letters_with": ("b", "a", 10),
        "history": ("a", 0, 10),
        "in_the_way": (["a"], ["k"]),
        "prunable": (NOW, 10),
    }
    async with opened(url) as store:
        for name, values in parameters.items():
            explain = f"EXPLAIN {QUERIES[name]}"
            plan = await store._reader.run(
                lambda connection, sql=explain, values=values: connection.fetch(sql, *values)
            )
            lines = [line for (line,) in plan]
            assert not [line for line in lines if "Seq Scan" in line], (name, lines)
            if name in ("next_due", "unsent", "commands_with", "history"):
                assert not [line for line in lines if "Sort" in line], (name, lines)


# -- looking --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def looked_at(url: str) -> AsyncIterator[str | None]:
    store = PostgresStore(url)
    try:
        yield await store.look()
    finally:
        await store.close()


async def test_looking_at_an_empty_database_makes_no_tables(url: str) -> None:
    async with looked_at(url) as told:
        assert told is not None
        assert told.startswith("PostgreSQL ")
    assert await ask(url, "SELECT 1 FROM pg_tables WHERE schemaname = current_schema()") == []
    async with opened(url), looked_at(url) as told:
        assert told is None


async def test_looking_tells_that_the_tables_cannot_be_made(fleet: Fleet, url: str) -> None:
    with pytest.raises(StoreError, match="permission denied for schema"):
        async with looked_at(await with_user(fleet.server("postgres").url, url)):
            pass


async def test_looking_names_the_rights_that_are_missing(fleet: Fleet, url: str) -> None:
    server = fleet.server("postgres").url
    async with opened(url):
        pass
    tables = "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema}"
    user = await with_user(server, url, tables, "USAGE ON ALL SEQUENCES IN SCHEMA {schema}")
    async with looked_at(user) as told:
        assert told is None
    reader = await with_user(server, url, "SELECT ON ALL TABLES IN SCHEMA {schema}", "INSERT ON {schema}.oraculo_tasks")
    with pytest.raises(StoreError) as refusal:
        async with looked_at(reader):
            pass
    assert "INSERT, UPDATE, DELETE on oraculo_runs; USAGE on oraculo_runs_n_seq;" in str(refusal.value)
    assert "UPDATE, DELETE on oraculo_tasks: GRANT that" in str(refusal.value)
    assert "oraculo_migrations" not in str(refusal.value)


async def test_migrating_what_is_up_to_date_needs_no_right_to_make_tables(fleet: Fleet, url: str) -> None:
    server = fleet.server("postgres").url
    async with opened(url):
        pass
    user = await with_user(server, url, "SELECT ON {schema}.oraculo_migrations")
    store = PostgresStore(user)
    assert await store.migrate() == []
    await store.close()
    await ask(url, "DELETE FROM oraculo_migrations WHERE number = $1", len(LABELS))
    with pytest.raises(StoreError, match=r"permission denied|must be owner"):
        await store.migrate()
    await store.close()


async def test_looking_and_the_check_find_functions_that_may_not_be_called(fleet: Fleet, url: str) -> None:
    server, schema_name = fleet.server("postgres").url, url.partition("search_path=")[2]
    async with opened(url):
        pass
    await ask(server, f"REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema_name} FROM PUBLIC")
    rights = ("ALL ON ALL TABLES IN SCHEMA {schema}", "USAGE ON ALL SEQUENCES IN SCHEMA {schema}")
    user = await with_user(server, url, *rights)
    told = "EXECUTE on oraculo_prune; EXECUTE on oraculo_write_heads; EXECUTE on oraculo_write_rows: GRANT that"
    with pytest.raises(StoreError, match=told):
        async with looked_at(user):
            pass
    async with opened(user) as store:
        with pytest.raises(StoreUnavailable, match="permission denied for function oraculo_write_"):
            await store.check()


async def test_a_schema_that_is_not_there_is_named(url: str) -> None:
    with pytest.raises(StoreError, match=r"no schema of its search_path \(nowhere, Never\): CREATE SCHEMA") as refusal:
        await stage.start_once(url.partition("search_path=")[0] + 'search_path=nowhere,"Never"')
    assert not isinstance(refusal.value, StoreUnavailable)


async def test_a_schema_that_may_not_be_used_is_named_and_no_tables_are_made_beside_it(fleet: Fleet, url: str) -> None:
    server, schema_name = fleet.server("postgres").url, url.partition("search_path=")[2]
    user = await with_user(server, url)
    name = user.partition("//")[2].partition(":")[0]
    await ask(server, f"REVOKE ALL ON SCHEMA {schema_name} FROM {name}")
    told = f"does not let this user use the schema {schema_name}: GRANT USAGE"
    with pytest.raises(StoreError, match=told):
        await stage.start_once(user)
    async with opened(url):
        pass
    await ask(server, f"CREATE SCHEMA AUTHORIZATION {name}")
    with pytest.raises(StoreError, match=told):
        await stage.start_once(user.replace("search_path=", 'search_path="$user",'))


async def test_a_bad_text_is_refused_and_the_connection_goes_on(url: str) -> None:
    async with opened(url) as store:
        connection = store._writer._connection
        bad = creation(make_run("a"))
        bad.changes.tasks[0].note = UNWRITABLE
        with pytest.raises(StoreError) as refusal:
            await store.commit([bad], [])
        assert not isinstance(refusal.value, StoreUnavailable)
        await create(store, run := make_run("b"))
        await change(store, changed(run, Answered(0, 1, OK)))
        assert store._writer._connection is connection


async def test_a_fault_of_the_database_is_waited_for_and_not_blamed_on_the_run(url: str) -> None:
    """A table that is being restored, a right that was taken away: answers must not end as dead letters."""
    async with opened(url) as store:
        await create(store, run := make_run("a"))
        await ask(url, "ALTER TABLE oraculo_tasks RENAME TO oraculo_tasks_aside")
        with pytest.raises(StoreUnavailable):
            await store.commit([], [changed(run, Progressed(0, 1.0))])
        with pytest.raises(StoreUnavailable):
            await store.load(["a"])
        await ask(url, "ALTER TABLE oraculo_tasks_aside RENAME TO oraculo_tasks")
        run = revived(await load(store, "a"))
        await change(store, changed(run, Progressed(0, 1.0)))
