"""The Redis store: the suite every store passes, and what is its own."""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis

from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.core.events import (
    Answered,
    BrokerLost,
    Cancelled,
    DeadLetterDiscarded,
    Event,
    Progressed,
    Redriven,
    Repeated,
    RunDue,
    Sent,
    TaskDue,
)
from oraculo.core.run import Changes, Run, RunStatus
from oraculo.errors import InvalidSettings, StoreError, StoreUnavailable
from oraculo.ports.broker import Outgoing
from oraculo.ports.store import Outcome, RunQuery, Store
from oraculo.stores.redis import RedisStore, listing, server, store
from oraculo.stores.redis.layout import Layout
from oraculo.stores.redis.values import update
from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.checkers import check_store
from oraculo.testing.store_runs import (
    NOW,
    OK,
    assert_stored,
    change,
    changed,
    create,
    creation,
    everything,
    failure,
    ids_of,
    load,
    make_run,
    revived,
    succeeded,
    unsent_pages,
)
from oraculo.testing.store_suite import StoreSuite
from tests.servers.certificates import make_certificates
from tests.servers.fleet import Fleet
from tests.servers.process import Server, free_port
from tests.servers.proxy import Proxy
from tests.servers.valkey import Valkey
from tests.stores.killed_writer import survives_kills
from tests.waiting import until

PROMPTLY = 4.0  # on a busy machine; the time limits of the stores that are tested so are under a second


class TestConformance(StoreSuite):
    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    async def make_store(self) -> Store:
        made = RedisStore(self.url)
        await made.start()
        return made


# What the tests are written with.


@pytest.fixture
def plain(fleet: Fleet) -> Iterator[Any]:
    """A client that knows nothing of ORÁCULO."""
    with redis.Redis.from_url(fleet.url("redis")) as client:
        yield client


@pytest.fixture
def namespace(plain: Any) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    if keys := list(plain.scan_iter(f"{name}:*", count=10_000)):
        plain.unlink(*keys)


@pytest.fixture
def url(fleet: Fleet, namespace: str) -> str:
    return f"{fleet.url('redis')}?namespace={namespace}"


@pytest.fixture
def breakable(fleet: Fleet) -> Iterator[Server]:
    """One that may be killed, frozen, filled or flushed. It keeps what it confirmed."""
    found = fleet.breakable("redis")
    with redis.Redis.from_url(found.url) as client:
        client.flushall()
    yield found
    if found.is_running:
        found.thaw()


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[RedisStore]:
    made = RedisStore(url, **options)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def limited(url: str) -> AsyncIterator[RedisStore]:
    """With short time limits."""
    async with opened(url, connect_timeout=0.5, call_timeout=0.5) as made:
        yield made


def keys_of(plain: Any, namespace: str) -> set[str]:
    return {key.decode().removeprefix(f"{namespace}:") for key in plain.scan_iter(f"{namespace}:*", count=10_000)}


async def refused_promptly(call: Any) -> StoreUnavailable:
    async with asyncio.timeout(PROMPTLY):
        with pytest.raises(StoreUnavailable) as refusal:
            await call
    return refusal.value


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
        await broker.publish([Outgoing("oraculo", b"1"), Outgoing("oraculo", b"2", reason="dead")])
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


async def test_a_store_that_is_not_open_says_so(url: str) -> None:
    runs = RedisStore(url)
    for call in (runs.load(["a"]), runs.commit([], [Changes(make_run("a"))]), runs.runs(RunQuery())):
        with pytest.raises(StoreError, match=r"not open: call start\(\) first"):
            await call


async def test_many_may_open_an_empty_store_at_once(url: str, namespace: str, plain: Any) -> None:
    stores = [RedisStore(url) for _ in range(10)]
    await asyncio.gather(*(each.start() for each in stores[:5]), *(each.migrate() for each in stores[5:]))
    await create(stores[0], make_run("a"))
    assert set(await stores[9].load(["a"])) == {"a"}
    assert plain.get(f"{namespace}:layout") == b"%d" % len(server.MIGRATIONS)
    for each in stores:
        await each.close()


async def test_an_older_layout_is_migrated_only_when_asked(
    url: str, namespace: str, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as runs:
        await create(runs, run := make_run("a"))
        assert await runs.migrate() == []
    applied = []

    async def apply(migrated: server.Server) -> None:
        applied.append(await migrated.ask("PING"))

    steps = [*server.MIGRATIONS, server.Migration(2, "more", apply), server.Migration(3, "most", apply)]
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
        assert told.startswith("Valkey ")
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
        assert told.startswith("Valkey ")
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


def test_an_old_server_is_refused() -> None:
    for version, is_refused in ((b"6.0.16", True), (b"5.0.7", True), (b"6.2.0", False), (b"10.1.0", False)):
        reason = server._reason_to_refuse({b"redis_version": version})
        assert (reason is not None) == is_refused
        assert reason is None or "6.2 or newer" in reason


# -- a server in trouble --------------------------------------------------------------------------------------------


class Writer:
    """Makes and changes runs until it is told to stop, and remembers what was confirmed."""

    def __init__(self, runs: RedisStore) -> None:
        self._runs = runs
        self.confirmed: dict[str, int] = {}
        self.refusals = 0
        self.is_over = False

    async def write(self, name: str) -> None:
        for number in count():
            batch = [make_run(f"{name}-{number}-{each}") for each in range(3)]
            await self._commit_surely(batch)
            for _ in range(3):
                if self.is_over:
                    return
                await self._change(batch)

    async def _commit_surely(self, batch: list[Run]) -> None:
        creations = [creation(run) for run in batch]
        while not self.is_over:
            try:
                created = (await self._runs.commit(creations, [])).created
            except StoreUnavailable:
                await self._pause()
                continue
            assert {each.outcome for each in created} <= {Outcome.CREATED, Outcome.SAME}
            self.confirmed |= {run.id: 1 for run in batch}
            return

    async def _change(self, batch: list[Run]) -> None:
        """As the engine does it: after a failure the stored run is loaded and decided on again."""
        while not self.is_over:
            try:
                stored = await self._runs.load([run.id for run in batch])
                changes = [self._next(revived(snapshot)) for snapshot in stored.values()]
                conflicts = (await self._runs.commit([], changes)).conflicts
            except StoreUnavailable:
                await self._pause()
                continue
            assert not conflicts
            self.confirmed |= {each.run.id: each.run.head.version for each in changes}
            return

    def _next(self, run: Run) -> Changes:
        return changed(run, *(Progressed(task.number, 1.0, str(run.head.version)) for task in run.tasks))

    async def _pause(self) -> None:
        self.refusals += 1
        await asyncio.sleep(0.01)

    async def assert_all_kept(self, runs: RedisStore) -> None:
        stored = await runs.heads(list(self.confirmed))
        lost = {run_id: v for run_id, v in self.confirmed.items() if run_id not in stored or stored[run_id].version < v}
        assert lost == {}
        for snapshot in (await runs.load(list(self.confirmed))).values():
            assert {task.note for task in snapshot.tasks} <= {str(snapshot.head.version - 1), None}


@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_a_restart_in_the_middle_of_commits_leaves_every_run_whole(breakable: Server, fsync: str) -> None:
    """And loses nothing that was confirmed, where each write is synced; else perhaps that of the last second or two."""
    async with limited(breakable.url) as runs:
        writer = Writer(runs)
        writing = [asyncio.create_task(writer.write(f"w{n}")) for n in range(4)]
        for _ in range(4):
            await runs._server.ask("CONFIG", "SET", "appendfsync", fsync)
            before = len(writer.confirmed)
            await until(lambda before=before: len(writer.confirmed) > before + 50)
            await asyncio.sleep(random.random() * 0.02)  # any moment of a commit
            breakable.kill()
            refusals = writer.refusals
            await until(lambda refusals=refusals: writer.refusals > refusals)
            with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{breakable.port}"):
                await runs.check()
            breakable.start()
            await until(lambda: is_well(runs))
        confirmed = len(writer.confirmed)
        await until(lambda: len(writer.confirmed) > confirmed + 20)
        writer.is_over = True
        await asyncio.gather(*writing)
        if fsync == "always":
            await writer.assert_all_kept(runs)
        assert await check_store(runs) == []
        await assert_indexes_agree(runs)


async def test_an_append_only_file_that_was_cut_leaves_every_run_whole(breakable: Server) -> None:
    """As a crash of the machine cuts it, anywhere in what was written last."""
    async with opened(breakable.url) as runs:
        made = [make_run(f"run-{n}", destinos=[{"fila": "q", "timeout": 9}, "r"]) for n in range(20)]
        await create(runs, *made)
        for _ in range(5):
            await change(runs, *(changed(run, Sent(0, 1, via="redis"), Progressed(1, 5.0, "x" * 50)) for run in made))
        whole = sum(head.version for head in (await runs.heads([run.id for run in made])).values())
        for cut in (1, 40, 700, 5_000, 20_000):
            breakable.kill()
            newest = max(breakable.folder.rglob("*.aof"))
            with newest.open("rb+") as file:
                file.truncate(newest.stat().st_size - cut)
            breakable.start()
            await until(lambda: is_well(runs))
            left = (await runs.runs(RunQuery(limit=100))).heads
            assert sum(head.version for head in left) < whole
            assert await check_store(runs) == []
            await assert_indexes_agree(runs)


async def is_well(runs: RedisStore) -> bool:
    try:
        await runs.check()
    except StoreUnavailable:
        return False
    return True


async def assert_indexes_agree(runs: RedisStore) -> None:
    """What is kept beside the runs, to find them by, agrees with the runs."""
    heads = (await runs.runs(RunQuery(limit=100_000))).heads
    tasks = [(head, task) for head in heads for task in (await load(runs, head.id)).tasks]
    unsent = {(head.id, task.number) for head, task in tasks if task.unsent}
    timers = {(head.id, task.number) for head, task in tasks if task.due_at is not None}
    timers |= {(head.id, None) for head in heads if head.due_at is not None}
    assert {(one.run_id, one.task) for page in await unsent_pages(runs, 500) for one in page} == unsent
    assert {(one.run_id, one.task) for one in await runs.due(NOW + 10_000_000, 1_000_000)} == timers
    assert sum((await runs.census()).values()) == len(heads)
    for status in RunStatus:
        of_status = [head.id for head in heads if head.status is status]
        assert await ids_of(runs, RunQuery(status=status, limit=100_000)) == of_status


async def test_a_connection_that_the_server_ends(breakable: Server) -> None:
    async with opened(breakable.url) as runs:
        await create(runs, run := make_run("a"))
        with redis.Redis.from_url(breakable.url) as plain:
            plain.client_kill_filter(_type="normal", skipme=True)
            await assert_stored(runs, run)  # a read is repeated
            plain.client_kill_filter(_type="normal", skipme=True)
        await until(lambda: runs._server._link._connection.trouble)
        await change(runs, changed(run, Sent(0, 1)))
        await assert_stored(runs, run)


async def test_an_answer_that_never_comes_leaves_the_fate_of_a_commit_open(breakable: Server) -> None:
    with Proxy(breakable.url) as proxy:
        async with limited(proxy.url) as runs:
            run = make_run("a")
            first = creation(run)
            proxy.swallows = True
            refusal = await refused_promptly(runs.commit([first], []))
            assert f"127.0.0.1:{proxy.port}" in str(refusal)
            assert run.head.version == 0
            proxy.swallows = False
            await until(lambda: is_well(runs))
            [created] = (await runs.commit([first], [])).created
            assert created.outcome in (Outcome.CREATED, Outcome.SAME)
            assert (await load(runs, "a")).head.version == 1
            assert len(await runs.history("a")) == 1


async def test_a_frozen_server_holds_nobody_up(breakable: Server) -> None:
    async with limited(breakable.url) as runs:
        await create(runs, run := make_run("a"))
        breakable.freeze()
        calls = (
            lambda: runs.commit([creation(make_run("b"))], []),
            lambda: runs.load(["a"]),
            lambda: runs.due(NOW, 10),
            lambda: runs.runs(RunQuery()),
            runs.check,
        )
        for call in calls:
            assert "no answer from 127.0.0.1" in str(await refused_promptly(call()))
        breakable.thaw()
        await until(lambda: is_well(runs))
        await assert_stored(runs, run)


async def test_closing_takes_little_time_while_the_server_is_frozen(breakable: Server) -> None:
    async with limited(breakable.url) as runs:
        breakable.freeze()
        commit = asyncio.ensure_future(runs.commit([creation(make_run("a"))], []))
        await asyncio.sleep(0)
        async with asyncio.timeout(PROMPTLY):
            await runs.close()
        with pytest.raises(StoreUnavailable):
            await commit
        breakable.thaw()


async def test_a_replica_is_unavailable_until_it_is_promoted(breakable: Server) -> None:
    async with opened(breakable.url) as runs:
        await create(runs, run := make_run("a"))
        with redis.Redis.from_url(breakable.url) as plain:
            plain.replicaof("127.0.0.1", str(free_port()))
            for call in (runs.commit([], [changed(run, Sent(0, 1))]), runs.check()):
                before = await runs._server.ask("CLIENT", "ID")
                with pytest.raises(StoreUnavailable, match="read-only"):
                    await call
                # It connects again, because the name may lead to the new master by now.
                assert await runs._server.ask("CLIENT", "ID") != before
            plain.replicaof("NO", "ONE")
        await change(runs, changed(revived(await load(runs, "a")), Sent(0, 1)))


async def test_a_full_server_refuses_a_commit_whole_and_still_prunes(breakable: Server) -> None:
    async with opened(breakable.url) as runs:
        open_run, ended = make_run("a"), make_run("b", payload=b'{"x":"' + b"x" * 1_000_000 + b'"}')
        await create(runs, open_run, ended)
        await change(runs, succeeded(ended))
        before = await everything(runs, [open_run, ended])
        with redis.Redis.from_url(breakable.url) as plain:
            try:
                plain.config_set("maxmemory", 1)
                refused = [
                    runs.commit([], [changed(revived(await load(runs, "a")), Sent(0, 1), Answered(1, 1, OK))]),
                    runs.commit([creation(make_run("new"), key="k")], []),
                    runs.check(),
                ]
                for call in refused:
                    with pytest.raises(StoreUnavailable, match="maxmemory"):
                        await call
                assert await everything(runs, [open_run, ended]) == before
                assert await runs.prune(NOW + 100, 10) == 1
            finally:
                plain.config_set("maxmemory", 0)
        await change(runs, changed(open_run, Sent(0, 1)))
        await create(runs, make_run("new"))


async def test_scripts_that_the_server_forgot_are_given_to_it_again(url: str, plain: Any) -> None:
    async with opened(url) as runs:
        run, twin = make_run("a"), make_run("a")
        plain.script_flush()
        created = (await runs.commit([creation(run), creation(twin)], [])).created
        assert [each.outcome for each in created] == [Outcome.CREATED, Outcome.SAME]
        plain.script_flush()
        assert len(await runs.unsent(10)) == 3
        await assert_stored(runs, run)


async def test_a_key_that_is_something_else_stops_a_commit_before_it_begins(
    url: str, namespace: str, plain: Any
) -> None:
    async with opened(url) as runs:
        run = make_run("a")
        await create(runs, run)
        before = await everything(runs, [run])
        plain.rename(f"{namespace}:history:a", f"{namespace}:kept")
        for name in ("history:a", "history:b", "named:odd"):
            plain.set(f"{namespace}:{name}", "mine")
        refused = [
            runs.commit([], [changed(revived(await load(runs, "a")), Sent(0, 1), failure(1))]),
            runs.commit([creation(make_run("b"), key="k")], []),
            runs.commit([creation(make_run("c", name="odd"), key="k")], []),
        ]
        for call in refused:
            with pytest.raises(StoreError, match="WRONGTYPE") as refusal:
                await call
            assert not isinstance(refusal.value, StoreUnavailable)
        plain.rename(f"{namespace}:kept", f"{namespace}:history:a")
        plain.unlink(f"{namespace}:history:b", f"{namespace}:named:odd")
        assert await everything(runs, [run]) == before
        assert await ids_of(runs, RunQuery()) == await ids_of(runs, RunQuery(name="rota")) == ["a"]
        [created] = (await runs.commit([creation(make_run("b"), key="k")], [])).created
        assert created.outcome is Outcome.CREATED
        assert len(await runs.history("b")) == 1


# -- several stores on one server -----------------------------------------------------------------------------------


async def test_a_writer_that_is_killed_leaves_every_run_whole(url: str) -> None:
    await survives_kills(url, kills=4)


# -- bounded work ---------------------------------------------------------------------------------------------------


def test_a_change_of_a_wide_run_is_small() -> None:
    run = make_run("wide", destinos=[{"fila": "q", "id": f"t{n}"} for n in range(10_000)])
    creation(run)
    written = update(changed(run, Answered(5_000, 1, OK)), Layout("x", "y").scripts["change"])
    assert len(written.command) < 40


async def test_everything_in_small_slices(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, size in (
        (store, "ARGUMENTS_TOGETHER", 1),
        (store, "LOADED_TOGETHER", 2),
        (store, "FOUND_TOGETHER", 2),
        (store, "PRUNED_TOGETHER", 2),
        (listing, "LOOKED_AT", 2),
        (listing, "FOUND", 2),
    ):
        monkeypatch.setattr(module, name, size)
    async with opened(url) as runs:
        made = [make_run(f"run-{n}", name=("video", "blog", "rota")[n % 3]) for n in range(9)]
        await create(runs, *made)
        assert len(await runs.load([run.id for run in made])) == 9
        newest = [f"run-{n}" for n in range(8, -1, -1)]
        assert await ids_of(runs, RunQuery()) == newest
        assert await ids_of(runs, RunQuery(text="RUN", limit=5)) == newest[:5]
        assert await ids_of(runs, RunQuery(text="blo")) == ["run-7", "run-4", "run-1"]
        assert await ids_of(runs, RunQuery(name="blog", status=RunStatus.RUNNING)) == ["run-7", "run-4", "run-1"]
        assert [len(page) for page in await unsent_pages(runs, 5)] == [5, 5, 5, 5, 5, 2]
        await change(runs, *(changed(run, *(Sent(n, 1, via="redis") for n in range(3))) for run in made))
        assert list(await runs.held_by("redis", 100)) == newest[::-1]
        assert await runs.forget_sent() == 27
        assert len(await runs.unsent(100)) == 27
        stuck = [changed(revived(await load(runs, run.id)), failure(0), Cancelled()) for run in made[:4]]
        ended = [succeeded(revived(await load(runs, run.id))) for run in made[4:]]
        await change(runs, *stuck, *ended)
        assert await runs.prune(NOW + 100, 100) == 5  # behind those that have a dead letter to send
        assert await ids_of(runs, RunQuery()) == ["run-3", "run-2", "run-1", "run-0"]


async def test_pages_stay_true_in_every_list(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "LOOKED_AT", 3)
    async with opened(url) as runs:
        made = [make_run(f"run-{n:02}", name=("video", "blog")[n % 2]) for n in range(20)]
        await create(runs, *made)
        await change(runs, *(succeeded(run) for run in made[::3]))
        for query in (
            RunQuery(limit=3),
            RunQuery(limit=3, name="blog"),
            RunQuery(limit=3, status=RunStatus.SUCCEEDED),
            RunQuery(limit=2, status=RunStatus.RUNNING, name="video"),
            RunQuery(limit=2, text="RUN-1"),
            RunQuery(limit=1, text="vid", status=RunStatus.SUCCEEDED),
        ):
            seen: list[str] = []
            cursor: str | None = None
            while True:
                page = await runs.runs(RunQuery(query.status, query.name, query.text, query.limit, cursor))
                assert 0 < len(page.heads) <= query.limit
                seen += [head.id for head in page.heads]
                cursor = page.cursor
                if cursor is None:
                    break
            expected = [run.head for run in reversed(made)]
            assert seen == [
                head.id
                for head in expected
                if query.status in (None, head.status)
                and query.name in (None, head.name)
                and (query.text or "").casefold() in f"{head.id} {head.name}"
            ]


async def test_nothing_of_a_pruned_run_is_left(url: str, namespace: str, plain: Any) -> None:
    async with opened(url) as runs:
        made = [make_run(f"run-{n}", name="rota") for n in range(4)]
        await runs.commit([creation(run, key=run.id) for run in made], [])
        resting = [Sent(n, 1, dead_letter=True, via="redis") for n in range(3)]
        await change(runs, *(changed(run, *map(failure, range(3)), *resting) for run in made[:2]))
        await change(runs, *(succeeded(run) for run in made[2:]))
        page = await runs.runs(RunQuery(limit=1))
        assert await runs.prune(NOW + 100, 100) == 4
        assert keys_of(plain, namespace) == {"layout", "sequence", "brokers"}
        # A number is never used again: a cursor that came back would show new runs on an old page.
        await create(runs, make_run("new"))
        assert (await runs.runs(RunQuery(cursor=page.cursor))).heads == []


async def test_pruning_while_the_runs_are_in_use(url: str) -> None:
    async with opened(url) as runs, opened(url) as other:
        made = [make_run(f"run-{n}", destinos=["q", "r"]) for n in range(60)]
        await create(runs, *made)
        ending = [changed(run, Answered(0, 1, OK), failure(1), Sent(1, 1, dead_letter=True)) for run in made]
        await change(runs, *ending)
        again = [changed(revived(await load(other, run.id)), Repeated()) for run in made]
        reopening = [asyncio.ensure_future(other.commit([], [each])) for each in again]
        pruned = await runs.prune(NOW + 100, 100)
        conflicts = [result.conflicts for result in await asyncio.gather(*reopening)]
        # Each was pruned, or opened again, and never both.
        assert pruned == sum(map(len, conflicts))
        assert (await runs.census())[RunStatus.RUNNING] == 60 - pruned
        assert await check_store(runs) == []
        await assert_indexes_agree(runs)


# -- against SQLite -------------------------------------------------------------------------------------------------

BROKERS = ("redis", "rabbitmq", None)


def random_event(run: Run, chance: random.Random) -> Event:
    number = chance.randrange(len(run.tasks))
    attempt = max(1, run.tasks[number].attempt)
    return chance.choice(
        (
            Sent(number, attempt, via=chance.choice(BROKERS)),
            Sent(number, attempt, via=chance.choice(BROKERS)),
            Sent(number, attempt, dead_letter=True, via=chance.choice(BROKERS)),
            Answered(number, attempt, OK),
            Answered(number, attempt, b"{}", failed=True, retryable=chance.random() < 0.6, reason="x", jitter=1.0),
            Answered(number, attempt, b"{}", failed=True, retryable=False, reason="x", jitter=1.0),
            Progressed(number, 5.0, "working"),
            TaskDue(number),
            RunDue(),
            BrokerLost(chance.choice(BROKERS), dead_letters=chance.random() < 0.5),
            DeadLetterDiscarded(number),
            *((Cancelled(), Repeated(), Redriven(number)) if chance.random() < 0.3 else ()),
        )
    )


async def seen_of(runs: Store, ids: list[str]) -> dict[str, Any]:
    unsent = [one for page in await unsent_pages(runs, 7) for one in page]
    held = {
        (via, dead): list(await runs.held_by(via, 100, dead_letters=dead)) for via in BROKERS for dead in (True, False)
    }
    return {
        "runs": await runs.load(ids),
        "heads": await runs.heads(ids),
        "history": [list(await runs.history(run_id, after=3, limit=20)) for run_id in ids],
        "due": sorted(await runs.due(NOW + 100, 1_000), key=lambda one: (one.run_id, one.task or -1)),
        "next": await runs.next_due(),
        "unsent": sorted(unsent, key=lambda one: (one.run_id, one.task)),
        "brokers": set(await runs.brokers_in_use()),
        "held": held,
        "census": await runs.census(),
        "running": await ids_of(runs, RunQuery(status=RunStatus.RUNNING)),
        "named": await ids_of(runs, RunQuery(name="rota", text="RUN")),
    }


@pytest.mark.parametrize("seed", range(6))
async def test_it_finds_what_sqlite_finds(url: str, tmp_path: Path, seed: int) -> None:
    """The same random lives of runs in both, and the same answers to every question on the way."""
    chance = random.Random(seed)
    lite = SqliteStore(str(tmp_path / "x.db"))
    await lite.start()
    async with opened(url) as runs:
        both: tuple[Store, Store] = (runs, lite)
        ids = [f"run-{n}" for n in range(8)]
        for each in both:
            await create(
                each, *(make_run(run_id, webhook="https://a.org" if run_id > "run-5" else None) for run_id in ids)
            )
        now = NOW
        for step in range(120):
            now += chance.random() * 8
            chosen = chance.sample(ids, 3)
            events = {run_id: [chance.random() for _ in range(3)] for run_id in chosen}
            for each in both:
                stored = await each.load(chosen)
                changes = []
                for run_id in chosen:
                    if run_id in stored:
                        run = revived(stored[run_id])
                        some = [random_event(run, random.Random(number)) for number in events[run_id]]
                        changes.append(changed(run, *some, now=now))
                await change(each, *(one for one in changes if one.dirty))
            if step % 40 == 39:
                assert await runs.forget_sent() == await lite.forget_sent()
            if step % 10 == 9:
                assert await seen_of(runs, ids) == await seen_of(lite, ids)
            if step % 30 == 29:
                assert await runs.prune(now - 30, 2) == await lite.prune(now - 30, 2)
        await assert_indexes_agree(runs)
    await lite.close()
