"""The URL of the PostgreSQL store: its hosts, what its sessions are set to, and what is said of a URL that is wrong."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.stores.postgres.address import Address, _each_host, _where, place_of
from oraculo.testing.store_runs import assert_stored, create, make_run
from tests.servers.fleet import Fleet
from tests.servers.names import NAME, give_addresses, silent_address
from tests.servers.process import free_port
from tests.servers.proxy import Proxy
from tests.stores import postgres_stage as stage
from tests.stores.postgres_stage import ask, opened, with_option

CURRENT_LIMIT = "SELECT current_setting('transaction_timeout', true)"

url = stage.url  # a fixture


# -- several hosts --------------------------------------------------------------------------------------------------


def with_host_before(url: str, host: str) -> str:
    return with_option(url.replace("@", f"@{host},", 1), target_session_attrs="read-write", sslmode="disable")


def fall_silent(proxy: Proxy) -> None:
    proxy.swallows = True


def close_at_once(proxy: Proxy) -> None:
    proxy.refuses = True
    proxy.cut()


@pytest.mark.parametrize("fail", [fall_silent, close_at_once])
async def test_a_host_in_trouble_is_passed_by(url: str, fail: Callable[[Proxy], None]) -> None:
    with Proxy(url) as first:
        both = with_host_before(url, f"127.0.0.1:{first.port}")
        async with opened(both, connect_timeout=2.0) as store:
            await create(store, run := make_run("a"))
            fail(first)
            await assert_stored(store, run)  # on a connection of its own, which is first needed now
            assert f":{first.port}" not in store._address._hosts[0]  # where the other lanes begin


@asynccontextmanager
async def taking_no_writes(url: str) -> AsyncIterator[None]:
    await ask(url, "ALTER DATABASE postgres SET default_transaction_read_only = on")
    try:
        yield
    finally:
        reset = "ALTER DATABASE postgres RESET default_transaction_read_only"
        await ask(with_option(url, default_transaction_read_only="off"), reset)


async def test_a_server_that_takes_no_writes_is_passed_by(fleet: Fleet, url: str) -> None:
    standby = fleet.breakable("postgres")
    async with taking_no_writes(standby.url):
        async with opened(with_host_before(url, f"127.0.0.1:{standby.port}")) as store:
            await create(store, run := make_run("a"))
            await assert_stored(store, run)
        with pytest.raises(StoreUnavailable, match=f":{standby.port}/postgres is not what target_session_attrs asks"):
            await stage.start_once(with_option(standby.url, target_session_attrs="read-write"))


async def test_a_primary_that_comes_back_is_used_again_though_a_standby_let_us_in_meanwhile(
    fleet: Fleet, url: str
) -> None:
    """Without `target_session_attrs` a standby is as good as any, until it is to write."""
    standby, (server, _, path) = fleet.breakable("postgres"), url.partition("/postgres?")
    await ask(standby.url, f"CREATE SCHEMA {path.rpartition('=')[2]}")
    async with opened(f"{standby.url}?{path}"):
        pass  # now it has the tables
    login = server.rpartition("@")[0]
    with Proxy(url) as primary:
        both = f"{login}@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres?{path}&sslmode=disable"
        async with opened(both) as store, taking_no_writes(standby.url):
            primary.refuses = True
            primary.cut()
            with suppress(StoreUnavailable):  # it may learn only now that its connection is gone
                await store.check()
            with pytest.raises(StoreRefuses, match="read-only"):
                await create(store, make_run("a"))
            primary.refuses = False
            await create(store, run := make_run("a"))
            await assert_stored(store, run)


async def test_the_time_that_quick_refusals_leave_is_a_far_hosts(url: str) -> None:
    closed = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    async with opened(url):
        pass  # to make the tables from far away would take long
    with Proxy(url) as far:
        far.delay = 0.1
        all_three = url.replace(url.partition("@")[2].partition("/")[0], f"127.0.0.1:{far.port},{closed}")
        async with opened(with_option(all_three, sslmode="disable"), connect_timeout=2.4) as store:
            await create(store, run := make_run("a"))
            await assert_stored(store, run)


async def test_of_a_names_addresses_one_that_says_nothing_is_passed_by(
    url: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, named = fleet.server("postgres").port, url.replace("127.0.0.1", NAME)
    with silent_address("127.0.0.2", port) as silent:
        give_addresses(monkeypatch, silent, ("127.0.0.1", port))
        address = Address(named, connect_timeout=0.5, call_timeout=5.0)
        with pytest.raises(StoreUnavailable, match=f"{NAME}:{port}/postgres: no answer in time"):
            await address.connect("SELECT 1")
        connection = await address.connect("SELECT 1")  # by the other address, since the name led nowhere
        await connection.close()
        assert await _where(with_option(named, sslmode="verify-full"), 1) == {}  # it is in the certificate


async def test_after_a_refusal_it_goes_by_the_name_again(
    url: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next of its addresses was tried with it, and what stands in ~/.pgpass is found by the name alone."""
    port, closed = fleet.server("postgres").port, free_port()
    give_addresses(monkeypatch, ("127.0.0.1", closed), ("127.0.0.2", closed))
    address = Address(url.replace("127.0.0.1", NAME), connect_timeout=5.0, call_timeout=5.0)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"Multiple exceptions|127\.0\.0\.1.*127\.0\.0\.2"):
            await address.connect("SELECT 1")
    give_addresses(monkeypatch, ("127.0.0.2", closed), ("127.0.0.1", port))
    connection = await address.connect("SELECT 1")
    await connection.close()


async def test_when_no_host_will_do_the_trouble_of_each_is_told(fleet: Fleet) -> None:
    closed, right = free_port(), fleet.server("postgres")
    with pytest.raises(StoreUnavailable) as trouble:
        await stage.start_once(with_host_before(right.url, f"127.0.0.1:{closed}").replace("segredo", "errado"))
    refused, unknown = str(trouble.value).split("; ")
    assert refused.startswith(f"PostgreSQL at 127.0.0.1:{closed}/postgres: ")
    assert unknown.startswith(f"PostgreSQL at 127.0.0.1:{right.port}/postgres: password authentication failed")


@pytest.mark.parametrize(
    ("url", "each"),
    [
        ("postgresql://u:p@a:1,[::1]:2,c/d?x=1", ["u:p@a:1/d?x=1", "u:p@[::1]:2/d?x=1", "u:p@c/d?x=1"]),
        ("postgresql://u:p@/d?host=a,/b&port=1,2", ["u:p@/d?host=a&port=1", "u:p@/d?host=%2Fb&port=2"]),
        ("postgresql:///d?host=a:1,b", ["/d?host=a%3A1&port=", "/d?host=b&port="]),
        ("postgresql:///d?host=a,b&port=1", ["/d?host=a&port=1", "/d?host=b&port=1"]),
        ("postgresql://u@/d?host=/run", ["u@/d?host=/run"]),
        ("postgresql:///d", ["/d"]),
    ],
)
def test_the_hosts_of_a_url(url: str, each: list[str]) -> None:
    assert _each_host(url) == [f"postgresql://{rest}" for rest in each]


async def test_hosts_and_ports_may_stand_in_the_query(fleet: Fleet, url: str) -> None:
    port, query = fleet.server("postgres").port, url.partition("?")[2]
    server = f"postgresql://oraculo:segredo@/postgres?host=127.0.0.1,127.0.0.1&port={free_port()},{port}"
    async with opened(f"{server}&{query}") as store:
        await create(store, run := make_run("a"))
        await assert_stored(store, run)


# -- the session ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "used"), [("off", "on"), ("local", "local"), ("remote_write", "remote_write"), ("on", "on")]
)
async def test_what_is_confirmed_is_on_the_disk_whatever_the_role_is_set_to(url: str, given: str, used: str) -> None:
    async with opened(with_option(url, synchronous_commit=given)) as store:
        assert await store._writer.run(lambda connection: connection.fetchval("SHOW synchronous_commit")) == used


async def test_a_limit_on_whole_transactions_ends_no_commit(url: str) -> None:
    """`statement_timeout` is ours to set, and so is what a commit of many statements may take."""
    async with opened(url) as store:
        known = await store._writer.run(lambda connection: connection.fetchval(CURRENT_LIMIT))
    if known is None:
        pytest.skip("PostgreSQL before 17 has no such limit")
    async with opened(with_option(url, transaction_timeout="50ms")) as store:
        assert await store._writer.run(lambda connection: connection.fetchval(CURRENT_LIMIT)) == "0"


# -- in words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://u:pw@a:1,b:2/d?sslmode=require", "a:1,b:2/d"),
        ("postgresql:///d?user=u@x&password=pw", "localhost/d"),
        ("postgresql://u:pw@/d?host=/run&port=1", "/run:1/d"),
        ("postgresql://%2Frun:1/d", "/run:1/d"),
        ("postgresql://u:pw?pw@host/d", "***"),
        ("postgresql://u:pw#pw@host/d", "***"),
        ("postgresql://u:12/pw@host/d", "***"),
        ("postgresql://u:12?pw=pw@host/d", "***"),
        ("postgresql://[::1/d", "[::1/d"),
    ],
)
def test_a_place_tells_nothing_of_a_password(url: str, place: str) -> None:
    assert place_of(url) == place


@pytest.mark.parametrize(
    "url", ["postgresql://u:12?pw&pw=pw@h/d", "postgresql://u:pw#x@h/d", "postgresql://u:p@h:1:pw@h/d"]
)
async def test_a_url_that_cannot_be_read_is_not_quoted(url: str) -> None:
    with pytest.raises(StoreError, match=r"\*\*\* cannot be read; .* must be percent-encoded") as refusal:
        await stage.start_once(url)
    assert "pw" not in str(refusal.value)


async def test_a_file_that_is_missing_is_named(fleet: Fleet, tmp_path: Path) -> None:
    server, gone = fleet.server("postgres").url, tmp_path / "gone"
    wrong = {
        with_option(server, sslmode="verify-full", sslrootcert=str(gone)): f"No such file or directory: {gone}",
        f"postgresql:///d?host={tmp_path}&port=1": f"No such file or directory: {tmp_path}/.s.PGSQL.1",
        f"postgresql://{str(tmp_path).replace('/', '%2F')}/d": f"No such file or directory: {tmp_path}/.s.PGSQL.5432",
    }
    for url, reason in wrong.items():
        with pytest.raises(StoreUnavailable) as trouble:
            await stage.start_once(url)
        assert str(trouble.value).endswith(reason)


async def test_the_version_is_told_as_the_server_does(url: str) -> None:
    [(version,)] = await ask(url, "SHOW server_version")
    async with opened(url) as store:
        assert await store.check() == f"PostgreSQL {version}"
