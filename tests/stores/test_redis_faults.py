"""The Redis store and a server in trouble."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
import redis

from oraculo.core.events import Answered, Progressed, Sent
from oraculo.core.run import Changes, Run
from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.ports.browse import RunQuery
from oraculo.ports.store import CreationOutcome
from oraculo.stores.redis import RedisStore
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
)
from tests.servers.process import Server, free_port
from tests.servers.proxy import Proxy
from tests.servers.valkey import Valkey
from tests.stores import redis_stage as stage
from tests.stores.redis_stage import PROMPTLY, assert_indexes_agree, opened, refused_promptly
from tests.waiting import until

breakable, namespace, plain, url = stage.breakable, stage.namespace, stage.plain, stage.url  # fixtures


@asynccontextmanager
async def limited(url: str) -> AsyncIterator[RedisStore]:
    """With short time limits."""
    async with opened(url, connect_timeout=0.5, call_timeout=0.5) as made:
        yield made


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
            assert {each.outcome for each in created} <= {CreationOutcome.CREATED, CreationOutcome.SAME}
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


async def test_a_connection_that_the_server_ends(breakable: Server) -> None:
    async with opened(breakable.url) as runs:
        await create(runs, run := make_run("a"))
        with redis.Redis.from_url(breakable.url) as plain:
            plain.client_kill_filter(_type="normal", skipme=True)
            await assert_stored(runs, run)  # a read is repeated
            plain.client_kill_filter(_type="normal", skipme=True)
        await until(lambda: runs._server._link._connection.trouble)
        await create(runs, other := make_run("b"))
        await change(runs, changed(other, Sent(0, 1)))
        await assert_stored(runs, other)


async def test_a_copy_from_before_a_server_lost_commits_overwrites_nothing_that_came_after() -> None:
    """Both engines have a third version of the run, and they are not the same."""
    with Valkey(durable=False) as server:
        async with opened(server.url) as first, opened(server.url) as second:
            await create(first, run := make_run("a"))
            with redis.Redis.from_url(server.url) as plain:
                plain.save()
            await change(first, changed(run, Sent(0, 1)))  # which the server loses
            server.kill()
            server.start()
            await second.check()
            after = revived(await load(second, "a"))
            await change(second, changed(after, Answered(1, 1, OK)))
            assert after.head.version == run.head.version
            await first.check()
            await load(first, "a")  # for somebody who looks at it
            assert await first.unchanged([run.head]) == frozenset()
            assert await second.unchanged([after.head]) == {"a"}
            committed = await first.commit([], [changed(run, Sent(2, 1))])
            assert committed.conflicts == {"a"}
            await assert_stored(first, after)
            again = revived(await load(first, "a"))
            await change(first, changed(again, Sent(2, 1)))
            await assert_stored(second, again)


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
            assert created.outcome in (CreationOutcome.CREATED, CreationOutcome.SAME)
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
                with pytest.raises(StoreRefuses, match="read-only"):
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
                    with pytest.raises(StoreRefuses, match="maxmemory"):
                        await call
                assert await everything(runs, [open_run, ended]) == before
                assert await runs.prune(NOW + 100, 10) == 1
            finally:
                plain.config_set("maxmemory", 0)
        await change(runs, changed(open_run, Sent(0, 1)))
        await create(runs, make_run("new"))


async def test_a_right_that_is_taken_away_is_waited_for(breakable: Server) -> None:
    with redis.Redis.from_url(breakable.url) as plain:
        plain.acl_setuser("app", enabled=True, passwords=["+p"], keys=["*"], commands=["+@all"])
        async with opened(breakable.url.replace("redis://", "redis://app:p@")) as runs:
            plain.acl_setuser("app", enabled=True, passwords=["+p"], keys=["*"], commands=["+@all", "-hset"])
            with pytest.raises(StoreRefuses, match="'hset'"):
                await runs.commit([creation(make_run("a"))], [])
            plain.acl_setuser("app", enabled=True, passwords=["+p"], keys=["*"], commands=["+@all"])
            await create(runs, run := make_run("a"))
            await assert_stored(runs, run)


async def test_scripts_that_the_server_forgot_are_given_to_it_again(url: str, plain: Any) -> None:
    async with opened(url) as runs:
        run, twin = make_run("a"), make_run("a")
        plain.script_flush()
        created = (await runs.commit([creation(run), creation(twin)], [])).created
        assert [each.outcome for each in created] == [CreationOutcome.CREATED, CreationOutcome.SAME]
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
        assert created.outcome is CreationOutcome.CREATED
        assert len(await runs.history("b")) == 1
