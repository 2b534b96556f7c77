"""`redis://` and `rediss://`: a store in Redis 6.2 or later, or in Valkey.

`?namespace=x` in the URL keeps several stores apart in one database; the default is `oraculo`. The Streams broker may
use the same database.

- A run's commit is one script, so the server and its append-only file have all of it or nothing. The scripts of a batch
travel together, and others may run in between.
- A confirmed commit is as durable as the server's settings. `appendonly yes` with `appendfsync always` loses nothing.
With `everysec` a crash may lose the last two seconds. Without the file a restart loses all since the last snapshot. A
fail-over may lose what was confirmed just before it, because replicas follow later.
- Runs stay in the server's memory until they are pruned. A full server refuses new commits whole, and prunes.
- Redis Cluster is not supported: all keys must be on one server.
"""

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from oraculo.clients.address import read_address
from oraculo.clients.redis import Command, ReplyError, database_of
from oraculo.core.chunks import pages, slices
from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, RunHead, RunStatus, Task
from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.ports.browse import Page, RunQuery
from oraculo.ports.store import Committed, Created, Creation, CreationOutcome, Due, Snapshot, Unsent
from oraculo.stores.records import unchanged_among
from oraculo.stores.redis.layout import DEFAULT_NAMESPACE, SLOT, Layout, broker_of, member, run_and_task, slot_name
from oraculo.stores.redis.listing import list_runs
from oraculo.stores.redis.server import Server
from oraculo.stores.redis.trusted_copies import TrustedCopies
from oraculo.stores.redis.values import (
    RedisWrite,
    attempt_of,
    entries_of,
    head_of,
    key_field,
    snapshot_of,
    task_of,
)

PORT = 6379
SETTING = "ORACULO_STORE_URL"
# Limits of one call, which bound memory and the wait of others.
ARGUMENTS_TOGETHER = 50_000
LOADED_TOGETHER = 500
FOUND_TOGETHER = 1_000
PRUNED_TOGETHER = 50


class RedisStore:
    """The store of one server. `connect_timeout` limits connecting, and `call_timeout` limits the reply to any call."""

    name = "redis"

    def __init__(self, url: str, *, connect_timeout: float = 5.0, call_timeout: float = 10.0) -> None:
        address = read_address(url, SETTING, port=PORT, known=frozenset({"namespace"}))
        database_of(address)  # a wrong number raises now, not at the first connection
        self._layout = Layout(address.parameters.get("namespace", DEFAULT_NAMESPACE), SETTING)
        self._server = Server(address, self._layout, connect_timeout, call_timeout)
        self._copies = TrustedCopies()
        self._has_clock = True  # until the server refuses
        self._is_open = False
        self._writing: set[asyncio.Task[Committed]] = set()

    # -- opening and closing ------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._is_open:
            return
        try:
            await self._server.open()
            await self._server.check_layout()
        except BaseException:
            await self._server.close()
            raise
        self._is_open = True

    async def migrate(self) -> Sequence[str]:
        try:
            if not self._is_open:
                await self._server.open()
            migrated = await self._server.migrate()
        except BaseException:
            if not self._is_open:
                await self._server.close()
            raise
        self._is_open = True
        return migrated

    async def close(self) -> None:
        self._is_open = False
        if self._writing:
            await asyncio.wait(self._writing)
        await self._server.close()

    async def look(self) -> str | None:
        await self._server.open()
        await self._server.run("prove")
        return None if await self._server.is_laid_out() else await self._server.about()

    async def check(self) -> str:
        try:
            server = self._opened()
            await server.run("prove")
            await self.next_due()
            return await server.about()
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise StoreUnavailable(str(error)) from error

    def _opened(self) -> Server:
        if not self._is_open:
            raise StoreError(
                f"the Redis store at {self._server.place} is not open: call start() first, and nothing after close()"
            )
        return self._server

    # -- commits ------------------------------------------------------------------------------------------------

    async def commit(self, creations: Sequence[Creation], changes: Sequence[Changes]) -> Committed:
        server, scripts = self._opened(), self._layout.scripts
        with server.translating():  # before the first await, because the run may change later
            inserts = [RedisWrite(scripts["create"], creation.changes, creation) for creation in creations]
            updates = [RedisWrite(scripts["change"], change) for change in changes]
        if not inserts and not updates:
            return Committed((), frozenset())
        writing = asyncio.create_task(self._write(inserts, updates))
        self._writing.add(writing)
        writing.add_done_callback(self._end_writing)
        return await asyncio.shield(writing)  # it goes on when the caller gives up

    def _end_writing(self, writing: "asyncio.Task[Committed]") -> None:
        self._writing.discard(writing)
        if not writing.cancelled():
            writing.exception()  # mark as retrieved: those who wait raise it

    async def _write(self, inserts: list[RedisWrite], updates: list[RedisWrite]) -> Committed:
        created: list[Created] = []
        conflicts: set[str] = set()
        errors: list[StoreError] = []
        for some in slices([*inserts, *updates], lambda write: len(write.command), ARGUMENTS_TOGETHER):
            connection = await self._server.connected()
            trusted = list(self._trusted(some, connection, conflicts))
            replies = await self._server.run_all([write.command for write in trusted], repeatable=False)
            for write, reply in zip(trusted, replies, strict=True):
                if isinstance(reply, ReplyError):
                    errors.append(self._server.error_of(reply))
                elif isinstance(reply, int):
                    _conclude_update(write, reply, conflicts)
                else:
                    created.append(_conclude_insert(write, reply))
            self._trust((write.changes.run.head for write in trusted if write.is_written), connection)
        for error in sorted(errors, key=lambda error: not isinstance(error, StoreUnavailable)):
            raise error
        return Committed(created, frozenset(conflicts))

    def _trusted(self, writes: Sequence[RedisWrite], connection: int, conflicts: set[str]) -> Iterator[RedisWrite]:
        for write in writes:
            if write.is_insert or self._copies.holds(write.changes.run.head, connection):
                yield write
            else:
                conflicts.add(write.run_id)

    def _trust(self, copies: Iterable[RunHead], connection: int) -> None:
        """Trust copies that were read or written over that connection, if it is still the present one."""
        if self._server.connections == connection:
            self._copies.note(copies, connection)

    # -- reads of the engine ------------------------------------------------------------------------------------

    async def load(self, run_ids: Sequence[str]) -> dict[str, Snapshot]:
        connection = await self._opened().connected()
        replies = await self._of_each(run_ids, "HGETALL")
        found = {run_id: snapshot_of(reply) for run_id, reply in replies.items() if reply}
        self._trust((snapshot.head for snapshot in found.values()), connection)
        return found

    async def created_with(self, idempotency_key: str, fingerprint: str) -> str | None:
        server = self._opened()
        with server.translating():
            key = key_field(idempotency_key)
        if (found := await server.ask("HGET", self._layout.key("keys"), key)) is None:
            return None
        run_id = str(found.decode())
        stored = await server.ask("HGET", self._layout.run(run_id), "fingerprint")
        return run_id if stored == fingerprint.encode() else None

    async def heads(self, run_ids: Sequence[str]) -> dict[str, RunHead]:
        replies = await self._of_each(run_ids, "HGET", "head")
        return {run_id: head_of(reply) for run_id, reply in replies.items() if reply is not None}

    async def task(self, run_id: str, number: int) -> Task | None:
        found = (await self._of_each([run_id], "HGET", str(number)))[run_id]
        return None if found is None else task_of(found)

    async def unchanged(self, copies: Sequence[RunHead]) -> frozenset[str]:
        connection = await self._opened().connected()
        trusted = [copy for copy in copies if self._copies.holds(copy, connection)]
        stored = await self.heads([copy.id for copy in trusted])
        is_same = self._server.connections == connection  # a read may have been repeated over a new one
        return unchanged_among(trusted, stored) if is_same else frozenset()

    async def _of_each(self, run_ids: Sequence[str], command: str, *arguments: str) -> dict[str, Any]:
        server, different = self._opened(), list(dict.fromkeys(run_ids))
        with server.translating():
            commands: list[Command] = [(command, self._layout.run(run_id), *arguments) for run_id in different]
        replies: list[Any] = []
        for some in pages(commands, LOADED_TOGETHER):
            replies += await server.ask_all(some)
        return dict(zip(different, replies, strict=True))

    async def due(self, now: float, limit: int) -> Sequence[Due]:
        found = await self._opened().ask(
            "ZRANGEBYSCORE", self._layout.due, "-inf", repr(now), "LIMIT", 0, max(0, limit)
        )
        return [Due(*run_and_task(each)) for each in found]

    async def next_due(self) -> float | None:
        first = await self._opened().ask("ZRANGE", self._layout.due, 0, 0, "WITHSCORES")
        return float(first[1]) if first else None

    async def unsent(self, limit: int, after: tuple[str, int] | None = None) -> Sequence[Unsent]:
        server = self._opened()
        with server.translating():
            place = b"-" if after is None else b"(" + member(after[0].encode(), after[1])
        found: list[Unsent] = []
        while len(found) < limit:
            wanted = min(limit - len(found), FOUND_TOGETHER)
            reply = await server.run("unsent", place, wanted)
            for each, value in zip(reply[::2], reply[1::2], strict=True):
                run_id, task = run_and_task(each)
                found.append(Unsent(run_id, task or 0, attempt_of(value)))
            if len(reply) < 2 * wanted:
                break
            place = b"(" + reply[-2]
        return found

    async def brokers_in_use(self) -> Sequence[str | None]:
        server = self._opened()
        reply = await server.ask("HGETALL", self._layout.key("brokers"))
        slots = [(name, int(slot)) for name, slot in zip(reply[::2], reply[1::2], strict=True) if name[:1] == b"w"]
        held = self._layout.key("held")
        counts = await server.ask_all([("ZCOUNT", held, slot * SLOT, (slot + 1) * SLOT - 1) for _, slot in slots])
        return [broker_of(name) for (name, _), count in zip(slots, counts, strict=True) if count]

    async def held_by(
        self, via: str | None, limit: int, after: str = "", *, dead_letters: bool = False
    ) -> Sequence[str]:
        server = self._opened()
        with server.translating():
            arguments = (slot_name(via, dead_letters), after.encode())
        return [run_id.decode() for run_id in await server.run("held_by", *arguments, limit)]

    async def forget_sent(self) -> int:
        server, forgotten, taken = self._opened(), 0, FOUND_TOGETHER
        while taken == FOUND_TOGETHER:
            taken, noted = await server.run("forget_sent", FOUND_TOGETHER, repeatable=False)
            forgotten += noted
        return forgotten

    # -- reads for people ---------------------------------------------------------------------------------------

    async def runs(self, query: RunQuery) -> Page:
        server = self._opened()
        with server.translating():
            return await list_runs(server, query)

    async def history(self, run_id: str, *, after: int = 0, limit: int = 1000) -> Sequence[HistoryEntry]:
        server = self._opened()
        if limit < 1:
            return []
        with server.translating():
            key = self._layout.history(run_id)
        return entries_of(await server.ask("LRANGE", key, after, after + limit - 1))  # the list begins with entry 1

    async def census(self) -> dict[RunStatus, int]:
        counts = await self._opened().ask_all([("ZCARD", self._layout.with_status(status)) for status in RunStatus])
        return dict(zip(RunStatus, counts, strict=True))

    # -- retention, pipelines and engines -----------------------------------------------------------------------

    async def prune(self, ended_before: float, limit: int) -> int:
        server, pruned, kept = self._opened(), 0, 0
        while pruned < limit:  # one script for each, so that commits go on in between
            wanted = min(limit - pruned, PRUNED_TOGETHER)
            deleted, passed = await server.run("prune", repr(ended_before), kept, wanted, repeatable=False)
            pruned, kept = pruned + deleted, kept + passed
            if deleted + passed < wanted:
                break
        return pruned

    async def pipelines(self) -> dict[str, bytes]:
        reply = await self._opened().ask("HGETALL", self._layout.key("pipelines"))
        return {name.decode(): definition for name, definition in zip(reply[::2], reply[1::2], strict=True)}

    async def pipelines_mark(self) -> str:
        mark = await self._opened().ask("GET", self._layout.key("pipelines:mark"))
        return "0" if mark is None else str(mark.decode())

    async def put_pipeline(self, name: str, definition: bytes, now: float) -> None:
        server = self._opened()
        with server.translating():
            arguments = (name.encode(), definition)
        await server.run("put_pipeline", *arguments)

    async def delete_pipeline(self, name: str) -> bool:
        server = self._opened()
        with server.translating():
            encoded = name.encode()
        return bool(await server.run("delete_pipeline", encoded, repeatable=False))

    async def attend(self, engine: str, now: float, ttl: float) -> Sequence[str]:
        server = self._opened()
        with server.translating():
            encoded = engine.encode()
        names = await server.run("attend", encoded, repr(now), repr(now - ttl), repr(now + ttl), server.newest_layout)
        return sorted(name.decode() for name in names)

    async def depart(self, engine: str) -> None:
        server = self._opened()
        with server.translating():
            encoded = engine.encode()
        await server.ask("ZREM", self._layout.key("engines"), encoded)

    async def engines(self, since: float) -> Sequence[str]:
        names = await self._opened().ask("ZRANGEBYSCORE", self._layout.key("engines"), repr(since), "+inf")
        return sorted(name.decode() for name in names)

    async def clock(self) -> float | None:
        """Return the server's time. A user without the right to TIME can use the store all the same."""
        if not self._has_clock:
            return None
        try:
            seconds, microseconds = await self._opened().ask("TIME")
        except StoreRefuses:  # the server logs each refusal, so do not ask again
            self._has_clock = False
            return None
        return int(seconds) + int(microseconds) / 1e6

    async def installation(self) -> str:
        server, key = self._opened(), self._layout.key("installation")
        await server.ask("SET", key, secrets.token_hex(16), "NX")
        return str((await server.ask("GET", key)).decode())

    async def note(self, fact: str) -> None:
        server = self._opened()
        with server.translating():
            encoded = fact.encode()
        await server.ask("HSET", self._layout.key("facts"), encoded, "1")

    async def noted(self, fact: str) -> bool:
        server = self._opened()
        with server.translating():
            encoded = fact.encode()
        return await server.ask("HGET", self._layout.key("facts"), encoded) is not None


def _conclude_insert(write: RedisWrite, reply: list[bytes]) -> Created:
    created = Created(CreationOutcome(reply[0].decode()), reply[1].decode())
    if created.outcome is CreationOutcome.CREATED:
        write.note_version()
    return created


def _conclude_update(write: RedisWrite, is_written: int, conflicts: set[str]) -> None:
    if is_written:
        write.note_version()
    else:
        conflicts.add(write.run_id)
