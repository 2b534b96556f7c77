"""The witness: every event of the simulated world, and the laws and oracles that judge it."""

import asyncio
import traceback
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, Run
from oraculo.core.views import run_view
from oraculo.engine.decide.cache import Plans
from oraculo.engine.service import Engine
from oraculo.ports.broker import Delivery, Outgoing
from oraculo.ports.broker_admin import DeadLetter
from oraculo.ports.store import Committed, Creation, CreationOutcome
from oraculo.settings import EngineSettings, Settings, WebhookSettings
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.testing.simulation.brokers import SimulatedServer
from oraculo.testing.simulation.hosts import OWNER, SimulatedHost
from oraculo.testing.simulation.laws import LAWS, Law
from oraculo.testing.simulation.oracle import Claim, Oracle
from oraculo.testing.simulation.routes import Routes
from oraculo.testing.simulation.scenario import Scenario
from oraculo.testing.simulation.timeline import Timeline
from oraculo.testing.simulation.virtual_time import EPOCH, VirtualClock
from oraculo.testing.simulation.worker_oracle import Identity, WorkerOracle
from oraculo.wire import naming
from oraculo.wire.message import decode_message

SETTINGS = Settings(
    engine=EngineSettings(poll=1.0, prefetch=200, batch=50, cached_tasks=40),
    webhook=WebhookSettings(max_attempts=50, backoff=0.5, max_backoff=5.0),
)
MOST_REMEMBERED = 400
OUTCOME = 10  # the number under which the oracle reports


class Violation(msgspec.Struct, frozen=True):
    """A broken law."""

    law: int
    says: str
    how: str
    at: float


class Garbage(msgspec.Struct, frozen=True):
    """An invalid message that was put on a queue."""

    server: str
    queue: str
    body: bytes


class Witness:
    """The observer of the world: it passes each event to the laws and oracles. `World` makes the events happen."""

    def __init__(self, scenario: Scenario, loop: asyncio.AbstractEventLoop, *, by_laws_alone: bool) -> None:
        self.scenario = scenario
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.disk = SqliteStore(MEMORY, inline=True)
        self.servers = [
            SimulatedServer(name, self.clock, drops_repeats=scenario.drops_repeats)
            for name in _server_names(scenario.brokers)
        ]
        self.violations: list[Violation] = []
        self.story: list[str] = []  # events, for the report
        self.runs: dict[str, Run] = {}  # as last committed
        self._asked_by: defaultdict[str, set[str]] = defaultdict(set)  # run -> brokers that took its request
        self._reopened: set[str] = set()  # runs that an operator reopens
        self._redrives = 0  # redrives in progress
        self.garbage: list[Garbage] = []
        self.dead_letters: list[DeadLetter] = []
        self.undisturbed_since = 0.0
        self.over = asyncio.Event()
        self._plans = Plans()
        self._laws: list[Law] = [law(self) for law in LAWS]
        self.timeline = Timeline(EPOCH)
        self._hears_oracles = not by_laws_alone
        self._worker_oracle = WorkerOracle(self.timeline, self._judged)
        self._routes = Routes([server.name for server in self.servers], self._judged)
        self.oracle = Oracle(
            scenario.pipelines,
            SETTINGS.runs,
            scenario.engines,
            len(self.servers),
            self.timeline,
            self._judged,
        )
        self._may_lack_dead_letters = False  # some were lost or discarded

    def log(self, what: str) -> None:
        if len(self.story) < MOST_REMEMBERED:
            self.story.append(f"{self.loop.time():7.2f} s  {what}")

    def _judged(self, how: str) -> None:
        if self._hears_oracles:
            self._broken(OUTCOME, "the outcome is the one that the contract has", how)

    def law_broken(self, law: Law, how: str) -> None:
        self._broken(law.number, law.says, how)

    def _broken(self, law: int, says: str, how: str) -> None:
        self.violations.append(Violation(law, says, how, self.loop.time()))
        self.log(f"LAW {law} BROKEN: {how}")
        self.over.set()

    def hear_out(self, who: str, task: "asyncio.Task[Any]") -> None:
        """Report the error that a task ends with, because nobody awaits the task."""
        task.add_done_callback(partial(self._ended, who))

    def _ended(self, who: str, task: "asyncio.Task[Any]") -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        self.story += "".join(traceback.format_exception(error)).splitlines()
        self._broken(0, "nothing ends in an error that nobody foresaw", f"{who}: {type(error).__name__}: {error}")

    def _disturbed(self) -> None:
        self.undisturbed_since = self.loop.time()

    async def committed(
        self, host: SimulatedHost, creations: Sequence[Creation], changes: Sequence[Changes], committed: Committed
    ) -> None:
        created = [
            one.changes
            for one, outcome in zip(creations, committed.created, strict=True)
            if outcome.outcome is CreationOutcome.CREATED
        ]
        written = [*created, *(one for one in changes if one.run.id not in committed.conflicts)]
        snapshots = await self.disk.load([one.run.id for one in written])
        self.oracle.begins_commit(host.name)
        for one in written:
            before = self.runs.get(one.run.id)
            after = self._plans.restore(snapshots[one.run.id])
            self.runs[one.run.id] = after
            for law in self._laws:
                law.committed(before, after, one.history)
            claims = [_claim(after, entry) for entry in one.history]
            document = msgspec.json.encode(run_view(after))
            self.oracle.committed(host.name, after.id, claims, document, self.loop.time())
            for entry in one.history:
                self.log(
                    f"{host.name}: {one.run.id} {entry.what} {_step(after, entry.task)} {entry.detail or ''}".rstrip()
                )

    async def reread(self) -> None:
        """Read the runs again, after a write that was no commit of runs."""
        self.runs = await self._stored()

    def published(self, host: SimulatedHost, server: str, message: Outgoing) -> None:
        for law in self._laws:
            law.published(message, server)
        if message.queue == "respostas":
            self._reply(message)
        elif not host.name.startswith("engine"):
            self._worker_oracle.publishes(_life(host, server), message.queue, message.body, self.loop.time())
        elif message.queue not in (naming.ANSWERS, naming.REQUESTS):
            self.oracle.command_sent(message.queue, message.body, message.priority, message.reason)

    def offered(self, host: SimulatedHost, server: str, messages: Sequence[Outgoing]) -> None:
        """Check the broker that a process chose, whatever comes of it."""
        for message in messages:
            self._check_route(host, server, message)

    def _check_route(self, host: SimulatedHost, server: str, message: Outgoing) -> None:
        """Check the choice of a broker.

        Plain workers know one broker alone, and a mark belongs to the broker that it is left on.
        """
        if host.name != "plain" and message.queue != naming.MEMORY and len(self.servers) > 1:
            if message.is_reply:
                brought_by: Collection[str] = self._asked_by[decode_message(message.body).correlation_id]
            else:
                brought_by = self._worker_oracle.brought_by(_life(host, server), message.body)
            what = f"a message of {host.name} to {message.queue}"
            self._routes.chose(host, server, self.loop.time(), what, brought_by)

    def _reply(self, message: Outgoing) -> None:
        reply = decode_message(message.body)
        self.oracle.delivered(reply.correlation_id, "fila", bytes(reply.payload))
        for law in self._laws:
            law.delivered(reply.correlation_id, "fila", bytes(reply.payload))

    def confirmed(self, host: SimulatedHost, server: str, messages: Sequence[Outgoing]) -> None:
        if not host.name.startswith("engine"):
            for message in messages:
                self._worker_oracle.confirmed(_life(host, server), message.body)

    def took(self, host: SimulatedHost, server: str, consumer: object, deliveries: Sequence[Delivery]) -> None:
        moment = self.loop.time()
        for one in deliveries:
            if host.name.startswith("engine"):
                self.oracle.took(host.name, consumer, one.body, redelivered=one.redeliveries > 0, moment=moment)
            else:
                self._worker_oracle.took(_life(host, server), server, one.body, moment)

    def acked(self, host: SimulatedHost, server: str, delivery: Delivery) -> None:
        for law in self._laws:
            law.acked(delivery)
        if host.name.startswith("engine"):
            self.oracle.acked(host.name, delivery.body)
        else:
            self._worker_oracle.acked(_life(host, server), delivery.body)

    def handler_begins(self, identity: Identity) -> None:
        self._worker_oracle.begins(OWNER.get(), identity, self.loop.time())

    def handler_ends(self, server: str, identity: Identity, payload: dict[str, Any]) -> None:
        host = OWNER.get()
        assert host is not None
        self._worker_oracle.ends(_life(host, server), identity, payload)

    def route_went_wrong(self, host: SimulatedHost, server: str, for_seconds: float) -> None:
        self._routes.is_troubled(host, server, self.loop.time() + for_seconds)

    def asked(self, body: bytes, key: str | None, server: SimulatedServer | None = None) -> None:
        """Record a request. `server` is the broker that takes it, unless it comes by HTTP."""
        run_id = self.oracle.asked(body, key, self.loop.time())
        self._asked_by[run_id] |= set() if server is None else {server.name}

    def operator_asks(self, kind: str, subject: str) -> None:
        self.oracle.operator_asks(kind, subject)
        self._may_lack_dead_letters |= kind == "discard"

    def reopens(self, run_id: str) -> None:
        """Record that an operator retries this run."""
        self._reopened.add(run_id)

    @asynccontextmanager
    async def redriving(self) -> AsyncIterator[None]:
        """Record that an operator redrives dead letters: any run may reopen until it is done."""
        self._redrives += 1
        try:
            yield
        finally:
            self._redrives -= 1
            self._reopened.update(self.runs)

    def engines(self) -> list[Engine]:
        """Return the engines that take work now. `World` knows them."""
        raise NotImplementedError

    def may_reopen(self, run_id: str) -> bool:
        return self._redrives > 0 or run_id in self._reopened

    def accepted(self, run_id: str, key: str | None, body: bytes) -> None:
        self.oracle.accepted(run_id, key, body)
        for law in self._laws:
            law.accepted(run_id)

    def repeat_dropped(self, first: Outgoing, message: Outgoing) -> None:
        for law in self._laws:
            law.repeat_dropped(first, message)

    def too_large(self, server: str, message: Outgoing) -> None:
        self.log(f"a message to {message.queue} is too large for {server}")
        command = decode_message(message.body)
        self.oracle.too_large(server, (command.correlation_id, command.tarefa or "", command.tentativa))

    def dropped(self, message: Outgoing) -> None:
        self.log(f"a message to {message.queue} is lost")

    async def _stored(self) -> dict[str, Run]:
        return {run_id: self._plans.restore(one) for run_id, one in (await self.disk.load(list(self.runs))).items()}

    def _resting(self) -> list[tuple[str, str, int]]:
        """Return the commands among the dead letters."""
        letters = [letter for letter in self.dead_letters if letter.queue not in (naming.ANSWERS, naming.REQUESTS)]
        commands = [decode_message(letter.body) for letter in letters]
        return [(one.correlation_id, one.tarefa or "", one.tentativa or 0) for one in commands]


def _server_names(count: int) -> list[str]:
    return ["simulated"] if count == 1 else [f"simulated-{number}" for number in range(1, count + 1)]


def _life(host: SimulatedHost, server: str) -> object:
    """Return the identity of a process' life. A worker without the SDK has one for each broker."""
    return host if host.name.startswith("worker") else (host, server)


def _claim(run: Run, entry: HistoryEntry) -> Claim:
    task = None if entry.task is None else run.plan.steps[entry.task].id
    return Claim(entry.what.value, task, entry.attempt, entry.detail or "", entry.at)


def _step(run: Run, task: int | None) -> str:
    return "" if task is None else run.plan.steps[task].id
