"""Sample runs for `store_suite`, made by the core as the engine makes them."""

import unittest
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from oraculo.core.events import Answered, Event
from oraculo.core.machine import apply, start
from oraculo.core.plan import Plan
from oraculo.core.request import Limits, definition_of, new_run, read_request
from oraculo.core.run import (
    Cause,
    Changes,
    Channel,
    DeliveryStatus,
    Run,
    RunDelivery,
    RunHead,
    RunStatus,
    Task,
    TaskStatus,
)
from oraculo.pipeline.definition import Definition, decode_definition
from oraculo.ports.browse import RunQuery
from oraculo.ports.store import Creation, CreationOutcome, Snapshot, Storage, Unsent

NOW = 1_731_636_000.123456  # no round number in binary, to catch a store that rounds times
OK = b'{"status":"ok"}'
UNWRITABLE = "\ud800"  # half a character, which no store can encode

# A store that decodes and encodes these again changes at least one.
PAYLOADS = (
    b"{}",
    b'{ "spaced" : [ 1 , 2 ] , "empty": "" }',
    b'{"b":1,"a":2,"b":3}',
    '{"unicode":"ação 漢字 \u200f🙂"}'.encode(),
    b'{"escapes":"\\u00e9 \\n \\" \\\\ \\ud83d\\ude42"}',
    b'{"big":123456789012345678901234567890,"negative":-9223372036854775809}',
    b'{"floats":[0.1,1e-300,1E+300,-0.0,1.0,100000000000000000000.0]}',
    b'{"nothing":[null,true,false,[],{},""]}',
    b'{"deep":' + b"[" * 100 + b"]" * 100 + b"}",
    b'{"long":"' + b"x" * 300_000 + b'"}',
)


class SamplePlans:
    """A minimal cache of compiled definitions."""

    def __init__(self) -> None:
        self._plans: dict[str, Plan] = {}

    def plan(self, definition_hash: str, encoded: bytes, definition: Definition | None = None) -> Plan:
        if definition_hash not in self._plans:
            self._plans[definition_hash] = Plan(definition or decode_definition(encoded))
        return self._plans[definition_hash]


class SampleRoutes:
    """Routes: any name is a route to three queues."""

    def __init__(self, name: str) -> None:
        self.routes = {name: ("escavador_a", "escavador_b", "executador_c")}
        self.pipelines: dict[str, Definition] = {}


PLANS = SamplePlans()
raises = unittest.TestCase().assertRaises


def make_run(run_id: str, *, payload: bytes = b"{}", now: float = NOW, name: str = "", **fields: Any) -> Run:
    """Return a run that has not started, of three tasks unless the `fields` of the request differ."""
    subject = {} if "destinos" in fields else {"tipo": name or "rota"}
    body = {"timeout": 60, "payload": msgspec.Raw(payload)} | subject | fields
    request = read_request(msgspec.json.encode(body), Limits())
    definition = definition_of(request, SampleRoutes(name or "rota"), default_timeout=60.0)
    return new_run(request, definition, run_id=run_id, now=now, plans=PLANS, traceparent=None)


def creation(run: Run, *, key: str | None = None, fingerprint: str = "same") -> Creation:
    return Creation(start(run, run.head.created_at), fingerprint, key)


def revived(snapshot: Snapshot) -> Run:
    plan = PLANS.plan(snapshot.head.definition_hash, snapshot.definition)
    return Run(snapshot.head, plan, snapshot.definition, snapshot.payload, snapshot.tasks)


def changed(run: Run, *events: Event, now: float = NOW + 1) -> Changes:
    changes = Changes(run)
    for event in events:
        apply(run, event, now, changes)
    return changes


def succeeded(run: Run, now: float = NOW + 1) -> Changes:
    return changed(run, *(Answered(task.number, 1, OK) for task in run.tasks), now=now)


def failure(task: int, *, retryable: bool = False) -> Answered:
    return Answered(task, 1, b"{}", failed=True, retryable=retryable, reason="broken", mark=7, jitter=1.0)


def stored_form(tasks: Iterable[Task]) -> list[Task]:
    """Return tasks as they come back: `missing` is counted again on load."""
    return [msgspec.structs.replace(task, missing=0) for task in tasks]


async def assert_task_stored(store: Storage, run: Run, number: int) -> None:
    task = await store.task(run.id, number)
    assert task is not None
    assert stored_form([task]) == stored_form([run.tasks[number]])


async def create(store: Storage, *runs: Run) -> None:
    committed = await store.commit([creation(run) for run in runs], [])
    assert [created.outcome for created in committed.created] == [CreationOutcome.CREATED] * len(runs)


async def change(store: Storage, *changes: Changes) -> None:
    assert (await store.commit([], changes)).conflicts == frozenset()


async def load(store: Storage, run_id: str) -> Snapshot:
    return (await store.load([run_id]))[run_id]


async def ids_of(store: Storage, query: RunQuery) -> list[str]:
    return [head.id for head in (await store.runs(query)).heads]


async def assert_stored(store: Storage, run: Run) -> None:
    snapshot = await load(store, run.id)
    assert snapshot.head == run.head
    assert stored_form(snapshot.tasks) == stored_form(run.tasks)
    assert (snapshot.definition, snapshot.payload) == (run.definition, run.payload)


def full_head(head: RunHead) -> RunHead:
    """Return the head with a value other than the default in every field."""
    changes: dict[str, Any] = {
        "status": RunStatus.PARTIAL,
        "deadline": NOW + 61,
        "ended_at": NOW + 3.3,
        "due_at": NOW + 13.3,
        "edition": 2,
        "cancelled": True,
        "deliveries": [
            RunDelivery(Channel.WEBHOOK, "https://a.org/é?x=1", DeliveryStatus.UNDELIVERED, 2, 5, None, 'HTTP 500 "x"'),
            RunDelivery(Channel.QUEUE, "respostas", DeliveryStatus.DELIVERED, 1, 1, NOW + 9.9, via="rabbitmq-2"),
        ],
    }
    counters = ("entries", "late", "duplicates", "succeeded", "failed", "timed_out", "skipped", "task_cancelled")
    counts = {name: 2**31 + number for number, name in enumerate(counters)}
    return msgspec.structs.replace(head, **changes, **counts)


def full_task(task: Task) -> Task:
    return Task(
        number=task.number,
        status=TaskStatus.FAILED,
        attempt=3,
        last_attempt=5,
        unsent=True,
        due_at=NOW + 1.1,
        deadline=NOW + 2.2,
        result=PAYLOADS[4],
        cause=Cause.ANSWER,
        reason="motivo: não há",
        mark=2**32 - 1,
        percent=99.9,
        note="",
        sent_at=0.0,
        ended_at=NOW + 4.4,
        dead_letter=True,
        via="rabbitmq-2",
    )


async def unsent_pages(store: Storage, limit: int) -> list[Sequence[Unsent]]:
    """Return the pages until there is none."""
    pages: list[Sequence[Unsent]] = []
    after = None
    while page := await store.unsent(limit, after):
        pages.append(page)
        after = (page[-1].run_id, page[-1].task)
    return pages


async def everything(store: Storage, runs: Sequence[Run]) -> list[Any]:
    loaded = await store.load([run.id for run in runs])
    history = [list(await store.history(run.id)) for run in runs]
    timers = [list(await store.due(NOW + 10_000, 100)), await store.next_due()]
    return [loaded, history, timers, list(await store.unsent(100)), await store.census(), await store.pipelines()]
