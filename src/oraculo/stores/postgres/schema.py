"""The schema: checked when the store is opened, and migrated by `oraculo migrate`."""

from collections.abc import Sequence

from oraculo.errors import StoreError
from oraculo.stores.migrations import Migration
from oraculo.stores.postgres.address import Connection
from oraculo.stores.postgres.connections import QUERIES
from oraculo.stores.sql import migrations


async def has_tables(connection: Connection, place: str) -> bool:
    """Return True when the tables exist. Raises StoreError, which says what to do, when another version made them."""
    if not await connection.fetchval(QUERIES["has_schema"]):
        return False
    version, known = await connection.fetchval(QUERIES["schema"]), len(migrations("postgres"))
    _refuse_newer(version, known, place)
    if version < known:
        raise StoreError(
            f"the schema of PostgreSQL at {place} is {version}, and this program needs {known}: run `oraculo migrate`"
        )
    return True


def statements_of_an_empty_database() -> int:
    """Return how many calls `migrate` makes on an empty database, for its time limit."""
    around = 10  # BEGIN, no limit, the lock, the schema thrice, the migrations, the version, COMMIT, and one to spare
    return around + 2 * len(migrations("postgres"))


async def migrate(connection: Connection, place: str) -> list[str]:
    """Migrate in one transaction, and return the steps that were done."""
    known = migrations("postgres")
    async with connection.transaction():
        await connection.execute(QUERIES["without_time_limit"])
        await connection.execute(QUERIES["lock_schema"])
        if not await connection.fetchval(QUERIES["stay_in_schema"]):
            await _require_schema(connection, place)
            await connection.execute(QUERIES["make_migrations"])  # IF NOT EXISTS needs the right to create, too
        version = await connection.fetchval(QUERIES["schema"])
        _refuse_newer(version, len(known), place)
        await _apply(connection, known[version:])
    return [migration.label for migration in known[version:]]


async def try_to_migrate(connection: Connection, place: str) -> None:
    """Migrate and roll back."""
    trial = connection.transaction()
    await trial.start()
    try:
        await migrate(connection, place)
    finally:
        await trial.rollback()


async def require_rights(connection: Connection, place: str) -> None:
    missing = await connection.fetch(QUERIES["missing_rights"])
    if missing:
        needed = "; ".join(f"{rights} on {table}" for table, rights in missing)
        raise StoreError(f"PostgreSQL at {place} does not give this user {needed}: GRANT that")


async def _require_schema(connection: Connection, place: str) -> None:
    """Raise StoreError unless there is a schema for the tables, and none of them is hidden in another."""
    schemas = await connection.fetch(QUERIES["schemas_in_path"])
    has_room = await connection.fetchval("SELECT current_schema()") is not None
    closed = [name for name, is_there, *_ in schemas if is_there and not has_room]
    hidden = [name for name, _, may_use, has_ours in schemas if has_ours and not may_use]
    if hidden or closed:
        name = (hidden or closed)[0]
        raise StoreError(f"PostgreSQL at {place} does not let this user use the schema {name}: GRANT USAGE on it")
    if not has_room:
        names = ", ".join(name for name, *_ in schemas)
        raise StoreError(
            f"PostgreSQL at {place} has no schema of its search_path ({names}): CREATE SCHEMA, or name one that is "
            "there, as ?search_path=public"
        )


async def _apply(connection: Connection, missing: Sequence[Migration[str]]) -> None:
    for migration in missing:
        await connection.execute(migration.step)
        await connection.execute(QUERIES["note_migration"], migration.number, migration.name)


def _refuse_newer(version: int, known: int, place: str) -> None:
    if version > known:
        raise StoreError(
            f"PostgreSQL at {place} was written by a newer ORÁCULO (its schema is {version}, this program knows "
            f"{known}): run that version, or give ORACULO_STORE_URL another database"
        )
