"""Running one seed, from the first moment to rest."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from oraculo.core.run import Run
from oraculo.errors import Conflict, InvalidInput, OraculoError
from oraculo.pipeline.definition import encode_definition, parse_pipeline
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.testing.simulation.brokers import SimulatedServer
from oraculo.testing.simulation.faults import Faults
from oraculo.testing.simulation.hosts import own_tasks
from oraculo.testing.simulation.scenario import Action, Scenario, full_scenario
from oraculo.testing.simulation.virtual_time import Stuck, VirtualLoop
from oraculo.testing.simulation.witness import Garbage, Violation
from oraculo.testing.simulation.world import World

CLIENT_PATIENCE = 40.0
_GOES_ON = 0.05  # seconds that a seed goes on after a violation, to report the next ones


class SeedOutcome(msgspec.Struct):
    """The outcome of one seed."""

    seed: int
    scenario: Scenario
    faults: Faults
    violations: list[Violation]
    story: list[str]
    statuses: Counter[str]
    troubles: Counter[str]
    runs: dict[str, Run]  # the runs at rest

    @property
    def is_clean(self) -> bool:
        return not self.violations


def run_seed(
    seed: int, faults: Faults | None = None, scenario: Scenario | None = None, *, by_laws_alone: bool = False
) -> SeedOutcome:
    """Simulate one seed, and return what the laws and the oracles found."""
    scenario = scenario or full_scenario(seed)
    faults = Faults.usual() if faults is None else faults
    loop = VirtualLoop()
    loop.set_task_factory(own_tasks)  # type: ignore[arg-type]
    asyncio.set_event_loop(loop)
    try:
        world = World(scenario, faults, seed, loop, by_laws_alone=by_laws_alone)
        try:
            loop.run_until_complete(_play(world))
        except Stuck as error:
            world.violations.append(Violation(2, "every run ends", f"the simulation is stuck: {error}", loop.time()))
        return SeedOutcome(
            seed=seed,
            scenario=scenario,
            faults=faults,
            violations=world.violations,
            story=world.story,
            statuses=world.statuses(),
            troubles=world.trouble.counts,
            runs=world.runs,
        )
    finally:
        with suppress(Stuck):  # from tasks that do not end when cancelled
            _end_all(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _end_all(loop: asyncio.AbstractEventLoop) -> None:
    """End every task of the loop: thousands of seeds run in one process, and nothing may outlive its loop."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


async def _play(world: World) -> None:
    loop = world.loop
    await world.open()
    life = loop.create_task(world.live())
    world.hear_out("the world", life)
    clients = [loop.create_task(_act(world, action)) for action in world.scenario.actions]
    for action, client in zip(world.scenario.actions, clients, strict=True):
        world.hear_out(f"{action.kind} at {action.at:.2f} s", client)
    try:
        await _define_pipelines(world)
        await _until(loop.time() + world.scenario.lasts + 5.0, world)
        rested = await world.settle()
        if not world.violations:
            if not rested:
                world.log("it did not come to rest")
            await world.judge()
            if not rested and not world.violations:
                world.violations.append(Violation(2, "every run ends", "it did not come to rest", loop.time()))
    finally:
        life.cancel()
        for client in clients:
            client.cancel()
        await world.close()


async def _until(moment: float, world: World) -> None:
    left = moment - world.loop.time()
    if left > 0:
        try:
            await asyncio.wait_for(world.over.wait(), left)
        except TimeoutError:
            return
        await asyncio.sleep(_GOES_ON)


async def _define_pipelines(world: World) -> None:
    """Put the pipelines straight into the store, because putting is not simulated."""
    for name, source in world.scenario.pipelines.items():
        await world.disk.put_pipeline(name, encode_definition(parse_pipeline(source)), 0.0)


async def _act(world: World, action: Action) -> None:
    await asyncio.sleep(action.at)
    world.log(f"asked: {action.kind} {action.subject or action.queue or ''}".rstrip())
    try:
        async with asyncio.timeout(CLIENT_PATIENCE):
            await _ACTIONS[action.kind](world, action)
    except (OraculoError, TimeoutError) as error:
        world.log(f"answered: {action.kind}: {type(error).__name__}: {error}")


class _Envelope(msgspec.Struct):
    """The message of a request."""

    payload: msgspec.Raw


async def _submit(world: World, action: Action) -> None:
    """Submit as a careful client does: again under the same key, until there is an answer."""
    world.asked(action.body, action.key)
    while True:
        operations = world.operations()
        try:
            if operations is not None:
                async with asyncio.timeout(5.0):
                    submitted = await operations.submit(action.body, idempotency_key=action.key)
                world.accepted(submitted.run_id, action.key, action.body)
                return
        except TimeoutError:
            pass
        except (InvalidInput, Conflict) as error:
            world.oracle.refused(action.key, action.body, str(error))
            raise
        await asyncio.sleep(0.5)


async def _enqueue(world: World, action: Action) -> None:
    server = await _reachable(world)
    world.asked(bytes(msgspec.json.decode(action.body, type=_Envelope).payload), None, server)
    await publish_all(server.real, [Outgoing("orquestrador", action.body)])


async def _garbage(world: World, action: Action) -> None:
    server = await _reachable(world)
    world.garbage.append(Garbage(server.name, action.queue, action.body))
    await publish_all(server.real, [Outgoing(action.queue, action.body)])


async def _reachable(world: World) -> SimulatedServer:
    while True:
        if (server := world.some_server()) is not None:
            return server
        await asyncio.sleep(0.5)


async def _cancel(world: World, action: Action) -> None:
    if operations := world.operations():
        world.operator_asks("cancel", f"r{action.subject}")
        await operations.cancel(f"r{action.subject}")


async def _repeat(world: World, action: Action) -> None:
    if operations := world.operations():
        world.operator_asks("repeat", f"r{action.subject}")
        world.reopens(f"r{action.subject}")
        await operations.repeat(f"r{action.subject}")


async def _redrive(world: World, action: Action) -> None:
    if operations := world.operations():
        world.operator_asks("redrive", action.queue)
        async with world.redriving():
            await operations.redrive(action.queue)


async def _discard(world: World, action: Action) -> None:
    if operations := world.operations():
        world.operator_asks("discard", action.queue)
        for letter in await operations.dead_letters(action.queue, limit=1):
            await operations.discard(action.queue, letter.id)


_ACTIONS: dict[str, Callable[[World, Action], Awaitable[None]]] = {
    "submit": _submit,
    "enqueue": _enqueue,
    "garbage": _garbage,
    "cancel": _cancel,
    "repeat": _repeat,
    "redrive": _redrive,
    "discard": _discard,
}
