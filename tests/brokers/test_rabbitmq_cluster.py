"""RabbitMQ as a cluster of three nodes."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.errors import BrokerError
from oraculo.ports.broker import Broker, Outgoing, publish_all
from oraculo.testing.broker_suite import BrokerSuite
from tests.brokers.rabbitmq_stage import forget, fresh_name, plain_channel, running
from tests.end_to_end.cluster import FEW_HELD, Cluster
from tests.receipts import places_down, takers
from tests.servers.fleet import Fleet
from tests.servers.rabbitmq_cluster import Node, RabbitMQCluster
from tests.waiting import until

TASKS = 1000

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]  # it takes a while until three nodes have met


@pytest.fixture(scope="module")
def all_nodes() -> Iterator[list[Node]]:
    with RabbitMQCluster() as cluster:
        yield cluster.nodes


@pytest.fixture
def nodes(all_nodes: list[Node]) -> list[Node]:
    """All of them at work, whatever was done to them."""
    for node in all_nodes:
        if not node.is_running:
            node.start()
    return all_nodes


class TestConformance(BrokerSuite):
    url: str

    @pytest.fixture(autouse=True)
    def _server(self, nodes: list[Node]) -> None:
        self.url = nodes[0].url

    async def make_broker(self) -> Broker:
        return RabbitMQBroker(self.url, delivery_limit=self.delivery_limit)

    async def forget(self, queues: Sequence[str]) -> None:
        forget(self.url, queues)


def _all_of(nodes: Sequence[Node]) -> str:
    """The URL of the cluster; who comes first is used first."""
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    return f"amqp://guest:guest@{hosts}/%2F"


async def _takes(broker: Broker, queue: str, body: bytes) -> bool:
    try:
        await publish_all(broker, [Outgoing(queue, body)])
    except BrokerError:
        return False
    return True


async def test_queues_are_published_to_while_the_node_that_led_them_is_gone(nodes: list[Node]) -> None:
    """A channel that comes too early is refused there as long as that node is away: others are not."""
    queue = fresh_name()
    async with running(_all_of(nodes)) as broker:
        await publish_all(broker, [Outgoing(queue, b"before")])
        await asyncio.to_thread(nodes[0].kill)
        await until(lambda: _takes(broker, queue, b"after"), within=30, saying="it to be taken")
        consumer = await broker.consume(queue, prefetch=10)
        heard = {delivery.body for delivery in await consumer.take(10)}
        while heard != {b"before", b"after"}:
            heard |= {delivery.body for delivery in await consumer.take(10)}


async def test_a_consumer_goes_on_when_another_node_that_led_its_queue_is_killed(nodes: list[Node]) -> None:
    queue = fresh_name()
    leader, ours, _ = nodes
    async with running(leader.url) as founder:
        await founder.declare([queue])
    async with running(ours.url) as broker:
        consumer = await broker.consume(queue, prefetch=10)
        await publish_all(broker, [Outgoing(queue, b"before")])
        (first,) = await consumer.take(10)
        await consumer.ack([first])
        await asyncio.to_thread(leader.kill)
        await until(lambda: _takes(broker, queue, b"after"), within=30, saying="it to be taken")
        async with asyncio.timeout(30):
            assert {delivery.body for delivery in await consumer.take(10)} == {b"after"}


async def test_a_queue_without_its_majority_costs_the_others_one_repeat_at_most(nodes: list[Node]) -> None:
    """A channel that does not know it waits for it, and says nothing of what is behind. It is the survivor that led it:
    else the channel would be refused at once."""
    survivor, lone, silent, unmade = nodes[2], fresh_name(), fresh_name(), fresh_name()
    with plain_channel(survivor.url) as channel:
        channel.queue_declare(lone, durable=True)  # a classic one, on that node alone
    async with running(survivor.url, publish_timeout=2.0) as founder:
        await founder.declare([lone, silent])
    for node in nodes[:2]:
        await asyncio.to_thread(node.kill)
    batch = [Outgoing(lone, b"0"), Outgoing(silent, b"1"), Outgoing(lone, b"2")]
    async with running(survivor.url, publish_timeout=2.0) as broker:
        for _ in range(3):
            receipts = await broker.publish(batch)
            assert takers(receipts) == ["rabbitmq", None, "rabbitmq"]
            assert places_down(receipts) == {1}
        await publish_all(broker, [Outgoing(lone, b"3")])
        assert [name for name, _ in broker.statuses()[0].stuck] == [silent]
        await broker.check()
        receipts = await broker.publish([Outgoing(unmade, b""), Outgoing(lone, b"4")])
        assert takers(receipts) == [None, "rabbitmq"]
        for name in (unmade, fresh_name()):
            receipts = await broker.publish([Outgoing(name, b"")])
            assert places_down(receipts) == {0}
        with plain_channel(survivor.url) as channel:
            depth = channel.queue_declare(lone, passive=True).method.message_count
        print(f"{depth} messages for 8")
        assert 8 <= depth <= 10


@pytest.mark.parametrize("victims", [1, 2], ids=["one node, and two are left", "two nodes, and no majority is left"])
async def test_a_run_of_a_thousand_tasks_survives(victims: int, nodes: list[Node], tmp_path: Path) -> None:
    """The engine and the worker are on the first that is killed, and so are the leaders of all their queues."""
    async with Cluster(tmp_path, _all_of(nodes), is_held=True) as cluster:
        run_id = await cluster.submit(TASKS)
        await cluster.reached(run_id, TASKS // 4)
        for node in nodes[:victims]:
            await asyncio.to_thread(node.kill)
        if victims > 1:
            await until(lambda: _is_told(cluster, run_id), within=30, saying="what it waits for")
            await asyncio.to_thread(nodes[0].start)
        await cluster.check(run_id, TASKS)


async def test_a_cluster_without_its_majority_is_left_for_another_broker(
    nodes: list[Node], fleet: Fleet, tmp_path: Path
) -> None:
    """It answers, and takes and gives nothing: what it had is sent again over the next, and so are new runs."""
    async with Cluster(tmp_path, f"{_all_of(nodes[::-1])},{fleet.url('redis')}", is_held=True, **FEW_HELD) as cluster:
        run_id = await cluster.submit(TASKS)
        await cluster.reached(run_id, TASKS // 4)
        for node in nodes[:2]:
            await asyncio.to_thread(node.kill)
        await cluster.goes_on_elsewhere(run_id, TASKS)


async def _is_told(cluster: Cluster, run_id: str) -> bool:
    told = (await cluster.client.get(f"/orquestracoes/{run_id}/explicacao")).json()
    return "; queue resultados cannot be used (" in told["explicacao"] and "nobody listens" not in told["explicacao"]
