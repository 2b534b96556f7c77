"""NATS as a cluster of three servers that keep three copies of each queue (`?replicas=3`)."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from oraculo.brokers.nats import NatsBroker
from oraculo.brokers.nats.layout import stream_config, stream_of
from oraculo.errors import BrokerError, BrokerUnavailable, QueueUnavailable
from oraculo.ports.broker import Broker, Outgoing, publish_all
from oraculo.testing.broker_suite import BrokerSuite
from oraculo.wire.naming import dlq_of
from tests.brokers import nats_stage as stage
from tests.brokers.nats_stage import BareNats, api, eventually, plain_client, ready, running
from tests.end_to_end.cluster import FEW_HELD, Cluster
from tests.receipts import takers
from tests.servers.fleet import Fleet
from tests.servers.process import free_port
from tests.waiting import until

queue = stage.queue  # a fixture

TASKS = 1000


@pytest.fixture(scope="module")
def servers() -> Iterator[list[BareNats]]:
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    with ExitStack() as running_servers:
        found = []
        for port in ports:
            member = f'cluster {{ name: "c", host: 127.0.0.1, port: {port}, routes: [{routes}] }}'
            server = BareNats(f'server_name: "s{port}"', f'server_tags: ["{port}"]', member)
            server.tag = str(port)
            running_servers.enter_context(server)
            found.append(server)
        asyncio.run(until(lambda: has_leader(f"{found[0].url}?replicas=3"), within=30, saying="a leader"))
        yield found


@pytest.fixture
def urls(servers: list[BareNats]) -> list[str]:
    return [f"{server.url}?replicas=3" for server in servers]


async def has_leader(url: str) -> bool:
    try:
        async with running(url, publish_timeout=2.0) as broker:
            await broker.declare(["ready"])
    except BrokerError:
        return False
    return True


@pytest.mark.long  # the same suite as on one server
class TestConformance(BrokerSuite):
    url = ""

    @pytest.fixture(autouse=True)
    def _server(self, urls: list[str]) -> None:
        self.url = urls[0]

    async def make_broker(self) -> Broker:
        return NatsBroker(self.url, delivery_limit=self.delivery_limit)

    async def forget(self, queues: Sequence[str]) -> None:
        async with plain_client(self.url.partition("?")[0]) as client:
            for queue in queues:
                for name in (queue, dlq_of(queue)):
                    await client.request(f"$JS.API.STREAM.DELETE.{name.replace('.', '=')}", timeout=5)


async def test_repeats_that_meet_are_all_confirmed_and_stored_once(urls: list[str], queue: str) -> None:
    """Two engines that send the same commands, and one that has a command twice: the copies are still on their way to
    the other servers when the repeat comes, and JetStream then refuses to tell."""
    async with running(urls[0]) as one, running(urls[1]) as other:
        await one.declare([queue])
        for number in range(20):
            batch = [Outgoing(queue, b"x", key=f"{number}.{each}") for each in range(10)]
            await asyncio.gather(one.publish([*batch, batch[0]]), other.publish(batch))
        assert await eventually(lambda: ready(one, queue, 200))


async def test_a_run_of_a_thousand_tasks_survives_the_server_that_it_went_by(
    servers: list[BareNats], tmp_path: Path
) -> None:
    """For good: the engine and the worker go on by another of those in their URL."""
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    async with Cluster(tmp_path, f"nats://{hosts}?replicas=3", is_held=True) as cluster:
        run_id = await cluster.submit(TASKS)
        await cluster.reached(run_id, TASKS // 4)
        await asyncio.to_thread(servers[0].kill)
        try:
            await cluster.check(run_id, TASKS)
        finally:
            await asyncio.to_thread(servers[0].start)


@pytest.mark.long
async def test_a_queue_that_died_with_its_server_holds_up_no_other(servers: list[BareNats], queue: str) -> None:
    """It has one copy, as one that a plain worker made; the others have three."""
    lost = f"{queue}-lost"
    async with plain_client(servers[1].url) as client:
        for name in (lost, dlq_of(lost)):
            here = {"placement": {"tags": [servers[0].tag]}}
            assert "error" not in await api(client, f"STREAM.CREATE.{stream_of(name)}", stream_config(name, 1) | here)
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    async with running(f"nats://{hosts}?replicas=3") as broker:
        await publish_all(broker, [Outgoing(queue, b"1"), Outgoing(lost, b"1")])
        await asyncio.to_thread(servers[0].kill)  # the one that it is connected to

        async def is_told_apart() -> bool:
            with suppress(BrokerUnavailable):  # while the others choose their leaders
                return takers(await broker.publish([Outgoing(queue, b"2"), Outgoing(lost, b"2")])) == ["nats", None]
            return False

        try:
            await until(is_told_apart, within=40, saying="the other queue to be served")
            with pytest.raises(QueueUnavailable, match=lost):
                await broker.declare([lost])
            listed = {state.queue for state in await broker.queues()}
            assert queue in listed
            assert lost not in listed
            assert broker.statuses()[0].trouble is None
        finally:
            await asyncio.to_thread(servers[0].start)


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_a_cluster_without_its_majority_is_left_for_another_broker(
    servers: list[BareNats], fleet: Fleet, tmp_path: Path
) -> None:
    """The server that engine and worker are at still answers, and takes and gives nothing."""
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    async with Cluster(
        tmp_path, f"nats://{hosts}?replicas=3,{fleet.url('redis')}", is_held=True, **FEW_HELD
    ) as cluster:
        run_id = await cluster.submit(TASKS)
        await cluster.reached(run_id, TASKS // 4)
        for server in servers[1:]:
            await asyncio.to_thread(server.kill)
        try:
            await cluster.goes_on_elsewhere(run_id, TASKS)
        finally:
            for server in servers[1:]:
                await asyncio.to_thread(server.start)
