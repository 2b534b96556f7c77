"""The MongoDB store and a layout, a server or an address in trouble."""

import asyncio
import re
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.errors import (
    AutoReconnect,
    BulkWriteError,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    ServerSelectionTimeoutError,
    WaitQueueTimeoutError,
)

from oraculo.core.events import Progressed, Sent
from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.stores.migrations import Migration
from oraculo.stores.mongo import MongoStore, schema
from oraculo.stores.mongo import server as server_module
from oraculo.stores.mongo.faults import Duplicate, place_of, translated
from oraculo.testing.store_runs import NOW, assert_stored, change, changed, create, creation, load, make_run, revived
from tests.servers.fleet import Fleet
from tests.servers.mongo import Mongo
from tests.servers.process import free_port
from tests.servers.proxy import Proxy
from tests.stores import mongo_stage as stage
from tests.stores.mongo_stage import database, directly, opened, wide_run, with_database
from tests.waiting import until

new_url = stage.new_url  # a fixture


# -- the schema -----------------------------------------------------------------------------------------------------


async def test_an_empty_database_gets_its_schema_though_several_start_at_once(new_url: str) -> None:
    stores = [MongoStore(new_url) for _ in range(3)]
    await asyncio.gather(*(store.start() for store in stores))
    for store in stores:
        await store.close()
    async with database(new_url) as found:
        assert (await found.oraculo_meta.find_one({"_id": "esquema"}))["numero"] == len(schema.MIGRATIONS)


async def test_an_older_schema_is_refused_until_it_is_migrated(new_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def colour(db: server_module.Collections) -> None:
        await db.runs.update_many({}, {"$set": {"cor": "azul"}})

    async with opened(new_url) as old, database(new_url) as found:
        await create(old, before := make_run("before"))
        known = schema.MIGRATIONS
        monkeypatch.setattr(schema, "MIGRATIONS", (*known, Migration(len(known) + 1, "colour", colour)))
        new = MongoStore(new_url)
        with pytest.raises(StoreError, match=r"is 1, and this program needs 2: run `oraculo migrate`") as refusal:
            await new.start()
        assert not isinstance(refusal.value, StoreUnavailable)
        assert await new.migrate() == ["0002 colour"]
        assert await new.migrate() == []
        assert (await found.orquestracoes.find_one())["cor"] == "azul"
        await assert_stored(new, before)
        await new.close()


async def test_migrating_needs_no_start(new_url: str) -> None:
    store = MongoStore(new_url)
    assert await store.migrate() == ["0001 runs"]
    await create(store, make_run("a"))
    await store.close()


async def test_a_newer_schema_is_refused_with_what_to_do(new_url: str) -> None:
    async with opened(new_url):
        pass
    async with database(new_url) as found:
        await found.oraculo_meta.update_one({"_id": "esquema"}, {"$set": {"numero": 99}})
    for open_it in (MongoStore(new_url).start, MongoStore(new_url).migrate):
        with pytest.raises(StoreError, match=r"newer ORÁCULO \(its schema is 99.*run that version") as refusal:
            await open_it()
        assert not isinstance(refusal.value, StoreUnavailable)


async def test_a_server_that_is_too_old_is_refused(new_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "OLDEST_MONGODB", (99, 0))
    with pytest.raises(StoreError, match=r"99\.0 or newer is needed") as refusal:
        await MongoStore(new_url).start()
    assert not isinstance(refusal.value, StoreUnavailable)


async def test_no_run_is_created_without_the_indexes_of_a_dropped_database(
    new_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "TRUSTED_SECONDS", 0.0)
    async with opened(new_url) as store, database(new_url) as found:
        await create(store, make_run("before"))
        await found.client.drop_database(found.name)
        with pytest.raises(StoreUnavailable, match="is gone"):
            await store.commit([creation(make_run("a"))], [])
        with pytest.raises(StoreUnavailable, match=r"schema of MongoDB at .* is gone.*`oraculo migrate`"):
            await store.check()
        assert await MongoStore(new_url).migrate() == ["0001 runs"]
        await create(store, make_run("a"))
        assert await store.check()


# -- a server that is no replica set --------------------------------------------------------------------------------

_ADVICE = r"start it with `mongod --replSet rs0`, then run `rs\.initiate\(\)` in `mongosh` once"


class _Uninitiated(Mongo):
    """Started for a replica set, which nobody makes before `initiate`."""

    def _become_primary(self, client: Any) -> None:
        pass

    def initiate(self) -> None:
        with MongoClient[Any]("127.0.0.1", self.port, directConnection=True) as client:
            super()._become_primary(client)


async def test_a_server_that_stands_alone_is_refused_with_what_to_do(fleet: Fleet) -> None:
    fleet.mongo_slowness()  # skips when there is none to be had
    with Mongo(alone=True) as server:
        for open_it in (MongoStore(server.url).start, MongoStore(server.url).migrate):
            with pytest.raises(
                StoreError, match=f"stands alone, and transactions need a replica set: {_ADVICE}"
            ) as refusal:
                await open_it()
            assert not isinstance(refusal.value, StoreUnavailable), "waiting does not help"
        named = MongoStore(f"{server.url}?replicaSet=rs0", connect_seconds=1)
        with pytest.raises(StoreUnavailable, match=f"has no replica set that works: {_ADVICE}"):
            await named.start()


async def test_a_set_that_nobody_made_is_waited_for_and_one_without_its_majority_is_named(fleet: Fleet) -> None:
    slowness = fleet.mongo_slowness()
    with _Uninitiated() as server:
        for address in (server.url, server.url.partition("?")[0]):
            with pytest.raises(StoreUnavailable, match=f"has no replica set that works: {_ADVICE}"):
                await MongoStore(address, connect_seconds=1).start()
        await asyncio.to_thread(server.initiate)
        async with opened(with_database(server.url)) as store, database(with_database(server.url)) as found:
            assert await store.check()
            members = (await found.client.admin.command("replSetGetConfig"))["config"]
            members["version"] += 1
            members["members"].append({"_id": 1, "host": f"127.0.0.1:{free_port()}", "priority": 0})
            await found.client.admin.command("replSetReconfig", members, force=True)
            with pytest.raises(StoreUnavailable, match="majority of its replica set does not confirm writes"):
                await asyncio.wait_for(store.check(), 5 * slowness)


# -- a server in trouble --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        AutoReconnect("operation cancelled"),
        AutoReconnect("host:27017: connection pool paused"),
        WaitQueueTimeoutError("Timed out while checking out a connection from connection pool. maxPoolSize: 100"),
    ],
)
def test_a_server_that_stands_still_is_told_as_that(fault: PyMongoError) -> None:
    with pytest.raises(StoreUnavailable) as trouble, translated("place"):
        raise fault
    assert str(trouble.value) == f"MongoDB at place: it does not answer ({fault})"


def test_a_driver_that_takes_a_lone_server_for_a_set_is_worth_another_try() -> None:
    """It does so now and then when that server was just restarted."""
    with pytest.raises(StoreUnavailable, match="retryable writes"), translated("place"):
        raise OperationFailure("This MongoDB deployment does not support retryable writes.", 20)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OperationFailure("not authorized on x to execute command", 13), StoreRefuses),
        (OperationFailure("Authentication failed.", 18), StoreRefuses),
        (BulkWriteError({"writeErrors": [{"code": 14031, "errmsg": "available disk space is too low"}]}), StoreRefuses),
        (NotPrimaryError("not primary", {"code": 10107}), StoreRefuses),
        (OperationFailure("operation exceeded time limit", 50), StoreUnavailable),
        (BulkWriteError({"writeErrors": [{"code": 14031}, {"code": 146}]}), StoreUnavailable),
        (OperationFailure("BSONObj size is invalid", 10334), StoreError),
        (OperationFailure("transaction is too large and will not fit in the storage engine cache", 388), StoreError),
        (BulkWriteError({"writeErrors": [{"code": 11000, "index": 0, "errmsg": "E11000"}]}), Duplicate),
        (OperationFailure("write conflict", 112), StoreUnavailable),
        (OperationFailure("lost", 1, {"errorLabels": ["UnknownTransactionCommitResult"]}), StoreUnavailable),
    ],
)
def test_what_may_be_a_batchs_own_fault_is_told_from_what_is_not(error: PyMongoError, kind: type[StoreError]) -> None:
    with pytest.raises(StoreError) as trouble, translated("place"):
        raise error
    assert type(trouble.value) is kind


async def test_a_server_that_is_killed_and_restarted_loses_nothing_confirmed(fleet: Fleet) -> None:
    server, slowness = fleet.breakable("mongodb"), fleet.mongo_slowness()
    limits = {"connect_seconds": 0.5 * slowness, "call_seconds": 1.5 * slowness}
    async with opened(with_database(server.url), **limits) as store:
        runs = [make_run(f"run-{n}") for n in range(4)] + [wide_run("wide", 30)]
        await create(store, *runs)
        confirmed = {run.id: 1 for run in runs}
        stopping = asyncio.Event()
        troubles: list[StoreError] = []

        async def write(run_id: str) -> None:
            number = 0
            while not stopping.is_set():
                number += 1
                try:
                    run = revived(await load(store, run_id))
                    events = [Progressed(task.number, 1.0, str(run.head.version + 1)) for task in run.tasks]
                    if (await store.commit([], [changed(run, *events)])).conflicts:
                        raise AssertionError(f"{run_id}: a conflict, though nobody else writes")
                    confirmed[run_id] = run.head.version
                except StoreUnavailable as trouble:
                    troubles.append(trouble)

        writers = [asyncio.ensure_future(write(run.id)) for run in runs]

        async def go_on() -> None:
            """All of them; one that ended tells why."""
            before = dict(confirmed)

            def all_have() -> bool:
                for writer in writers:
                    if writer.done():
                        writer.result()
                return all(confirmed[one] > before[one] + 1 for one in before)

            await until(
                all_have, within=30 * slowness, saying=f"each run to be written; the last trouble: {troubles[-1:]}"
            )

        await go_on()
        server.kill()
        await until(lambda: troubles, within=20 * slowness, saying="trouble")
        await asyncio.to_thread(server.start)
        await go_on()
        stopping.set()
        await asyncio.gather(*writers)
        for run_id, version in confirmed.items():
            snapshot = await load(store, run_id)
            assert snapshot.head.version >= version
            assert {task.note for task in snapshot.tasks} == {str(snapshot.head.version)}
            entries = await store.history(run_id, limit=100_000)
            assert [entry.seq for entry in entries] == list(range(1, snapshot.head.entries + 1))


async def test_a_frozen_server_is_unavailable_in_bounded_time(fleet: Fleet) -> None:
    server, slowness = fleet.breakable("mongodb"), fleet.mongo_slowness()
    limits = {"connect_seconds": 0.5 * slowness, "call_seconds": slowness}
    async with opened(with_database(server.url), **limits) as store:
        run = make_run("a")
        await create(store, run)
        stale = revived(await load(store, "a"))
        server.freeze()
        try:
            commit = store.commit([], [changed(stale, Sent(0, 1))])
            for calls in ([store.load(["a"]), commit, store.check(), store.due(NOW, 10)], [store.load(["a"])]):
                for trouble in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10 * slowness):
                    assert isinstance(trouble, StoreUnavailable)
                    assert f"127.0.0.1:{server.port}" in str(trouble)
        finally:
            server.thaw()
        await until(lambda: _answers(store), within=20 * slowness)
        again = revived(await load(store, "a"))
        await change(store, changed(again, Progressed(1, 1.0, "on")))
        await assert_stored(store, again)


async def _answers(store: MongoStore) -> bool:
    try:
        return bool(await store.check())
    except StoreUnavailable:
        return False


async def test_connections_that_are_cut_are_made_again(fleet: Fleet) -> None:
    server, slowness = fleet.breakable("mongodb"), fleet.mongo_slowness()
    limits = {"connect_seconds": 2 * slowness, "call_seconds": 3 * slowness}
    with Proxy(directly(server.url)) as proxy:
        async with opened(with_database(proxy.url), **limits) as store:
            await create(store, run := make_run("a"))
            proxy.cut()
            await until(lambda: _answers(store), within=20 * slowness)
            await assert_stored(store, run)
            proxy.swallows = True
            commit = asyncio.ensure_future(store.commit([], [changed(run, Progressed(0, 1.0, "cut"))]))
            await asyncio.sleep(0.05)
            proxy.cut()
            proxy.swallows = False
            assert not (await commit).conflicts, "the driver sends a write again, once"
            again = revived(await load(store, "a"))
            assert again.head.version == run.head.version
            await change(store, changed(again, Sent(1, 1)))
            await assert_stored(store, again)


async def test_a_server_that_cannot_be_reached_is_named_without_the_password() -> None:
    host = f"127.0.0.1:{free_port()}"
    store = MongoStore(f"mongodb://user:s3cret@{host}/x", connect_seconds=0.3, call_seconds=0.5)
    with pytest.raises(StoreUnavailable, match=f"MongoDB at {host}/x") as refusal:
        await store.start()
    assert "s3cret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "place"),
    [("mongodb://u:pw@a:1,b/d?x=1", "a:1,b/d"), ("mongodb://h/", "h"), ("mongodb://u:12?pw@h/d", "***")],
)
def test_a_place_tells_nothing_of_a_password(url: str, place: str) -> None:
    assert place_of(url) == place


async def test_why_a_server_cannot_be_reached_is_told_before_those_who_ask_lose_patience(fleet: Fleet) -> None:
    server = fleet.breakable("mongodb")
    address = with_database(server.url)
    async with opened(address) as store:
        server.kill()
        for answer in await asyncio.gather(
            asyncio.wait_for(store.check(), 5), asyncio.wait_for(MongoStore(address).start(), 5), return_exceptions=True
        ):
            assert isinstance(answer, StoreUnavailable)
            assert re.search(r"refused|Connect call failed|closed", str(answer))


def test_what_the_driver_adds_for_programmers_is_left_out() -> None:
    for error in (
        NotPrimaryError("not primary", {"ok": 0.0, "errmsg": "not primary"}),
        ServerSelectionTimeoutError("not primary, Timeout: 5.0s, Topology Description: <TopologyDescription …>"),
        AutoReconnect("not primary (configured timeouts: connectTimeoutMS: 5000.0ms)"),
    ):
        with pytest.raises(StoreUnavailable, match=r"not primary$"), translated("place"):
            raise error


@pytest.mark.parametrize("password", ["sec/ret", "sec?ret", "sec#ret", "sec@ret", "s:ec/ret", "12/ret", "12?ec=ret"])
async def test_no_part_of_a_password_that_is_not_percent_encoded_is_told(password: str) -> None:
    store = MongoStore(f"mongodb://few:{password}@127.0.0.1:{free_port()}/a", connect_seconds=0.2, call_seconds=0.5)
    with pytest.raises(StoreError) as refusal:
        await store.start()
    told = str(refusal.value)
    assert not any(part in told for part in ("few", "sec", "ret", "12/", "12?", "ec=")), told
    if "#" not in password:  # which pymongo takes as it is
        assert "percent-encoded" in told or "escaped" in told


@pytest.mark.parametrize("options", ["appName=@account@", "retryWrites=false&appName=@account@"])
def test_an_option_may_have_an_at_sign_as_those_of_a_hosted_server_do(options: str) -> None:
    MongoStore(f"mongodb://account:k3y%3D%3D@account.mongo.example:10255/runs?{options}")


async def test_an_address_that_makes_no_sense_is_refused_for_good() -> None:
    for url in ("mongodb://", "mongodb://h:x/y"):
        with pytest.raises(StoreError) as refusal:
            await MongoStore(url, connect_seconds=0.2, call_seconds=1).start()
        assert not isinstance(refusal.value, StoreUnavailable), url


async def test_passwords(fleet: Fleet) -> None:
    fleet.url("mongodb")
    with Mongo(user="oraculo", password="s3cret") as server:
        async with opened(with_database(server.url)) as store:
            await create(store, make_run("a"))
        wrong = MongoStore(with_database(server.url).replace("s3cret", "gu3ss"))
        with pytest.raises(StoreUnavailable, match="Authentication failed") as refusal:
            await wrong.start()
        assert "gu3ss" not in str(refusal.value)
