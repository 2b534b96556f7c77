"""What the tests of the PostgreSQL store share.

pytest looks for fixtures in the module of a test, so each of those names the ones it uses: `url = stage.url`.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import asyncpg
import pytest

from oraculo.stores.postgres import PostgresStore
from tests.servers.fleet import Fleet
from tests.stores.started import started


async def ask(url: str, sql: str, *parameters: object) -> list[asyncpg.Record]:
    async with connected(url) as connection:
        return await connection.fetch(sql, *parameters)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        connection.terminate()


async def somebody_waits(url: str) -> bool:
    """For a lock."""
    return bool(await ask(url, "SELECT 1 FROM pg_locks WHERE NOT granted"))


async def with_schema(url: str) -> str:
    """The URL of an empty schema in the server's database."""
    name = f"test_{os.urandom(6).hex()}"
    await ask(url, f"CREATE SCHEMA {name}")
    return with_option(url, search_path=name)


async def with_user(server: str, url: str, *rights: str) -> str:
    """The URL for a new user, who may use the schema and has these rights in it."""
    user, schema = f"user_{os.urandom(4).hex()}", url.partition("search_path=")[2]
    await ask(server, f"CREATE ROLE {user} LOGIN PASSWORD 'segredo'")
    for right in ("USAGE ON SCHEMA {schema}", *rights):
        await ask(server, f"GRANT {right} TO {user}".replace("{schema}", schema))
    return url.replace("oraculo:", f"{user}:")


def with_option(url: str, **options: str) -> str:
    words = "&".join(f"{name}={value}" for name, value in options.items())
    return f"{url}{'&' if '?' in url else '?'}{words}"


@pytest.fixture
async def url(fleet: Fleet) -> str:
    return await with_schema(fleet.url("postgres"))


async def start_once(url: str, **options: float) -> None:
    """Start a store, and close it whether it started or not."""
    async with opened(url, **options):
        pass


def opened(url: str, **options: float) -> AbstractAsyncContextManager[PostgresStore]:
    return started(PostgresStore(url, **options))
