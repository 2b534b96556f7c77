"""The simulated world: a disk and brokers that stay, processes that come and go, and faults that happen."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextvars import Context
from typing import Any, cast

import msgspec

from oraculo.brokers.failover import FailoverBroker
from oraculo.brokers.memory import MemoryBroker
from oraculo.core.views import run_view
from oraculo.engine.operations import Operations
from oraculo.engine.ports import Ports
from oraculo.engine.service import Engine
from oraculo.engine.wiring import make_engine
from oraculo.errors import OraculoError
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.broker_admin import FullBroker, QueueState
from oraculo.ports.store import Storage
from oraculo.ports.telemetry import Silent
from oraculo.settings import WorkerSettings
from oraculo.testing.simulation.brokers import HostBroker, ServerState, SimulatedServer
from oraculo.testing.simulation.faults import Faults
from oraculo.testing.simulation.hosts import SimulatedHost
from oraculo.testing.simulation.scenario import PLAIN_QUEUE, Scenario
from oraculo.testing.simulation.stores import HostStore
from oraculo.testing.simulation.trouble import Trouble
from oraculo.testing.simulation.virtual_time import SeededEntropy
from oraculo.testing.simulation.witness import SETTINGS, Witness
from oraculo.testing.simulation.workers import plain_worker, sdk_app
from oraculo.wire import naming
from oraculo.worker import Worker

RESTART_WITHIN = 6.0
LOST_FOR_GOOD = 0.3  # share of brokers that never come back, if there is another
AWAY_WITHIN = 25.0  # seconds until a broker is back


class World(Witness):
    """The world of one seed."""

    def __init__(
        self,
        scenario: Scenario,
        faults: Faults,
        seed: int,
        loop: asyncio.AbstractEventLoop,
        *,
        by_laws_alone: bool = False,
    ) -> None:
        super().__init__(scenario, loop, by_laws_alone=by_laws_alone)
        self.dice = random.Random(f"world {seed}")
        self.entropy = SeededEntropy(random.Random(f"entropy {seed}"))
        self.trouble = Trouble(faults, random.Random(f"trouble {seed}"), self)
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
        each = [connection.whole() for connection in connections]
        broker = each[0] if len(each) == 1 else FailoverBroker(each)
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
            for connection in connections:  # a plain worker for each broker, because it can use only one
                self.hear_out(name, host.spawn(plain_worker(PLAIN_QUEUE, connection.whole(), connection.name, self)))
        self._hosts[name] = (host, service, connections)
        self.log(f"{name} starts")

    def _engine(self, host: SimulatedHost, broker: FullBroker) -> Engine:
        ports = Ports(
            broker,
            cast("Storage", HostStore(self.disk, host, self.trouble)),
            self.clock,
            self.entropy,
            Silent(),
            post=lambda url, body, headers: self._post(host, body),
        )
        return make_engine(SETTINGS, ports)

    async def _start_engine(self, engine: Engine, host: SimulatedHost) -> None:
        """Start an engine as a supervisor does: a start that fails ends the process, which is started again."""
        try:
            await engine.start()
        except OraculoError as error:
            self.log(f"{host.name} cannot start: {error}")
            self.crash(host)

    def crash(self, host: SimulatedHost) -> None:
        if not host.alive:
            return
        self.log(f"{host.name} dies")
        self._disturbed()
        host.die()
        self.oracle.died(host.name)
        _, _, connections = self._hosts[host.name]
        self._keep(self._after_death(host.name, connections))

    async def _after_death(self, name: str, connections: Sequence[HostBroker]) -> None:
        """Close the connections a little later, and start the process again like a supervisor."""
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
        """Start work of the world itself, in a context of its own: the caller may be a host that dies."""
        task = self.loop.create_task(work, context=Context())
        self.hear_out("the world", task)
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    def engines(self) -> list[Engine]:
        """Return the engines that take work now."""
        services = (service for host, service, _ in self._hosts.values() if host.alive)
        return [service for service in services if isinstance(service, Engine) and service.accepting]

    def operations(self) -> Operations | None:
        """Return the operations of some engine that takes work now."""
        ready = self.engines()
        return self.dice.choice(ready).operations if ready else None

    def all_up(self) -> bool:
        return all(host.alive for host, _, _ in self._hosts.values()) and len(self.engines()) == self.scenario.engines

    async def _post(self, host: SimulatedHost, body: bytes) -> int:
        self.trouble.step(host)
        if self.trouble.happens("refuse"):
            return 503
        run_id = msgspec.json.decode(body)["correlation_id"]
        self.oracle.delivered(run_id, "webhook", body)
        for law in self._laws:
            law.delivered(run_id, "webhook", body)
        self.trouble.step(host)
        return 200

    def deliver_later(self, broker: MemoryBroker, message: Outgoing, delay: float) -> None:
        self.loop.call_later(delay, lambda: self._keep(publish_all(broker, [message])))

    # -- brokers ----------------------------------------------------------------------------------------------

    def some_server(self) -> SimulatedServer | None:
        """Return a broker that a client may use now."""
        up = [server for server in self.servers if server.state is ServerState.UP]
        return self.dice.choice(up) if len(up) > 1 else next(iter(up), None)

    async def _lose_memory(self, server: SimulatedServer) -> None:
        self.log(f"{server.name} loses its memory")
        self._routes.changes(server.name, self.loop.time())
        self._disturbed()
        self._may_lack_dead_letters = True
        self.garbage = [one for one in self.garbage if one.server != server.name]
        await server.lose_memory()
        for law in self._laws:
            law.forgot(server.name)

    async def _leave(self, server: SimulatedServer) -> None:
        state = ServerState.FROZEN if self.trouble.choose(3) == 0 else ServerState.GONE
        self.log(f"{server.name} is {state.name.lower()}")
        self._disturbed()
        self._routes.leaves(server.name)
        await server.leave(state)
        self._keep(self._return(server, self.trouble.up_to(AWAY_WITHIN)))

    async def _return(self, server: SimulatedServer, after: float) -> None:
        await asyncio.sleep(after)
        if server not in self.lost_for_good and server.state is not ServerState.UP:
            self.log(f"{server.name} is back")
            self._disturbed()
            self._routes.comes_back(server.name, self.loop.time())
            server.come_back()

    @property
    def is_served(self) -> bool:
        """Return True when work can go on: some broker works, and none has frozen."""
        frozen = [server for server in self.servers if server.state is ServerState.FROZEN]
        return any(server.state is ServerState.UP for server in self.servers) and not set(frozen) - set(
            self.lost_for_good
        )

    # -- time passes ------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Cause the faults of each second, and let the laws look at the clock."""
        while not self.over.is_set():
            await asyncio.sleep(1.0)
            for server in self.servers:
                if self.trouble.happens("lose_memory"):
                    await self._lose_memory(server)
                if server.state is ServerState.UP and self.trouble.happens("away"):
                    await self._leave(server)
            if self.trouble.happens("clock_jump"):
                self.clock.skew += self.trouble.up_to(40.0) - 20.0
                self.timeline.clock_was_set(self.loop.time(), self.clock.skew)
                self.log(f"the clock is set to {self.clock.skew:+.1f} s")
            self.undisturbed_since = max(self.undisturbed_since, self.trouble.last)
            if not (self.all_up() and self.is_served):
                self._disturbed()
            moment = self.loop.time()
            if len(self.engines()) < self.scenario.engines:
                self.timeline.stalled(moment - 1.0, moment)
            for law in self._laws:
                law.second()
            self.oracle.second(moment)

    async def settle(self) -> bool:
        """Stop all faults and wait until everything has ended. Returns False when it does not."""
        self.trouble.is_calm = True
        await self._lose_for_good()
        self.log("all is calm from here on")
        self._disturbed()
        limit = self.loop.time() + 4 * self.scenario.longest + 40.0
        while self.loop.time() < limit and not self.over.is_set():
            await asyncio.sleep(1.0)
            if self.all_up() and await self._is_quiet():
                return True
        return False

    async def _lose_for_good(self) -> None:
        """Lose some brokers forever, but never the last one."""
        for server in self.servers:
            others = [one for one in self.servers if one is not server and one not in self.lost_for_good]
            if others and self.trouble.faults.away and self.dice.random() < LOST_FOR_GOOD:
                self.lost_for_good.append(server)
                state = self.dice.choice((ServerState.GONE, ServerState.FROZEN))
                self.log(f"{server.name} is {state.name.lower()} for good")
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
        """Return the queues of the brokers that are left."""
        return [state for broker in self._left() for state in await broker.queues(names)]

    def _left(self) -> list[MemoryBroker]:
        return [server.real for server in self.servers if server not in self.lost_for_good]

    async def judge(self) -> None:
        """Let the laws and oracles look at everything at the end."""
        histories = {run_id: await self.disk.history(run_id, limit=100_000) for run_id in self.runs}
        queues = await self._queues()
        self.dead_letters = [
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
        is_sure = not (self._may_lack_dead_letters or self.lost_for_good)
        self.oracle.at_rest(documents, self._resting() if is_sure else None)

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
