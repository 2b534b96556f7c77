"""The simulated world: a disk and brokers that stay, processes that come and go, and the laws that watch."""

import asyncio
import random
import traceback
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from functools import partial
from typing import Any, NamedTuple

import msgspec

from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.memory import MemoryBroker
from oraculo.core.history import HistoryEntry
from oraculo.core.run import Changes, Run
from oraculo.core.views import run_view
from oraculo.engine.decide.cache import Plans
from oraculo.engine.operations import Operations
from oraculo.engine.service import Engine
from oraculo.errors import InvalidInput, OraculoError
from oraculo.ports.broker import Delivery, Outgoing, publish_all
from oraculo.ports.broker_admin import DeadLetter, FullBroker, QueueState
from oraculo.ports.store import Committed, Creation, CreationOutcome
from oraculo.ports.telemetry import Silent
from oraculo.settings import EngineSettings, QueueSettings, Settings, WebhookSettings, WorkerSettings
from oraculo.stores.sqlite import MEMORY, SqliteStore
from oraculo.testing.simulation.brokers import HostBroker, ServerState, SimulatedServer
from oraculo.testing.simulation.expected_run import Defaults
from oraculo.testing.simulation.faults import Faults
from oraculo.testing.simulation.hosts import OWNER, SimulatedHost
from oraculo.testing.simulation.laws import LAWS, Law
from oraculo.testing.simulation.oracle import Claim, Oracle
from oraculo.testing.simulation.routes import Routes
from oraculo.testing.simulation.scenario import PLAIN_QUEUE, Scenario
from oraculo.testing.simulation.stores import HostStore
from oraculo.testing.simulation.timeline import Timeline
from oraculo.testing.simulation.trouble import Trouble
from oraculo.testing.simulation.virtual_time import EPOCH, SeededEntropy, VirtualClock
from oraculo.testing.simulation.worker_oracle import Identity, WorkerOracle
from oraculo.testing.simulation.workers import plain_worker, sdk_app
from oraculo.wire import naming
from oraculo.wire.message import Message, decode_message
from oraculo.worker import Worker

SETTINGS = Settings(
    engine=EngineSettings(poll=1.0, prefetch=200, batch=50, cached_tasks=40),
    webhook=WebhookSettings(max_attempts=50, backoff=0.5, max_backoff=5.0),
    queues=QueueSettings(remove_after=0),  # no run lasts that long
)
RESTART_WITHIN = 6.0
LOST_FOR_GOOD = 0.3  # the share of brokers that do not come back, when there is another
AWAY_WITHIN = 25.0  # seconds until a broker is back, unless it is away for good
MOST_REMEMBERED = 400
OUTCOME = 10  # the number under which the oracle reports


class Violation(msgspec.Struct, frozen=True):
    law: int
    says: str
    how: str
    at: float


class Garbage(msgspec.Struct, frozen=True):
    server: str
    queue: str
    body: bytes


class Attempt(NamedTuple):
    run: str
    step: str
    number: int


class World:
    def __init__(
        self,
        scenario: Scenario,
        faults: Faults,
        seed: int,
        loop: asyncio.AbstractEventLoop,
        *,
        by_laws_alone: bool = False,
    ) -> None:
        self.scenario = scenario
        self.loop = loop
        self.clock = VirtualClock(loop)
        self.dice = random.Random(f"world {seed}")
        self.entropy = SeededEntropy(random.Random(f"entropy {seed}"))
        self.trouble = Trouble(faults, random.Random(f"trouble {seed}"), self)
        self.disk = SqliteStore(MEMORY, inline=True)
        self.servers = [
            SimulatedServer(name, self.clock, drops_repeats=scenario.drops_repeats, tells_losses=scenario.tells_losses)
            for name in _server_names(scenario.brokers)
        ]
        self.violations: list[Violation] = []
        self.told: list[str] = []  # what happened, for a report
        self.runs: dict[str, Run] = {}  # as they were last committed
        self._asked_by: defaultdict[str, set[str]] = defaultdict(set)  # by run, the brokers that took its request
        self._reopened: set[str] = set()  # runs that an operator asked to reopen
        self._redrives = 0  # under way
        self.failures: set[tuple[str, str, int | None]] = set()  # failures that workers told
        self.too_large_for: dict[tuple[str, str, int | None], set[str]] = {}  # a command, by the brokers that said so
        self.lost: set[Attempt] = set()  # those that were open when their command or answer was lost on its way
        self.garbage: list[Garbage] = []
        self.letters: list[DeadLetter] = []
        self.undisturbed_since = 0.0
        self.over = asyncio.Event()
        self._plans = Plans()
        self._laws: list[Law] = [law(self) for law in LAWS]
        self._timeline = Timeline(EPOCH)
        self._hears_oracles = not by_laws_alone
        self._worker_oracle = WorkerOracle(self._timeline, self._judged)
        self._routes = Routes([server.name for server in self.servers], self._judged)
        runs = SETTINGS.runs
        self._oracle = Oracle(
            scenario.pipelines,
            Defaults(runs.timeout, runs.max_attempts, runs.backoff, runs.max_backoff),
            scenario.engines,
            self._timeline,
            self._judged,
        )
        self._may_lack_letters = False  # some were lost, or discarded
        self._hosts: dict[str, tuple[SimulatedHost, Engine | Worker | None, list[HostBroker]]] = {}
        self._keeping: set[asyncio.Task[object]] = set()
        self.lost_for_good: list[SimulatedServer] = []

    # -- processes --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        await self.disk.start()
        for server in self.servers:
            await server.real.start()
        for number in range(self.scenario.engines):
            self._boot(f"engine-{number}")
        for number in range(self.scenario.workers):
            self._boot(f"worker-{number}")
        self._boot("plain")

    def _boot(self, name: str) -> None:
        host = SimulatedHost(name)
        connections = [HostBroker(server, host, self.trouble, durable=self.scenario.durable) for server in self.servers]
        broker: FullBroker = connections[0] if len(connections) == 1 else FailoverBroker(connections)
        service: Engine | Worker | None = None
        if name.startswith("engine"):
            service = self._engine(host, broker)
            self.hear_out(name, host.spawn(self._start_engine(service, host)))
        elif name.startswith("worker"):
            app = sdk_app(self.scenario.queues, self)
            settings = WorkerSettings(concurrency=self.scenario.places)
            service = Worker(app, broker, settings, clock=self.clock, entropy=self.entropy)
            self.hear_out(name, host.spawn(service.start()))
        else:
            for connection in connections:  # it knows nothing of several, so there is one for each
                self.hear_out(name, host.spawn(plain_worker(PLAIN_QUEUE, connection, connection.name, self)))
        self._hosts[name] = (host, service, connections)
        self.tell(f"{name} starts")

    def _engine(self, host: SimulatedHost, broker: FullBroker) -> Engine:
        return Engine(
            SETTINGS,
            broker,
            HostStore(self.disk, host, self.trouble),
            clock=self.clock,
            entropy=self.entropy,
            telemetry=Silent(),
            post=lambda url, body, headers: self._post(host, body),
        )

    async def _start_engine(self, engine: Engine, host: SimulatedHost) -> None:
        """As a supervisor would: a start that fails is a process that ends, and is started again."""
        try:
            await engine.start()
        except OraculoError as error:
            self.tell(f"{host.name} cannot start: {error}")
            self.crash(host)

    def crash(self, host: SimulatedHost) -> None:
        if not host.alive:
            return
        self.tell(f"{host.name} dies")
        self._disturbed()
        host.die()
        self._oracle.died(host.name)
        _, _, connections = self._hosts[host.name]
        self._keep(self._after_death(host.name, connections))

    async def _after_death(self, name: str, connections: Sequence[HostBroker]) -> None:
        """The broker notices the broken connection a little later; a supervisor starts it again."""
        await asyncio.sleep(self.dice.random())
        for connection in connections:
            await connection.close()
        if name.startswith("engine") and not self.scenario.durable:
            for server in self.servers:
                await self._lose_memory(server)
        await asyncio.sleep(self.dice.random() * RESTART_WITHIN)
        self._boot(name)
        self._disturbed()

    def _keep(self, work: Coroutine[Any, Any, object]) -> None:
        """Work of the world itself: in a context of its own, since a host that dies may be asking for it."""
        task = self.loop.create_task(work, context=Context())
        self.hear_out("the world", task)
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    def engines(self) -> list[Engine]:
        """Those that take work now."""
        services = (service for host, service, _ in self._hosts.values() if host.alive)
        return [service for service in services if isinstance(service, Engine) and service.accepting]

    def operations(self) -> Operations | None:
        """Of some engine that takes work now."""
        ready = self.engines()
        return Operations(self.dice.choice(ready)) if ready else None

    def all_up(self) -> bool:
        return all(host.alive for host, _, _ in self._hosts.values()) and len(self.engines()) == self.scenario.engines

    # -- what happens -----------------------------------------------------------------------------------------

    def tell(self, what: str) -> None:
        if len(self.told) < MOST_REMEMBERED:
            self.told.append(f"{self.loop.time():7.2f} s  {what}")

    def _judged(self, how: str) -> None:
        if self._hears_oracles:
            self._broken(OUTCOME, "the outcome is the one that the contract has", how)

    def law_broken(self, law: Law, how: str) -> None:
        self._broken(law.number, law.says, how)

    def _broken(self, law: int, says: str, how: str) -> None:
        self.violations.append(Violation(law, says, how, self.loop.time()))
        self.tell(f"LAW {law} BROKEN: {how}")
        self.over.set()

    def hear_out(self, who: str, task: "asyncio.Task[Any]") -> None:
        """Nobody waits for it, so nobody else would hear of an error that it ends with."""
        task.add_done_callback(partial(self._ended, who))

    def _ended(self, who: str, task: "asyncio.Task[Any]") -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        self.told += "".join(traceback.format_exception(error)).splitlines()
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
        self._oracle.begins_commit(host.name)
        for one in written:
            before = self.runs.get(one.run.id)
            after = self._plans.restore(snapshots[one.run.id])
            self.runs[one.run.id] = after
            for law in self._laws:
                law.committed(before, after, one.history)
            claims = [_claim(after, entry) for entry in one.history]
            document = msgspec.json.encode(run_view(after))
            self._oracle.committed(host.name, after.id, claims, document, self.loop.time())
            for entry in one.history:
                self.tell(
                    f"{host.name}: {one.run.id} {entry.what} {_step(after, entry.task)} {entry.detail or ''}".rstrip()
                )

    async def reread(self) -> None:
        """Something was written without a commit of runs."""
        self.runs = await self._stored()

    def published(self, host: SimulatedHost, server: str, message: Outgoing) -> None:
        self._note_failure(message)
        self._note_sent_again(message)
        for law in self._laws:
            law.published(message, server)
        if message.queue == "respostas":
            self._reply(message)
        elif not host.name.startswith("engine"):
            self._worker_oracle.publishes(_life(host, server), message.queue, message.body, self.loop.time())
        elif message.queue not in (naming.ANSWERS, naming.REQUESTS):
            self._oracle.command_sent(message.queue, message.body, message.priority, message.reason)

    def offered(self, host: SimulatedHost, server: str, messages: Sequence[Outgoing]) -> None:
        """A process chose this broker for them, whatever comes of it."""
        for message in messages:
            self._check_route(host, server, message)

    def _check_route(self, host: SimulatedHost, server: str, message: Outgoing) -> None:
        """Plain workers know of one broker alone; a mark is for the broker that it is left on."""
        if host.name != "plain" and message.queue != naming.MEMORY and len(self.servers) > 1:
            if message.is_reply:
                brought_by: Collection[str] = self._asked_by[decode_message(message.body).correlation_id]
            else:
                brought_by = self._worker_oracle.brought_by(_life(host, server), message.body)
            what = f"a message of {host.name} to {message.queue}"
            self._routes.chose(host, server, self.loop.time(), what, brought_by)

    def _note_sent_again(self, message: Outgoing) -> None:
        """What was lost before is waited for in vain no more, unless this is lost too."""
        if not self.lost:
            return
        with suppress(InvalidInput):
            told = decode_message(message.body)
            if told.tipo_evento != naming.PROGRESS:
                self.lost.discard(Attempt(told.correlation_id, told.tarefa or "", told.tentativa or 0))

    def _note_failure(self, message: Outgoing) -> None:
        if message.queue != naming.ANSWERS:
            return
        try:
            answer = decode_message(message.body)
        except InvalidInput:
            return
        payload = msgspec.json.decode(answer.payload)
        if payload.get("status") == "erro":
            self.failures.add((answer.correlation_id, answer.tarefa or payload.get("tarefa", ""), answer.tentativa))

    def _reply(self, message: Outgoing) -> None:
        reply = decode_message(message.body)
        self._oracle.delivered(reply.correlation_id, "fila", bytes(reply.payload))
        for law in self._laws:
            law.delivered(reply.correlation_id, "fila", bytes(reply.payload))

    async def _post(self, host: SimulatedHost, body: bytes) -> int:
        self.trouble.step(host)
        if self.trouble.happens("refuse"):
            return 503
        run_id = msgspec.json.decode(body)["correlation_id"]
        self._oracle.delivered(run_id, "webhook", body)
        for law in self._laws:
            law.delivered(run_id, "webhook", body)
        self.trouble.step(host)
        return 200

    def confirmed(self, host: SimulatedHost, server: str, messages: Sequence[Outgoing]) -> None:
        if not host.name.startswith("engine"):
            for message in messages:
                self._worker_oracle.confirmed(_life(host, server), message.body)

    def took(self, host: SimulatedHost, server: str, consumer: object, deliveries: Sequence[Delivery]) -> None:
        moment = self.loop.time()
        for one in deliveries:
            if host.name.startswith("engine"):
                self._oracle.took(host.name, consumer, one.body, redelivered=one.redeliveries > 0, moment=moment)
            else:
                self._worker_oracle.took(_life(host, server), server, one.body, moment)

    def acked(self, host: SimulatedHost, server: str, delivery: Delivery) -> None:
        for law in self._laws:
            law.acked(delivery)
        if host.name.startswith("engine"):
            self._oracle.acked(host.name, delivery.body)
        else:
            self._worker_oracle.acked(_life(host, server), delivery.body)

    def handler_begins(self, identity: Identity) -> None:
        self._worker_oracle.begins(OWNER.get(), identity, self.loop.time())

    def handler_ends(self, server: str, identity: Identity, payload: dict[str, Any]) -> None:
        host = OWNER.get()
        assert host is not None
        self._worker_oracle.ends(_life(host, server), identity, payload)

    def put_aside(self, consumer: object, delivery: Delivery) -> None:
        self._oracle.put_aside(consumer, delivery.body)

    def released(self, consumer: object) -> None:
        self._oracle.released(consumer)

    def went_wrong(self, host: SimulatedHost, server: str, for_seconds: float) -> None:
        self._routes.is_troubled(host, server, self.loop.time() + for_seconds)

    def commit_was_lost(self, host: SimulatedHost) -> None:
        self._oracle.commit_was_lost(host.name)

    def stalled(self) -> None:
        self._timeline.stalled(self.loop.time(), self.loop.time())

    def was_busy(self, host: SimulatedHost, since: float, until: float) -> None:
        self._timeline.was_busy(host.name, since, until)

    def asked(self, body: bytes, key: str | None, server: SimulatedServer | None = None) -> None:
        """`server`: the broker that takes the request, where it does not come by HTTP."""
        run_id = self._oracle.asked(body, key, self.loop.time())
        self._asked_by[run_id] |= set() if server is None else {server.name}

    def refused(self, key: str | None, body: bytes, why: str) -> None:
        self._oracle.refused(key, body, why)

    def operator_asks(self, kind: str, subject: str) -> None:
        self._oracle.operator_asks(kind, subject)
        self._may_lack_letters |= kind == "discard"

    def reopens(self, run_id: str) -> None:
        """An operator asks for it."""
        self._reopened.add(run_id)

    @asynccontextmanager
    async def redriving(self) -> AsyncIterator[None]:
        """An operator asks for it: the runs of whatever is in quarantine when its turn comes."""
        self._redrives += 1
        try:
            yield
        finally:
            self._redrives -= 1
            self._reopened.update(self.runs)

    def may_reopen(self, run_id: str) -> bool:
        return self._redrives > 0 or run_id in self._reopened

    def accepted(self, run_id: str, key: str | None, body: bytes) -> None:
        self._oracle.accepted(run_id, key, body)
        for law in self._laws:
            law.accepted(run_id)

    def repeat_dropped(self, first: Outgoing, message: Outgoing) -> None:
        for law in self._laws:
            law.repeat_dropped(first, message)

    def too_large(self, server: str, message: Outgoing) -> None:
        self.tell(f"a message to {message.queue} is too large for {server}")
        told = decode_message(message.body)
        self.too_large_for.setdefault((told.correlation_id, told.tarefa or "", told.tentativa), set()).add(server)
        self._oracle.too_large(told.correlation_id, told.tarefa or "", told.tentativa)

    def dropped(self, message: Outgoing) -> None:
        self.tell(f"a message to {message.queue} is lost")
        self._note_loss(decode_message(message.body))

    def _note_loss(self, message: Message) -> None:
        """Nobody waits for progress, nor for what comes after the task's end."""
        run = self.runs.get(message.correlation_id)
        number = None if run is None else run.plan.by_id.get(message.tarefa or "")
        if run is None or number is None or message.tipo_evento == naming.PROGRESS:
            return
        if run.tasks[number].is_open and run.tasks[number].attempt == message.tentativa:
            self.lost.add(Attempt(run.id, run.plan.steps[number].id, message.tentativa))

    def deliver_later(self, broker: MemoryBroker, message: Outgoing, delay: float) -> None:
        self.loop.call_later(delay, lambda: self._keep(publish_all(broker, [message])))

    # -- brokers ----------------------------------------------------------------------------------------------

    def some_server(self) -> SimulatedServer | None:
        """One that a client may use now."""
        up = [server for server in self.servers if server.state is ServerState.UP]
        return self.dice.choice(up) if len(up) > 1 else next(iter(up), None)

    async def _lose_memory(self, server: SimulatedServer) -> None:
        self.tell(f"{server.name} loses its memory")
        self._routes.changes(server.name, self.loop.time())
        self._disturbed()
        self._may_lack_letters = True
        self.garbage = [one for one in self.garbage if one.server != server.name]
        await server.lose_memory()
        for law in self._laws:
            law.forgot(server.name)

    async def _leave(self, server: SimulatedServer) -> None:
        state = ServerState.FROZEN if self.trouble.choose(3) == 0 else ServerState.GONE
        self.tell(f"{server.name} is {state.name.lower()}")
        self._disturbed()
        self._routes.leaves(server.name)
        await server.leave(state)
        self._keep(self._return(server, self.trouble.up_to(AWAY_WITHIN)))

    async def _return(self, server: SimulatedServer, after: float) -> None:
        await asyncio.sleep(after)
        if server not in self.lost_for_good and server.state is not ServerState.UP:
            self.tell(f"{server.name} is back")
            self._disturbed()
            self._routes.comes_back(server.name, self.loop.time())
            server.come_back()

    @property
    def is_served(self) -> bool:
        """Whether work can go on: some broker is there, and nobody was just made to wait for another."""
        frozen = [server for server in self.servers if server.state is ServerState.FROZEN]
        return any(server.state is ServerState.UP for server in self.servers) and not set(frozen) - set(
            self.lost_for_good
        )

    # -- time passes ------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Second by second: the faults that need no one's action, and the laws that look at the clock."""
        while not self.over.is_set():
            await asyncio.sleep(1.0)
            for server in self.servers:
                if self.trouble.happens("lose_memory"):
                    await self._lose_memory(server)
                if server.state is ServerState.UP and self.trouble.happens("away"):
                    await self._leave(server)
            if self.trouble.happens("clock_jump"):
                self.clock.skew += self.trouble.up_to(40.0) - 20.0
                self._timeline.clock_was_set(self.loop.time(), self.clock.skew)
                self.tell(f"the clock is set to {self.clock.skew:+.1f} s")
            self.undisturbed_since = max(self.undisturbed_since, self.trouble.last)
            if not (self.all_up() and self.is_served):
                self._disturbed()
            moment = self.loop.time()
            if len(self.engines()) < self.scenario.engines:
                self._timeline.stalled(moment - 1.0, moment)
            for law in self._laws:
                law.second()
            self._oracle.second(moment)

    async def settle(self) -> bool:
        """With nothing going wrong any more: waits until all has ended. False when it does not."""
        self.trouble.is_calm = True
        await self._lose_for_good()
        self.tell("all is calm from here on")
        self._disturbed()
        limit = self.loop.time() + 4 * self.scenario.longest + 40.0
        while self.loop.time() < limit and not self.over.is_set():
            await asyncio.sleep(1.0)
            if self.all_up() and await self._is_quiet():
                return True
        return False

    async def _lose_for_good(self) -> None:
        """All brokers but one, or fewer. Who is away otherwise comes back."""
        for server in self.servers:
            others = [one for one in self.servers if one is not server and one not in self.lost_for_good]
            if others and self.trouble.faults.away and self.dice.random() < LOST_FOR_GOOD:
                self.lost_for_good.append(server)
                state = self.dice.choice((ServerState.GONE, ServerState.FROZEN))
                self.tell(f"{server.name} is {state.name.lower()} for good")
                self._routes.leaves(server.name)
                await server.leave(state)

    async def _is_quiet(self) -> bool:
        if any(run.is_open or run.head.due_at is not None for run in self.runs.values()):
            return False
        if any(task.unsent for run in self.runs.values() for task in run.tasks):
            return False
        states = await self._queues([naming.ANSWERS, naming.REQUESTS, *self.scenario.queues, PLAIN_QUEUE])
        return not any(state.ready or state.unacked for state in states)

    async def _queues(self, names: Sequence[str] | None = None) -> list[QueueState]:
        """Of the brokers that are left."""
        return [state for broker in self._left() for state in await broker.queues(names)]

    def _left(self) -> list[MemoryBroker]:
        return [server.real for server in self.servers if server not in self.lost_for_good]

    async def judge(self) -> None:
        """At the end, the laws look at everything."""
        histories = {run_id: await self.disk.history(run_id, limit=100_000) for run_id in self.runs}
        queues = await self._queues()
        self.letters = [
            letter
            for broker in self._left()
            for state in await broker.queues()
            for letter in await broker.dead_letters(state.queue, limit=10_000)
        ]
        gone = [server.name for server in self.lost_for_good]
        self.garbage = [one for one in self.garbage if one.server not in gone]
        for law in self._laws:
            law.at_rest(histories, queues)
        documents = {run_id: msgspec.json.encode(run_view(run)) for run_id, run in (await self._stored()).items()}
        is_sure = not (self._may_lack_letters or self.lost_for_good)
        self._oracle.at_rest(documents, self._resting() if is_sure else None)

    async def _stored(self) -> dict[str, Run]:
        return {run_id: self._plans.restore(one) for run_id, one in (await self.disk.load(list(self.runs))).items()}

    def _resting(self) -> list[tuple[str, str, int]]:
        """The commands among the dead letters."""
        letters = [letter for letter in self.letters if letter.queue not in (naming.ANSWERS, naming.REQUESTS)]
        commands = [decode_message(letter.body) for letter in letters]
        return [(one.correlation_id, one.tarefa or "", one.tentativa or 0) for one in commands]

    def statuses(self) -> Counter[str]:
        return Counter(run.head.status.value for run in self.runs.values())

    async def close(self) -> None:
        for host, _, _ in self._hosts.values():
            host.die()
        for task in list(self._keeping):
            task.cancel()
        await asyncio.sleep(0)
        for server in self.servers:
            await server.real.close()
        await self.disk.close()


def _server_names(count: int) -> list[str]:
    return ["simulated"] if count == 1 else [f"simulated-{number}" for number in range(1, count + 1)]


def _life(host: SimulatedHost, server: str) -> object:
    """A worker without the SDK is one for each broker."""
    return host if host.name.startswith("worker") else (host, server)


def _claim(run: Run, entry: HistoryEntry) -> Claim:
    task = None if entry.task is None else run.plan.steps[entry.task].id
    return Claim(entry.what.value, task, entry.attempt, entry.detail or "", entry.at)


def _step(run: Run, task: int | None) -> str:
    return "" if task is None else run.plan.steps[task].id
