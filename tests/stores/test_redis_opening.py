"""How the Redis store is opened, and on what servers it is not."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis

from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.core.events import Cancelled
from oraculo.core.run import RunStatus
from oraculo.errors import InvalidSettings, StoreError, StoreUnavailable
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.browse import RunQuery
from oraculo.stores.migrations import Migration
from oraculo.stores.redis import RedisStore, server
from oraculo.testing.checkers import check_store
from oraculo.testing.store_runs import assert_stored, change, changed, create, ids_of, load, make_run, revived
from tests.servers.certificates import make_certificates
from tests.servers.process import Server, free_port
from tests.servers.proxy import Proxy
from tests.servers.valkey import Sentinel, Valkey
from tests.stores import redis_stage as stage
from tests.stores.redis_stage import keys_of, opened, refused_promptly

breakable, namespace, plain, url = stage.breakable, stage.namespace, stage.plain, stage.url  # fixtures


# -- the URL --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("/x", "database 'x'"),
        ("/0?namespace=", "namespace"),
        ("/0?namespace=a%3Ab", "namespace"),
        ("/0?namespace=a'..b", "namespace"),
        ("/0?nmspace=a", "unknown parameter 'nmspace'; known: namespace"),
        ("/0?ssl_ca_certs=x", "no TLS"),
    ],
)
def test_a_bad_url_is_told_at_once(query: str, fault: str) -> None:
    with pytest.raises(InvalidSettings, match=fault) as refusal:
        RedisStore(f"redis://:s3cret@localhost{query}")
    assert refusal.value.faults[0].field == "ORACULO_STORE_URL"
    assert "s3cret" not in str(refusal.value)


async def test_namespaces_are_apart(url: str, namespace: str, plain: Any) -> None:
    async with opened(url) as one, opened(f"{url}-2") as other:
        await create(one, make_run("a"))
        await create(other, run := make_run("a", payload=b'{"other":1}'))
        await change(one, changed(revived(await load(one, "a")), Cancelled()))
        await assert_stored(other, run)
        assert (await other.census())[RunStatus.RUNNING] == 1
    plain.unlink(*plain.scan_iter(f"{namespace}-2:*", count=10_000))


async def test_the_streams_broker_may_use_the_same_database(breakable: Server) -> None:
    broker = RedisStreamsBroker(breakable.url)
    await broker.start()
    async with opened(breakable.url) as runs:
        await create(runs, make_run("a"), make_run("delayed"))
        # A queue with the name of the default namespace, and all that the broker keeps for one.
        await publish_all(broker, [Outgoing("oraculo", b"1"), Outgoing("oraculo", b"2", reason="dead")])
        consumer = await broker.consume("oraculo", prefetch=1)
        await consumer.retry((await consumer.take(1))[0], 100.0, "later")
        assert [state.queue for state in await broker.queues()] == ["oraculo"]
        assert await ids_of(runs, RunQuery()) == ["delayed", "a"]
        assert await check_store(runs) == []
    await broker.close()


async def test_tls(url: str, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    with Proxy(url, certificates) as proxy:
        secure = proxy.url.replace("redis://", "rediss://")
        async with opened(f"{secure}&ssl_ca_certs={certificates.authority}") as runs:
            await create(runs, run := make_run("a"))
            await assert_stored(runs, run)
        with pytest.raises(StoreError, match=f"certificate of 127.0.0.1:{proxy.port} is not trusted"):
            await RedisStore(secure).start()


# -- opening --------------------------------------------------------------------------------------------------------


async def test_passwords(tmp_path: Path) -> None:
    with Valkey(password="s3cret/ü") as locked:
        place = f"127.0.0.1:{locked.port}/0"
        async with opened(f"redis://:s3cret%2F%C3%BC@{place}") as runs:
            assert "s3cret" not in await runs.check()
        for login, what in ((":wr0ng@", "refused the user or the password"), ("", "wants a password")):
            with pytest.raises(StoreError, match=what) as refusal:
                await RedisStore(f"redis://{login}{place}").start()
            assert not isinstance(refusal.value, StoreUnavailable)
            assert "wr0ng" not in str(refusal.value)


async def test_a_server_that_cannot_be_reached_is_named() -> None:
    for host in (f"127.0.0.1:{free_port()}", "no-such-host.invalid:6379"):
        runs = RedisStore(f"redis://:s3cret@{host}/0", connect_timeout=1.0)
        refusal = await refused_promptly(runs.start())
        assert host in str(refusal)
        assert "s3cret" not in str(refusal)
        with pytest.raises(StoreError, match="not open"):
            await runs.load(["a"])


async def test_many_may_open_an_empty_store_at_once(url: str, namespace: str, plain: Any) -> None:
    stores = [RedisStore(url) for _ in range(10)]
    await asyncio.gather(*(each.start() for each in stores[:5]), *(each.migrate() for each in stores[5:]))
    await create(stores[0], make_run("a"))
    assert set(await stores[9].load(["a"])) == {"a"}
    assert plain.get(f"{namespace}:layout") == b"%d" % len(server.MIGRATIONS)
    for each in stores:
        await each.close()


async def test_what_was_flushed_is_laid_out_again_by_the_engines(url: str, namespace: str, plain: Any) -> None:
    async with opened(url) as store:
        plain.delete(f"{namespace}:layout")
        assert await store.look() is not None, "it counts as empty"
        await store.attend("one", 1.0, 5.0)
        assert plain.get(f"{namespace}:layout") == b"%d" % len(server.MIGRATIONS)
        assert await store.look() is None
        plain.set(f"{namespace}:layout", 99)
        await store.attend("one", 2.0, 5.0)
        assert plain.get(f"{namespace}:layout") == b"99", "another's number stays"


async def test_an_older_layout_is_migrated_only_when_asked(
    url: str, namespace: str, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as runs:
        await create(runs, run := make_run("a"))
        assert await runs.migrate() == []
    applied = []

    async def apply(migrated: server.Server) -> None:
        applied.append(await migrated.ask("PING"))

    steps = [*server.MIGRATIONS, Migration(2, "more", apply), Migration(3, "most", apply)]
    monkeypatch.setattr(server, "MIGRATIONS", steps)
    with pytest.raises(StoreError, match=r"layout 1 and this program uses 3: run `oraculo migrate`") as refusal:
        await RedisStore(url).start()
    assert not isinstance(refusal.value, StoreUnavailable)
    newer = RedisStore(url)
    assert await newer.migrate() == ["0002 more", "0003 most"]
    assert len(applied) == 2
    await assert_stored(newer, run)  # it is open
    assert await newer.migrate() == []
    await newer.close()
    async with opened(url) as runs:
        await assert_stored(runs, run)


async def test_a_newer_layout_is_refused_with_what_to_do(url: str, namespace: str, plain: Any) -> None:
    plain.set(f"{namespace}:layout", 99)
    runs = RedisStore(url)
    for call in (runs.start, runs.migrate):
        with pytest.raises(StoreError, match=r"newer ORÁCULO \(their layout is 99.*run that version"):
            await call()
    assert plain.get(f"{namespace}:layout") == b"99"


async def test_what_another_program_has_under_our_keys_is_refused(url: str, namespace: str, plain: Any) -> None:
    for key in ("due", "keys"):
        plain.set(f"{namespace}:{key}", "mine")
        with pytest.raises(StoreError, match=f"not ours under the key {namespace}:{key}.*namespace="):
            await RedisStore(url).start()
        plain.unlink(f"{namespace}:{key}")


# -- the server -----------------------------------------------------------------------------------------------------


async def test_the_check_names_version_and_place(breakable: Server) -> None:
    async with opened(breakable.url) as runs:
        told = await runs.check()
        assert told.startswith(("Valkey ", "Redis "))
        assert told.endswith(f"127.0.0.1:{breakable.port}")


async def test_the_check_warns_of_a_server_that_keeps_nothing() -> None:
    with Valkey(durable=False) as soft:
        async with opened(soft.url) as runs:
            assert "no append-only file: a crash of it loses runs" in await runs.check()


async def test_a_server_that_evicts_keys_is_refused_with_what_to_set(breakable: Server) -> None:
    with redis.Redis.from_url(breakable.url) as plain:
        try:
            plain.config_set("maxmemory", "1gb")
            async with opened(breakable.url) as runs:
                plain.config_set("maxmemory-policy", "volatile-lru")  # none of our keys expires
                await runs.check()
                plain.config_set("maxmemory-policy", "allkeys-lru")
                with pytest.raises(StoreUnavailable, match="maxmemory-policy to noeviction, it is allkeys-lru"):
                    await runs.check()
            with pytest.raises(StoreError, match="maxmemory-policy to noeviction"):
                await RedisStore(breakable.url).start()
            plain.config_set("maxmemory", 0)
            async with opened(breakable.url) as runs:
                await runs.check()
        finally:
            plain.config_set("maxmemory", 0)
            plain.config_set("maxmemory-policy", "noeviction")


async def test_looking_at_an_empty_store_writes_nothing(url: str, namespace: str, plain: Any) -> None:
    runs = RedisStore(url)
    try:
        told = await runs.look()
        assert told is not None
        assert told.startswith(("Valkey ", "Redis "))
        assert keys_of(plain, namespace) == set()
        await runs.start()
        assert await runs.look() is None
        await runs.check()
        assert keys_of(plain, namespace) == {"layout"}
    finally:
        await runs.close()


@pytest.mark.parametrize("command", ["hset", "zadd", "rpush", "incr", "unlink", "zrangebylex"])
async def test_a_user_who_lacks_a_command_is_told_of(url: str, namespace: str, plain: Any, command: str) -> None:
    user = f"{namespace}-user"
    plain.acl_setuser(user, enabled=True, passwords=["+p"], keys=[f"{namespace}:*"], commands=["+@all", f"-{command}"])
    runs = RedisStore(url.replace("redis://", f"redis://{user}:p@"))
    try:
        with pytest.raises(StoreError, match=f"'{command}'"):
            await runs.look()
        await runs.start()
        with pytest.raises(StoreUnavailable, match=f"'{command}'"):
            await runs.check()
    finally:
        await runs.close()
        plain.acl_deluser(user)


async def test_a_user_who_may_not_ask_for_the_configuration(url: str, namespace: str, plain: Any) -> None:
    plain.acl_setuser(
        "runs", enabled=True, passwords=["+p"], keys=[f"{namespace}:*"], commands=["+@all", "-@dangerous"]
    )
    try:
        async with opened(url.replace("redis://", "redis://runs:p@")) as runs:
            await create(runs, run := make_run("a"))
            await assert_stored(runs, run)
            assert "unknown version" in await runs.check()
    finally:
        plain.acl_deluser("runs")


class Clustered(Valkey):
    def command(self) -> list[str]:
        return [*super().command(), "--cluster-enabled", "yes", "--cluster-port", str(free_port())]


async def test_a_cluster_is_refused() -> None:
    with Clustered(durable=False) as node:
        with pytest.raises(StoreError, match="Redis Cluster") as refusal:
            await RedisStore(node.url).start()
        assert not isinstance(refusal.value, StoreUnavailable)


async def test_a_sentinel_is_refused() -> None:
    with Sentinel() as server:
        with pytest.raises(StoreError, match=r"is a Redis Sentinel, .*: use the address of the master") as refusal:
            await RedisStore(server.url).start()
        assert not isinstance(refusal.value, StoreUnavailable)


async def test_a_user_without_a_password_is_that_user(url: str, namespace: str, plain: Any) -> None:
    plain.acl_setuser("sem-senha", enabled=True, nopass=True, keys=[f"{namespace}:*"], commands=["+@all"])
    try:
        async with opened(url.replace("redis://", "redis://sem-senha@")) as runs:
            await create(runs, make_run("a"))
            assert "sem-senha" in {each["user"] for each in plain.client_list()}
    finally:
        plain.acl_deluser("sem-senha")


def test_an_old_server_is_refused() -> None:
    for version, is_refused in ((b"6.0.16", True), (b"5.0.7", True), (b"6.2.0", False), (b"10.1.0", False)):
        reason = server._reason_to_refuse({b"redis_version": version})
        assert (reason is not None) == is_refused
        assert reason is None or "6.2 or newer" in reason
