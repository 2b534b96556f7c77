"""The PostgreSQL store and a server, a connection or an address in trouble."""

import asyncio
import os
import signal
from pathlib import Path

import asyncpg
import pytest

from oraculo.core.events import Progressed, Sent
from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.ports.browse import RunQuery
from oraculo.stores.postgres.faults import translated
from oraculo.testing.store_runs import assert_stored, change, changed, create, creation, load, make_run, revived
from tests.servers.certificates import make_certificates
from tests.servers.fleet import Fleet
from tests.servers.process import free_port, freeze
from tests.servers.proxy import Proxy
from tests.stores import postgres_stage as stage
from tests.stores.postgres_stage import ask, connected, opened, somebody_waits, with_option, with_schema, with_user
from tests.waiting import until

url = stage.url  # a fixture


async def cut_connections(url: str) -> None:
    """On the server's side, as an administrator or a fail-over does."""
    [(schema_name,)] = await ask(url, "SELECT current_schema()")
    await ask(
        url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = $1 AND pid <> pg_backend_pid()",
        f"oraculo-{schema_name}",
    )


@pytest.fixture
async def named_url(url: str) -> str:
    """With connections that can be told from those of other tests."""
    [(schema_name,)] = await ask(url, "SELECT current_schema()")
    return with_option(url, application_name=f"oraculo-{schema_name}")


async def test_connections_that_were_cut_while_idle_are_made_again(named_url: str) -> None:
    async with opened(named_url) as store:
        await create(store, run := make_run("a"))
        await store.load(["a"])
        await store.runs(RunQuery())
        connections = [lane._connection for lane in (store._writer, store._reader, store._browser)]
        await cut_connections(named_url)
        await until(lambda: all(c is not None and c.is_closed() for c in connections), saying="the end of all three")
        await change(store, changed(run, Sent(0, 1)))
        await assert_stored(store, run)
        assert (await store.runs(RunQuery())).heads == [run.head]


async def test_a_connection_whose_end_is_half_read_is_made_again(
    named_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(named_url) as store:
        await create(store, run := make_run("a"))
        await store.load(["a"])
        ends, fetch = store._reader._connection, asyncpg.Connection.fetch

        async def fetch_if_well(connection: asyncpg.Connection, *arguments: object) -> object:
            if connection is ends:
                raise asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")
            return await fetch(connection, *arguments)

        monkeypatch.setattr(asyncpg.Connection, "fetch", fetch_if_well)
        assert (await load(store, "a")).head == run.head
        assert store._reader._connection is not ends


async def test_a_connection_that_is_cut_in_the_middle_is_unavailable_once(named_url: str) -> None:
    async with opened(named_url) as store, connected(named_url.split("&")[0]) as other:
        await create(store, run := make_run("a"))
        before = await load(store, "a")
        idle = store._reader._connection
        async with other.transaction():
            await other.execute("SELECT 1 FROM oraculo_runs FOR UPDATE")
            commit = asyncio.ensure_future(store.commit([], [changed(run, Sent(0, 1))]))
            await until(lambda: somebody_waits(named_url), saying="the commit's wait for the run")
            await cut_connections(named_url)
            with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:\d+"):
                await commit
        await until(lambda: idle is not None and idle.is_closed(), saying="the end of the idle one, too")
        assert await load(store, "a") == before
        again = revived(before)
        await change(store, changed(again, Sent(0, 1)))
        await assert_stored(store, again)


async def test_a_server_that_is_killed_and_restarted_loses_nothing_confirmed(fleet: Fleet) -> None:
    server = fleet.breakable("postgres")
    url = await with_schema(server.url)
    async with opened(url, call_timeout=5.0) as store:
        confirmed: dict[str, int] = {}
        troubles: list[StoreUnavailable] = []
        stopping = asyncio.Event()

        async def work(name: str) -> None:
            await create(store, make_run(name))
            confirmed[name] = 1
            while not stopping.is_set():
                try:
                    run = revived(await load(store, name))
                    committed = await store.commit([], [changed(run, Progressed(0, 1.0, str(run.head.version)))])
                    assert not committed.conflicts
                    confirmed[name] = run.head.version
                except StoreUnavailable as trouble:
                    troubles.append(trouble)
                    await asyncio.sleep(0.01)

        workers = [asyncio.ensure_future(work(f"run-{n}")) for n in range(5)]
        for restart in (1, 2):
            await until(lambda least=restart: len(confirmed) == 5 and min(confirmed.values()) > 5 * least)
            await asyncio.to_thread(server.kill)
            seen = len(troubles)
            await until(lambda seen=seen: len(troubles) > seen, saying="a call that says that the server is away")
            await asyncio.to_thread(server.start)
            reached = min(confirmed.values())
            await until(lambda reached=reached: min(confirmed.values()) > reached + 5, saying="work after the restart")
        stopping.set()
        await asyncio.gather(*workers)
        assert all(f"127.0.0.1:{server.port}" in str(trouble) for trouble in troubles)
        for name, version in confirmed.items():
            snapshot = await load(store, name)
            assert snapshot.head.version >= version
            assert len(await store.history(name, limit=100_000)) == snapshot.head.entries


async def test_a_frozen_server_is_unavailable_in_bounded_time(fleet: Fleet) -> None:
    server = fleet.breakable("postgres")
    url = await with_schema(server.url)
    async with opened(url, call_timeout=1.0, connect_timeout=1.0) as store:
        await create(store, run := make_run("a"))
        await store.load(["a"])
        server.freeze()
        try:
            lost = changed(run, Sent(0, 1))
            calls = [store.commit([], [lost]), store.load(["a"]), store.runs(RunQuery()), store.check()]
            results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
            assert [type(result) for result in results] == [StoreUnavailable] * 4
            assert f"127.0.0.1:{server.port}" in str(results[0])
            with pytest.raises(StoreUnavailable):  # and so is a connection that must be made anew
                await asyncio.wait_for(store.load(["a"]), 10)
        finally:
            server.thaw()
        snapshot = await load(store, "a")
        assert snapshot.head.version in (1, 2)  # what was given up may have been written
        await change(store, changed(revived(snapshot), Progressed(0, 5.0)))
        assert "PostgreSQL" in await store.check()


async def test_a_connection_that_is_dead_without_saying_so_is_replaced(fleet: Fleet) -> None:
    url = with_option(await with_schema(fleet.breakable("postgres").url), application_name="dead")
    async with opened(url, call_timeout=1.0) as store:
        await create(store, run := make_run("a"))
        await store.load(["a"])
        found = await ask(url, "SELECT pid FROM pg_stat_activity WHERE application_name = 'dead' AND state = 'idle'")
        try:
            for (pid,) in found:
                freeze(pid)
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await store.load(["a"])
            await assert_stored(store, run)
        finally:
            for (pid,) in found:
                os.kill(pid, signal.SIGCONT)


async def test_a_call_does_not_wait_for_its_turn_for_ever(url: str) -> None:
    async with opened(url, call_timeout=1.0) as store:
        async with store._browser._turn:
            with pytest.raises(StoreUnavailable, match="no answer in time"):
                await asyncio.wait_for(store.runs(RunQuery()), 5)
        assert (await store.runs(RunQuery())).heads == []


async def test_a_client_that_is_frozen_in_a_transaction_keeps_no_locks(url: str) -> None:
    async with opened(url) as store, opened(url, call_timeout=0.3) as frozen:
        await create(store, run := make_run("a"))
        connection = frozen._writer._connection
        assert connection is not None
        await connection.execute("BEGIN; SELECT 1 FROM oraculo_runs FOR UPDATE")  # and then nothing
        await change(store, changed(run, Sent(0, 1)))


async def test_a_statement_that_takes_too_long_is_ended_on_the_server_too(named_url: str) -> None:
    async with opened(named_url, call_timeout=1.0) as store, connected(named_url.split("&")[0]) as other:
        await create(store, run := make_run("a"))
        async with other.transaction():
            await other.execute("SELECT 1 FROM oraculo_runs FOR UPDATE")
            with pytest.raises(StoreUnavailable) as trouble:
                await store.commit([], [changed(run, Sent(0, 1))])
            assert not isinstance(trouble.value, StoreRefuses)  # it may be too much for the time it has

            async def nobody_waits() -> bool:
                return not await somebody_waits(named_url)

            await until(nobody_waits, saying="the end of the statement on the server")


async def test_what_is_wrong_with_the_address_is_said_without_the_password(fleet: Fleet) -> None:
    right = fleet.server("postgres").url
    port = free_port()
    wrong = {
        right.replace("segredo", "errado-123"): "password authentication failed",
        right.replace("127.0.0.1", "no-such-host.invalid"): "no-such-host.invalid",
        f"postgresql://oraculo:errado-123@127.0.0.1:{port}/x": f"127.0.0.1:{port}",
        right.replace("/postgres", "/nowhere"): "nowhere",
        with_option(right, sslmode="require"): "SSL",
    }
    for url, reason in wrong.items():
        with pytest.raises(StoreUnavailable, match=reason) as trouble:
            await stage.start_once(url, connect_timeout=2.0)
        assert "errado" not in str(trouble.value)
        assert "segredo" not in str(trouble.value)


async def test_an_address_that_makes_no_sense_is_refused_for_good(fleet: Fleet) -> None:
    with pytest.raises(StoreError, match="sslmode") as refusal:
        await stage.start_once(with_option(fleet.url("postgres"), sslmode="sometimes"))
    assert not isinstance(refusal.value, StoreUnavailable)


async def test_a_server_without_a_connection_left_is_worth_a_retry(fleet: Fleet) -> None:
    server = fleet.server("postgres")
    name = f"crowd_{os.urandom(4).hex()}"
    await ask(server.url, f"CREATE ROLE {name} LOGIN PASSWORD 'segredo' CONNECTION LIMIT 0")
    with pytest.raises(StoreUnavailable, match="too many connections"):
        await stage.start_once(server.url.replace("oraculo:", f"{name}:"))


async def test_a_server_that_takes_no_writes_is_worth_a_retry(url: str) -> None:
    """As a standby, after a fail-over."""
    async with opened(url) as store:
        await create(store, run := make_run("a"))
    async with opened(with_option(url, default_transaction_read_only="on")) as store:
        await assert_stored(store, run)
        with pytest.raises(StoreRefuses, match="read-only"):
            await store.commit([creation(make_run("b"))], [])
        with pytest.raises(StoreUnavailable, match="read-only"):
            await store.check()


async def test_a_right_that_is_taken_away_is_waited_for(fleet: Fleet, url: str) -> None:
    async with opened(url):
        pass
    rights = ("ALL ON ALL TABLES IN SCHEMA {schema}", "ALL ON ALL SEQUENCES IN SCHEMA {schema}")
    user = await with_user(fleet.server("postgres").url, url, *rights)
    name = user.partition("//")[2].partition(":")[0]
    async with opened(user) as store:
        await ask(url, f"REVOKE INSERT ON oraculo_history FROM {name}")
        for call in (store.commit([creation(make_run("a"))], []), store.check()):
            with pytest.raises(StoreRefuses, match="permission denied for table oraculo_history"):
                await call
        await ask(url, f"GRANT INSERT ON oraculo_history TO {name}")
        await create(store, run := make_run("a"))
        await assert_stored(store, run)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (asyncpg.DataCorruptedError, StoreRefuses),
        (asyncpg.DiskFullError, StoreRefuses),
        (asyncpg.IndexCorruptedError, StoreRefuses),
        (asyncpg.InvalidPasswordError, StoreRefuses),
        (asyncpg.TooManyConnectionsError, StoreRefuses),
        (asyncpg.UndefinedTableError, StoreRefuses),
        (asyncpg.CannotConnectNowError, StoreRefuses),
        (asyncpg.OutOfMemoryError, StoreUnavailable),
        (asyncpg.ConfigurationLimitExceededError, StoreUnavailable),
        (asyncpg.QueryCanceledError, StoreUnavailable),
        (asyncpg.LockNotAvailableError, StoreUnavailable),
        (asyncpg.AdminShutdownError, StoreUnavailable),
        (asyncpg.ConnectionDoesNotExistError, StoreUnavailable),
        (TimeoutError, StoreUnavailable),
        (asyncpg.ProgramLimitExceededError, StoreError),
    ],
)
def test_what_may_be_a_batchs_own_fault_is_told_from_what_is_not(
    error: type[Exception], kind: type[StoreError]
) -> None:
    with pytest.raises(StoreError) as trouble, translated("place"):
        raise error("it cannot")
    assert type(trouble.value) is kind


async def test_a_certificate_that_is_refused_later_is_waited_for(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    trusted = tmp_path / ".postgresql" / "root.crt"
    trusted.parent.mkdir()
    certificates = make_certificates(tmp_path)
    authority = certificates.authority.read_bytes()
    trusted.write_bytes(authority)
    with Proxy(url, certificates) as proxy:
        secure = with_option(proxy.url, sslmode="verify-full", sslnegotiation="direct")
        async with opened(secure) as store:
            await store.load(["a"])
            connection = store._reader._connection
            proxy.cut()
            await until(lambda: connection is not None and connection.is_closed(), saying="the end of the connection")
            trusted.write_bytes(make_certificates(tmp_path).authority.read_bytes())
            with pytest.raises(StoreUnavailable, match="certificate verify failed"):
                await store.load(["a"])
            with pytest.raises(StoreError, match="certificate verify failed") as refusal:
                await stage.start_once(secure)
            assert not isinstance(refusal.value, StoreUnavailable)
            trusted.unlink()
            with pytest.raises(StoreUnavailable, match="root certificate file"):
                await store.load(["a"])
            trusted.write_bytes(authority)
            assert await store.load(["a"]) == {}
