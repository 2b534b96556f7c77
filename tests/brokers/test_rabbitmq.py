"""RabbitMQ: the suite every broker passes, and what is its own. Against a real server."""

import asyncio
import gc
import json
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit
from uuid import uuid4

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.brokers.rabbitmq.broker import RabbitMQConsumer
from oraculo.brokers.rabbitmq.connection import BLOCKED
from oraculo.brokers.rabbitmq.letters import carried, encoded, redeliveries_of
from oraculo.brokers.rabbitmq.publisher import VANISHED_PAUSE, _Batch
from oraculo.brokers.rabbitmq.wire import Parcel
from oraculo.core.naming import dlq_of
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings
from oraculo.ports.broker import Broker, Capabilities, Consumer, DeadLetter, Delivery, Link, Outgoing, QueueState
from oraculo.testing.broker_suite import BrokerSuite
from tests.servers.certificates import make_certificates
from tests.servers.fleet import Fleet
from tests.servers.process import free_port
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ

Seen = TypeVar("Seen")

PATIENCE = 20.0
NO_REASON = "published to the dead-letter queue without a reason"
DELAYS = (100, 500, 1000, 60000)  # that the tests ask for, in milliseconds


# -- what the tests are written with ------------------------------------------------------------------------------


@contextmanager
def plain_channel(url: str) -> Iterator[BlockingChannel]:
    """What a worker with no SDK has: pika's blocking channel."""
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        yield channel


def forget(url: str, queues: Sequence[str]) -> None:
    with plain_channel(url) as channel:
        for queue in queues:
            for name in (queue, dlq_of(queue), *[f"{queue}.retry.{delay}" for delay in DELAYS]):
                channel.queue_delete(name)


@pytest.fixture(autouse=True)
def _nothing_goes_unheard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """asyncio tells in the log of exceptions that nobody took, also of those inside pika."""
    yield
    gc.collect(1)
    records = [*caplog.get_records("call"), *caplog.get_records("teardown")]
    told = [record for record in records if record.name == "asyncio" and record.threadName != "proxy"]
    assert [record.getMessage() for record in told] == []


@pytest.fixture
def url(fleet: Fleet) -> str:
    return fleet.url("rabbitmq")


@pytest.fixture
def queue(url: str) -> Iterator[str]:
    name = fresh_name()
    yield name
    forget(url, [name])


@pytest.fixture
async def broker(url: str) -> AsyncIterator[RabbitMQBroker]:
    async with running(url) as broker:
        yield broker


@asynccontextmanager
async def running(url: str, **options: Any) -> AsyncIterator[RabbitMQBroker]:
    broker = RabbitMQBroker(url, **options)
    try:
        await broker.start()
        yield broker
    finally:
        await broker.close()


def fresh_name() -> str:
    return f"rabbit-{uuid4().hex}"


def messages(queue: str, count: int) -> list[Outgoing]:
    return [Outgoing(queue, b"%d" % n) for n in range(count)]


async def take(consumer: Consumer, count: int) -> list[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(PATIENCE):
        while len(taken) < count:
            taken += await consumer.take(count - len(taken))
    return taken


async def eventually(look: Callable[[], Awaitable[Seen]], accept: Callable[[Seen], bool]) -> Seen:
    deadline = time.monotonic() + PATIENCE
    while not accept(seen := await look()):
        assert time.monotonic() < deadline, f"still {seen} after {PATIENCE} s"
        await asyncio.sleep(0.01)
    return seen


async def state(broker: Broker, queue: str) -> QueueState:
    (found,) = await broker.queues([queue])
    return found


async def letters(broker: Broker, queue: str, count: int) -> Sequence[DeadLetter]:
    return await eventually(lambda: broker.dead_letters(queue, limit=count + 1), lambda found: len(found) == count)


async def published(broker: Broker, batch: Sequence[Outgoing]) -> None:
    """Publishes as one does who expects trouble: again until it works, which may make duplicates."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            await broker.publish(batch)
            return
        except BrokerUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def subscribed(broker: Broker, queue: str, prefetch: int = 100) -> Consumer:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await broker.consume(queue, prefetch=prefetch)
        except BrokerUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


def bodies(deliveries: Sequence[Delivery] | Sequence[DeadLetter]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


def trouble(broker: Broker) -> str:
    (link,) = broker.links()
    return link.trouble or ""


async def assert_nothing_is_left() -> None:
    """No task of a broker that closed or gave up; what is cancelled needs a turn of the loop to end."""
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


class TestConformance(BrokerSuite):
    url: str

    @pytest.fixture(autouse=True)
    def _server(self, url: str) -> None:
        self.url = url

    async def make_broker(self) -> Broker:
        return RabbitMQBroker(self.url, delivery_limit=self.delivery_limit)

    async def forget(self, queues: Sequence[str]) -> None:
        forget(self.url, queues)


# -- starting and stopping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", "n" * 300, "ç" * 130])
async def test_a_name_that_no_queue_can_have_is_refused_and_not_waited_for(
    bad: str, broker: RabbitMQBroker, queue: str
) -> None:
    for call in (
        broker.publish([Outgoing(queue, b"1"), Outgoing(bad, b"2")]),
        broker.publish([Outgoing(bad, b"2", reason="r")]),
        broker.declare([bad]),
        broker.consume(bad, prefetch=1),
    ):
        with pytest.raises(BrokerError, match="RabbitMQ cannot have the queue") as caught:
            await call
        assert not isinstance(caught.value, BrokerUnavailable)
    await broker.publish([Outgoing(queue, b"3")])
    assert (await take(await broker.consume(queue, prefetch=2), 1))[-1].body == b"3"


class TestStarting:
    async def test_it_says_what_it_can_do(self, broker: RabbitMQBroker, url: str) -> None:
        assert broker.capabilities == Capabilities(durable=True, shared=True, priorities=False, counts_consumers=True)
        assert broker.links() == [Link("rabbitmq", None)]
        place = f"{urlsplit(url).hostname}:{urlsplit(url).port}"
        assert (await broker.check()).startswith("RabbitMQ ")
        assert (await broker.check()).endswith(f" at {place}")

    async def test_nothing_is_done_before_it_is_started(self, url: str) -> None:
        broker = RabbitMQBroker(url, name="second")
        with pytest.raises(BrokerUnavailable, match="call start"):
            await broker.publish(messages("q", 1))
        assert "call start" in trouble(broker)
        assert broker.name == "second"
        await broker.close()

    async def test_a_server_that_is_not_there_is_named(self) -> None:
        port = free_port()
        broker = RabbitMQBroker(f"amqp://127.0.0.1:{port}")
        with pytest.raises(BrokerUnavailable, match=rf"cannot reach RabbitMQ at 127\.0\.0\.1:{port}: .*refused"):
            await broker.start()
        assert "cannot reach RabbitMQ" in trouble(broker)
        await assert_nothing_is_left()
        await broker.close()

    async def test_a_server_that_says_nothing_is_given_up(self) -> None:
        silent = await asyncio.start_server(lambda *_: asyncio.sleep(0), "127.0.0.1", 0)
        broker = RabbitMQBroker(f"amqp://127.0.0.1:{silent.sockets[0].getsockname()[1]}", connect_timeout=0.3)
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable, match=r"no answer in 0\.3 s"):
            await broker.start()
        assert time.monotonic() - began < 2.0
        await broker.close()
        silent.close()
        await assert_nothing_is_left()

    @pytest.mark.parametrize("pause", [0.0, 0.1])
    async def test_closing_while_it_connects_tells_who_waits(self, pause: float) -> None:
        silent = await asyncio.start_server(lambda *_: asyncio.sleep(0), "127.0.0.1", 0)
        broker = RabbitMQBroker(f"amqp://127.0.0.1:{silent.sockets[0].getsockname()[1]}", connect_timeout=30)
        starting = asyncio.create_task(broker.start())
        await asyncio.wait({starting}, timeout=pause)
        began = time.monotonic()
        await broker.close()
        assert time.monotonic() - began < 0.5
        with pytest.raises(BrokerUnavailable, match="closed while it connected"):
            await starting
        silent.close()
        await assert_nothing_is_left()

    async def test_after_a_failed_start_the_next_call_tries_again(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            proxy.refuses = True
            broker = RabbitMQBroker(proxy.url)
            with pytest.raises(BrokerUnavailable):
                await broker.start()
            proxy.refuses = False
            await broker.publish(messages(queue, 1))
            assert trouble(broker) == ""
            await broker.close()

    @pytest.mark.parametrize(
        ("login", "vhost", "told"),
        [
            ("guest:wrong", "%2F", "refused the user 'guest'"),
            ("n%40body:s%2Fecret", "%2F", "refused the user 'n@body'"),
            ("guest:guest", "no%2Fsuch", "refused the vhost 'no/such'"),
        ],
    )
    async def test_who_is_not_let_in_is_told_plainly(self, url: str, login: str, vhost: str, told: str) -> None:
        broker = RabbitMQBroker(f"amqp://{login}@{urlsplit(url).hostname}:{urlsplit(url).port}/{vhost}")
        with pytest.raises(BrokerError, match=told) as caught:
            await broker.start()
        assert not isinstance(caught.value, BrokerUnavailable)
        assert "secret" not in str(caught.value)
        await broker.close()
        await assert_nothing_is_left()

    async def test_the_path_is_the_vhost_and_the_user_may_have_odd_signs(self, fleet: Fleet) -> None:
        server = cast("RabbitMQ", fleet.breakable("rabbitmq"))
        server.control("eval", _ADD_USER_AND_VHOST)
        async with running(f"amqp://odd%40user:p%2Fw%3A%3F@127.0.0.1:{server.port}/a%2Fb") as broker:
            await broker.publish(messages("in-the-vhost", 1))
        async with running(server.url) as elsewhere:
            assert await elsewhere.queues(["in-the-vhost"]) == []

    async def test_closing_leaves_nothing_behind(self, url: str, queue: str) -> None:
        async with running(url) as broker:
            await broker.publish(messages(queue, 3))
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.take(1)
        await assert_nothing_is_left()


_ADD_USER_AND_VHOST = """
rabbit_vhost:add(<<"a/b">>, <<"tests">>),
rabbit_auth_backend_internal:add_user(<<"odd@user">>, <<"p/w:?">>, <<"tests">>),
rabbit_auth_backend_internal:set_permissions(<<"odd@user">>, <<"a/b">>, <<".*">>, <<".*">>, <<".*">>, <<"tests">>).
"""


class TestTls:
    async def test_with_the_right_authority_it_works(self, fleet: Fleet) -> None:
        server = cast("RabbitMQ", fleet.breakable("rabbitmq"))
        async with running(server.tls_url) as broker:
            name = fresh_name()
            await broker.publish([Outgoing(name, b"x" * 300_000)])
            (delivery,) = await (await broker.consume(name, prefetch=1)).take(1)
            assert len(delivery.body) == 300_000

    async def test_another_authority_is_not_trusted(self, fleet: Fleet, tmp_path: Path) -> None:
        server = cast("RabbitMQ", fleet.breakable("rabbitmq"))
        stranger = make_certificates(tmp_path)
        broker = RabbitMQBroker(f"amqps://guest:guest@localhost:{server.tls_port}/?ssl_ca_certs={stranger.authority}")
        with pytest.raises(BrokerError, match="certificate that is not trusted") as caught:
            await broker.start()
        assert not isinstance(caught.value, BrokerUnavailable)
        await broker.close()
        await assert_nothing_is_left()

    def test_parameters_that_nobody_knows_are_refused(self) -> None:
        with pytest.raises(InvalidSettings, match="unknown parameter 'hearbeat'"):
            RabbitMQBroker("amqp://localhost/?hearbeat=1")


# -- when the connection, the server or a process breaks ------------------------------------------------------------


class TestBreaking:
    async def test_a_cut_connection_ends_the_consumer_and_all_comes_again(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with running(proxy.url) as broker:
                await broker.publish(messages(queue, 5))
                consumer = await broker.consume(queue, prefetch=3)
                first, *held = await take(consumer, 3)
                await consumer.ack([first])
                await eventually(lambda: state(broker, queue), lambda now: now.ready + now.unacked == 4)
                proxy.cut()
                with pytest.raises(BrokerUnavailable, match="lost"):
                    await take(consumer, 100)
                assert "the connection broke" in trouble(broker)
                await consumer.ack(held)
                await consumer.dead_letter(held[0], "too late")
                heir = await subscribed(broker, queue)
                again = await take(heir, 4)
                assert sorted(bodies(again)) == [b"1", b"2", b"3", b"4"]
                assert [each.redeliveries for each in again if each.body in {b"1", b"2"}] == [1, 1]
                assert (await state(broker, queue)).dead_letters == 0
                await published(broker, messages(queue, 1))
                assert trouble(broker) == ""

    async def test_many_who_call_at_once_share_one_attempt_to_connect(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with running(proxy.url) as broker:
                await broker.declare([queue])
                assert proxy.cut() == 4  # two connections, each with two halves
                await eventually(lambda: _value(trouble(broker)), bool)
                calls = [broker.publish(messages(queue, 1)) for _ in range(20)]
                await asyncio.gather(*calls, *[broker.queues([queue]) for _ in range(20)])
                assert proxy.cut() == 4

    async def test_a_server_that_was_killed_gives_all_again(self, fleet: Fleet) -> None:
        server, queue = fleet.breakable("rabbitmq"), fresh_name()
        async with running(server.url) as broker:
            await broker.publish([*messages(queue, 100), Outgoing(queue, b"dead", reason="kept")])
            consumer = await broker.consume(queue, prefetch=10)
            first, *_ = await take(consumer, 10)
            await consumer.retry(first, 1.0, "later")
            server.kill()
            with pytest.raises(BrokerUnavailable):
                await take(consumer, 1000)
            with pytest.raises(BrokerUnavailable, match=f"{server.port}"):
                await broker.check()
            server.start()
            heir = await subscribed(broker, queue)
            again = await take(heir, 100)
            assert {delivery.body for delivery in again} >= {b"%d" % n for n in range(100)}
            assert [letter.reason for letter in await letters(broker, queue, 1)] == ["kept"]

    async def test_a_frozen_server_holds_up_no_publish_and_no_close(self, fleet: Fleet) -> None:
        server, queue = fleet.breakable("rabbitmq"), fresh_name()
        async with running(server.url, publish_timeout=0.5, connect_timeout=0.5, call_timeout=0.5) as broker:
            await broker.publish(messages(queue, 1))
            other = RabbitMQBroker(server.url)
            await other.start()
            await other.consume(queue, prefetch=1)
            server.freeze()
            try:
                for _ in range(2):  # on the connection of before, and on a new one
                    began = time.monotonic()
                    with pytest.raises(BrokerUnavailable):
                        await broker.publish(messages(queue, 1))
                    assert time.monotonic() - began < 1.5
                for call in (broker.check(), broker.queues([queue]), broker.dead_letters(queue, limit=1)):
                    with pytest.raises(BrokerUnavailable):
                        await call
                assert trouble(broker)
                began = time.monotonic()
                await other.close()
                assert time.monotonic() - began < 4.0
            finally:
                server.thaw()
            await published(broker, messages(queue, 1))
            assert trouble(broker) == ""
            assert (await state(broker, queue)).ready >= 2
        await assert_nothing_is_left()

    async def test_what_a_killed_process_held_comes_again(self, url: str, queue: str) -> None:
        async with running(url) as broker:
            await broker.publish(messages(queue, 3))
            worker = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _HOLDS_THREE, url, queue, stdout=asyncio.subprocess.PIPE
            )
            assert worker.stdout is not None
            async with asyncio.timeout(PATIENCE):
                assert await worker.stdout.readline() == b"held\n"
            assert (await state(broker, queue)).ready == 0
            worker.send_signal(signal.SIGKILL)
            await worker.wait()
            again = await take(await broker.consume(queue, prefetch=3), 3)
            assert [(each.body, each.redeliveries) for each in again] == [(b"0", 1), (b"1", 1), (b"2", 1)]

    async def test_a_server_short_of_memory_is_told_of_and_its_queues_can_be_drained(self, fleet: Fleet) -> None:
        server, queue = cast("RabbitMQ", fleet.breakable("rabbitmq")), fresh_name()
        async with running(server.url) as broker:
            await broker.publish(messages(queue, 5))
            consumer = await broker.consume(queue, prefetch=3)
            bad, *good = await take(consumer, 3)

            async def told_on_publishing() -> str:
                with suppress(BrokerUnavailable):  # the server says it to who publishes, and not before
                    await broker.publish([Outgoing(queue, b"more")])
                return trouble(broker)

            server.control("eval", "vm_memory_monitor:set_vm_memory_high_watermark(0.0000001).")
            try:
                await eventually(told_on_publishing, BLOCKED.__eq__)
                for call in (broker.publish(messages(queue, 1)), broker.check(), consumer.dead_letter(bad, "not now")):
                    with pytest.raises(BrokerUnavailable, match=BLOCKED):
                        await call
                await consumer.ack(good)
                again = await take(consumer, 3)
                assert [(each.body, each.redeliveries) for each in again] == [(b"3", 0), (b"4", 0), (b"0", 1)]
            finally:
                server.control("eval", "vm_memory_monitor:set_vm_memory_high_watermark(0.4).")
            await eventually(lambda: _value(trouble(broker)), "".__eq__)
            await broker.publish(messages(queue, 1))


_HOLDS_THREE = """
import asyncio, sys
from oraculo.brokers.rabbitmq import RabbitMQBroker

async def hold(url, queue):
    broker = RabbitMQBroker(url)
    await broker.start()
    consumer = await broker.consume(queue, prefetch=3)
    held = 0
    while held < 3:
        held += len(await consumer.take(3))
    print("held", flush=True)
    await asyncio.Event().wait()

asyncio.run(hold(*sys.argv[1:]))
"""


async def _value(value: Seen) -> Seen:
    return value


# -- deaf consumers and queues that vanish --------------------------------------------------------------------------


class TestVanishing:
    async def test_a_consumer_whose_queue_is_deleted_hears_of_it_at_once(self, url: str, queue: str) -> None:
        async with running(url) as broker:
            await broker.publish(messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=2)
            (held,) = await take(consumer, 1)
            waiting = asyncio.create_task(consumer.take(1))
            await asyncio.wait({waiting}, timeout=0.05)
            with plain_channel(url) as channel:
                channel.queue_delete(queue)
            async with asyncio.timeout(2):
                with pytest.raises(BrokerUnavailable, match="queue was deleted"):
                    await waiting
            await consumer.ack([held])
            heir = await broker.consume(queue, prefetch=1)
            await broker.publish(messages(queue, 1))
            assert bodies(await take(heir, 1)) == [b"0"]
            await consumer.close()

    async def test_what_is_published_to_a_queue_that_vanished_is_not_lost(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        await broker.declare([queue])
        other = fresh_name()
        with plain_channel(url) as channel:
            channel.queue_delete(queue)
            channel.queue_delete(dlq_of(queue))
        batches = [[*messages(queue, 50), *messages(other, 50), Outgoing(queue, b"bad", reason="r")] for _ in range(4)]
        await asyncio.gather(*[published(broker, batch) for batch in batches])
        now = await state(broker, queue)
        assert now.ready >= 200
        assert now.dead_letters >= 4
        assert (await state(broker, other)).ready >= 200
        forget(url, [other])

    async def test_a_delay_whose_queue_vanished_is_made_again(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        await broker.publish(messages(queue, 2))
        consumer = await broker.consume(queue, prefetch=1)
        await consumer.retry((await take(consumer, 1))[0], 60.0, "later")
        with plain_channel(url) as channel:
            channel.queue_delete(f"{queue}.retry.60000")
        await consumer.retry((await take(consumer, 1))[0], 60.0, "later")
        now = await state(broker, queue)
        assert (now.ready, now.delayed) == (1, 1)
        assert [found.queue for found in await broker.queues()] == [queue]


# -- plain clients --------------------------------------------------------------------------------------------------


class TestPlainClients:
    async def test_a_plain_worker_takes_what_we_publish(self, broker: RabbitMQBroker, url: str, queue: str) -> None:
        await broker.publish([Outgoing(queue, b"{}", priority=5)])
        with plain_channel(url) as channel:
            assert channel.queue_declare(queue, passive=True).method.message_count == 1
            method, properties, body = channel.basic_get(queue)
            assert body == b"{}"
            assert (properties.delivery_mode, properties.priority) == (2, 5)
            channel.basic_ack(method.delivery_tag)

    async def test_a_plain_message_goes_every_way_and_keeps_what_it_carries(self, url: str, queue: str) -> None:
        async with running(url, delivery_limit=3) as broker:
            await broker.declare([queue])
            with plain_channel(url) as channel:
                channel.queue_declare(f"{queue}-copy")
                channel.basic_publish("", queue, b"plain", _odd_properties(copy_to=f"{queue}-copy"))
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry((await take(consumer, 1))[0], 0.0, "first")
            await consumer.retry((await take(consumer, 1))[0], 0.1, "second")
            (delivery,) = await take(consumer, 1)
            assert delivery.redeliveries == 2
            await consumer.dead_letter(delivery, "bad")
            (letter,) = await letters(broker, queue, 1)
            assert (letter.body, letter.reason, letter.redeliveries) == (b"plain", "bad", 2)
            assert time.time() - 60 < letter.at <= time.time()
            await consumer.close()
            assert await broker.redrive(queue) == 1
            with plain_channel(url) as channel:
                _, properties, body = await eventually(
                    lambda: _value(channel.basic_get(queue)), lambda got: got[0] is not None
                )
                assert body == b"plain"
                assert (properties.message_id, properties.correlation_id) == ("m-1", "c-1")
                assert properties.expiration is None
                assert {**properties.headers, "x-delivery-count": 0} == {
                    "mine": [1, {"deep": "é"}],
                    "x-delivery-count": 0,
                }
                assert channel.queue_declare(f"{queue}-copy", passive=True).method.message_count == 1
                channel.queue_delete(f"{queue}-copy")

    def test_a_message_that_moves_takes_no_others_name_and_does_not_expire(self) -> None:
        """The server refuses, with the whole channel, a message that names another user than ours."""
        properties = pika.BasicProperties(user_id="somebody", expiration="1000", app_id="mine", delivery_mode=1)
        moved = pika.BasicProperties().decode(carried(encoded(properties)))
        assert (moved.user_id, moved.expiration, moved.app_id, moved.delivery_mode) == (None, None, "mine", 2)

    @pytest.mark.parametrize(
        ("headers", "is_redelivered", "expected"),
        [
            (None, False, 0),
            (None, True, 1),  # a classic queue says no more
            ({"x-delivery-count": 4}, True, 4),
            ({"x-delivery-count": 1, "x-acquired-count": 4}, True, 4),  # RabbitMQ 4.3 and later
            ({"x-delivery-count": 2, "x-oraculo-redeliveries": 3}, True, 5),
            ({"x-delivery-count": "garbage", "x-oraculo-redeliveries": None}, False, 0),
        ],
    )
    def test_deliveries_are_counted_from_what_the_message_carries(
        self, headers: dict[str, Any] | None, is_redelivered: bool, expected: int
    ) -> None:
        assert redeliveries_of(encoded(pika.BasicProperties(headers=headers)), is_redelivered) == expected

    def test_headers_that_would_not_fit_a_frame_are_left_behind(self) -> None:
        properties = pika.BasicProperties(headers={"large": "x" * 120_000}, message_id="m")
        moved = pika.BasicProperties().decode(carried(encoded(properties), reason="kept"))
        assert (moved.headers, moved.message_id) == ({"reason": "kept"}, "m")

    async def test_what_a_plain_worker_rejects_is_in_quarantine(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        await broker.publish(messages(queue, 1))
        with plain_channel(url) as channel:
            method, _, _ = channel.basic_get(queue)
            channel.basic_reject(method.delivery_tag, requeue=False)
            (letter,) = await letters(broker, queue, 1)
        assert (letter.body, letter.reason) == (b"0", "moved by RabbitMQ: rejected by its consumer")
        assert time.time() - 60 < letter.at < time.time() + 60
        assert await broker.redrive(queue, [letter.id]) == 1
        assert (await take(await broker.consume(queue, prefetch=1), 1))[0].redeliveries == 0

    async def test_what_plain_workers_give_back_too_often_is_in_quarantine(self, url: str, queue: str) -> None:
        async with running(url, delivery_limit=3) as broker:
            await broker.publish(messages(queue, 1))
            with plain_channel(url) as channel:
                delivered = 0

                async def dead_after_one_more_try() -> int:
                    nonlocal delivered
                    method, _, _ = channel.basic_get(queue)
                    if method is not None:
                        delivered += 1
                        channel.basic_reject(method.delivery_tag, requeue=True)
                    return (await state(broker, queue)).dead_letters

                await eventually(dead_after_one_more_try, bool)
            (letter,) = await letters(broker, queue, 1)
            assert delivered == 3
            assert "delivered too often" in letter.reason

    async def test_letters_of_plain_clients_are_shown_told_apart_and_moved(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        await broker.declare([queue])
        odd = [
            pika.BasicProperties(),
            pika.BasicProperties(headers={"x-death": "nonsense", "x-oraculo-reason": 7, "x-oraculo-died-at": "never"}),
            pika.BasicProperties(headers={"x-oraculo-letter": "../../etc", "x-oraculo-redeliveries": "many"}),
            pika.BasicProperties(headers={"x-death": [{"reason": b"\xff", "time": 3}]}, timestamp=1_700_000_000),
        ]
        with plain_channel(url) as channel:
            for properties in odd * 2:
                channel.basic_publish("", dlq_of(queue), b"\xff\x00", properties)
        found = await letters(broker, queue, 8)
        assert {letter.reason for letter in found} == {NO_REASON}
        assert len({letter.id for letter in found}) == 8
        assert sorted({letter.at for letter in found}) == [0.0, 1_700_000_000.0]
        assert await broker.dead_letters(queue, limit=10) == found
        pages = list(await broker.dead_letters(queue, limit=3))
        pages += await broker.dead_letters(queue, limit=10, after=pages[-1].id)
        assert pages == found
        assert await broker.discard(queue, [found[0].id]) == 1
        assert await broker.redrive(queue, [letter.id for letter in found[:3]]) >= 2
        assert await broker.redrive(queue) >= 4
        assert (await state(broker, queue)).dead_letters == 0

    @pytest.mark.parametrize("durable", [True, False])
    async def test_a_queue_that_a_user_made_is_used_as_it_is(self, url: str, queue: str, durable: bool) -> None:
        with plain_channel(url) as channel:
            channel.queue_declare(queue, durable=durable)
        async with running(url, delivery_limit=3) as broker:
            await broker.declare([queue])
            await broker.publish(messages(queue, 2))
            consumer = await broker.consume(queue, prefetch=2)
            poison, good = await take(consumer, 2)
            await consumer.ack([good])
            for redeliveries in range(3):
                assert poison.redeliveries == redeliveries
                await consumer.retry(poison, 0.0, f"failure {redeliveries}")
                if redeliveries < 2:
                    (poison,) = await take(consumer, 1)
            assert [letter.reason for letter in await letters(broker, queue, 1)] == ["failure 2"]
            with plain_channel(url) as channel:
                channel.queue_declare(queue, durable=durable)  # the user's own way to name it still works


def _odd_properties(copy_to: str) -> pika.BasicProperties:
    """What must not come along when a message moves: the copy, the expiry, the user's name, the server's notes."""
    return pika.BasicProperties(
        message_id="m-1",
        correlation_id="c-1",
        expiration="3600000",
        user_id="guest",
        headers={"mine": [1, {"deep": "é"}], "x-death": "mine too", "CC": [copy_to]},
    )


# -- settling and counting ------------------------------------------------------------------------------------------


class TestSettling:
    async def test_acks_in_any_order_settle_nothing_else(self, broker: RabbitMQBroker, queue: str) -> None:
        await broker.publish(messages(queue, 20))
        consumer = await broker.consume(queue, prefetch=20)
        taken = await take(consumer, 20)
        await consumer.ack(taken[10:12])
        await consumer.ack([taken[3], taken[1], taken[0]])
        await consumer.ack(taken[2:5])
        await consumer.ack([taken[19]])
        await consumer.close()
        left = await take(await broker.consume(queue, prefetch=20), 12)
        assert bodies(left) == [b"%d" % n for n in (*range(5, 10), *range(12, 19))]
        assert (await state(broker, queue)).ready == 0

    async def test_an_ack_of_what_came_later_does_not_settle_what_is_being_moved(self, url: str, queue: str) -> None:
        """The move ends in nothing, because the connection that publishes is cut; so the message must come again."""
        with Proxy(url) as proxy:
            async with running(proxy.url, publish_timeout=0.5) as broker:
                await broker.publish(messages(queue, 3))
                consumer = await broker.consume(queue, prefetch=3)
                moved, *acked = await take(consumer, 3)
                proxy.swallows = True
                moving = asyncio.create_task(consumer.dead_letter(moved, "bad"))
                await asyncio.wait({moving}, timeout=0.05)
                await consumer.ack(acked)
                await consumer.ack([moved])
                with pytest.raises(BrokerUnavailable, match="did not confirm"):
                    await moving
                proxy.swallows = False
                (again,) = await take(consumer, 1)
                assert (again.body, again.redeliveries) == (b"0", 1)
                await eventually(lambda: state(broker, queue), lambda now: now.ready + now.unacked == 1)

    async def test_deliveries_are_counted_across_consumers_and_connections(self, url: str, queue: str) -> None:
        async with running(url, delivery_limit=3) as first, running(url, delivery_limit=3) as second:
            await first.publish(messages(queue, 1))
            for redeliveries, broker in enumerate((first, second, first)):
                consumer = await broker.consume(queue, prefetch=1)
                (delivery,) = await take(consumer, 1)
                assert delivery.redeliveries == redeliveries
                await consumer.close()
            (letter,) = await letters(second, queue, 1)
            assert letter.reason == "moved by RabbitMQ: delivered too often and never settled"
            assert (await state(first, queue)).ready == 0

    async def test_a_delayed_message_takes_its_count_with_it(self, url: str, queue: str) -> None:
        async with running(url, delivery_limit=3) as broker:
            await broker.publish(messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            for redeliveries in range(2):
                (delivery,) = await take(consumer, 1)
                assert delivery.redeliveries == redeliveries
                await consumer.retry(delivery, 0.1, "later")
            await take(consumer, 1)
            await consumer.close()
            heir = await broker.consume(queue, prefetch=1)
            (letter,) = await letters(broker, queue, 1)
            assert (letter.reason, letter.redeliveries) == ("delivered 3 times and never settled", 3)
            await broker.publish([Outgoing(queue, b"next")])
            assert bodies(await take(heir, 1)) == [b"next"]

    async def test_a_delay_is_not_lost_with_the_process_that_asked_for_it(self, url: str, queue: str) -> None:
        async with running(url) as broker:
            await broker.publish(messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry((await take(consumer, 1))[0], 0.5, "later")
        async with running(url) as heir:
            (again,) = await take(await heir.consume(queue, prefetch=1), 1)
            assert (again.body, again.redeliveries) == (b"0", 1)

    @pytest.mark.parametrize(("priority", "prefetch", "limit"), [(10, 1, 1), (-1, 1, 1), (0, 0, 1), (0, 1, 0)])
    async def test_senseless_numbers_are_refused(
        self, broker: RabbitMQBroker, queue: str, priority: int, prefetch: int, limit: int
    ) -> None:
        async def use() -> None:
            await broker.publish([Outgoing(queue, b"", priority=priority)])
            await (await broker.consume(queue, prefetch=prefetch)).take(limit)

        with pytest.raises(BrokerError, match=r"(priority|prefetch|limit): must be"):
            await use()


# -- much at once ---------------------------------------------------------------------------------------------------


class TestMuch:
    async def test_ten_thousand_messages_shared_by_two_connections(self, url: str, queue: str) -> None:
        count = 10_000
        async with running(url) as first, running(url) as second:
            await first.declare([queue])
            handled: list[bytes] = []

            async def work(broker: Broker) -> int:
                consumer, mine = await broker.consume(queue, prefetch=500), 0
                while len(handled) < count:
                    async with asyncio.timeout(PATIENCE):
                        taking = asyncio.create_task(consumer.take(200))
                        finished = asyncio.create_task(done.wait())
                        await asyncio.wait({taking, finished}, return_when=asyncio.FIRST_COMPLETED)
                        finished.cancel()
                    if not taking.done():
                        taking.cancel()
                        break
                    batch = taking.result()
                    handled.extend(bodies(batch))
                    mine += len(batch)
                    await consumer.ack(batch)
                done.set()
                return mine

            done = asyncio.Event()
            batches = [[Outgoing(queue, b"%d" % n) for n in range(at, at + 500)] for at in range(0, count, 500)]
            shares = asyncio.gather(work(first), work(second))
            await asyncio.gather(*[broker.publish(b) for b, broker in zip(batches, [first, second] * 10, strict=True)])
            assert min(await shares) > 0
            assert len(handled) == count
            assert set(handled) == {b"%d" % n for n in range(count)}
            await eventually(lambda: state(first, queue), lambda now: now.ready + now.unacked == 0)

    async def test_one_publish_to_many_queues_that_are_not_there_yet(self, broker: RabbitMQBroker, url: str) -> None:
        queues = [fresh_name() for _ in range(20)]
        await broker.publish([Outgoing(queue, b"%d" % n) for n in range(10) for queue in queues])
        states = await broker.queues()
        assert {(found.queue, found.ready) for found in states} == {(queue, 10) for queue in queues}
        forget(url, queues)

    async def test_hundreds_of_letters_are_looked_at_moved_and_discarded(
        self, broker: RabbitMQBroker, queue: str
    ) -> None:
        await broker.publish([Outgoing(queue, b"%d" % n, reason=f"reason {n}") for n in range(1200)])
        looks = await asyncio.gather(*[broker.dead_letters(queue, limit=1500) for _ in range(5)])
        everything = looks[0]
        assert bodies(everything) == [b"%d" % n for n in range(1200)]
        assert all(look == everything for look in looks)
        pages: list[DeadLetter] = []
        while page := await broker.dead_letters(queue, limit=500, after=pages[-1].id if pages else None):
            pages += page
        assert pages == everything
        assert await broker.redrive(queue, [letter.id for letter in everything[100:700]]) == 600
        assert await broker.discard(queue, [letter.id for letter in everything[90:110]]) == 10
        assert await broker.dead_letters(queue, limit=5, after=everything[95].id) == everything[700:705]
        assert await broker.redrive(queue) == 590
        now = await eventually(lambda: state(broker, queue), lambda found: found.ready == 1190)
        assert now.dead_letters == 0

    async def test_what_no_letter_can_be_named_is_refused(self, broker: RabbitMQBroker, queue: str) -> None:
        await broker.publish([Outgoing(queue, b"", reason="r" * 100_000)])
        with pytest.raises(BrokerError, match="after"):
            await broker.dead_letters(queue, limit=1, after="nonsense")
        (letter,) = await letters(broker, queue, 1)
        assert letter.reason.startswith("rrr")
        assert await broker.dead_letters(queue, limit=0) == []


# -- what a review found --------------------------------------------------------------------------------------------


def _headers(name: bytes, value: bytes) -> bytes:
    """Properties with one header, as no client of ours would write it."""
    field = bytes([len(name)]) + name + value
    kind = b"\x04json"
    flags = pika.BasicProperties.FLAG_CONTENT_TYPE | pika.BasicProperties.FLAG_HEADERS
    return struct.pack(">H", flags) + kind + struct.pack(">I", len(field)) + field


IN_MILLISECONDS = _headers(b"sent_at", b"T" + struct.pack(">Q", 1_700_000_000_000))
UNREADABLE = [
    IN_MILLISECONDS,
    _headers(b"mine", b"?nobody knows"),
    _headers(b"mine", b"S" + struct.pack(">I", 1000)),
    _headers(b"\xff\xfe", b"t\x01"),  # pika reads this one, with a name of bytes
]


class TestUnreadable:
    @pytest.mark.parametrize("properties", UNREADABLE)
    def test_headers_that_pika_cannot_read_are_left_behind(self, properties: bytes) -> None:
        assert redeliveries_of(properties, True) == 1
        moved = pika.BasicProperties().decode(carried(properties, reason="kept"))
        assert (moved.headers["reason"], moved.content_type) == ("kept", "json")

    def test_properties_that_are_cut_off_are_read_as_none(self) -> None:
        assert redeliveries_of(IN_MILLISECONDS[:5], False) == 0

    async def test_one_such_message_disturbs_no_other(self, broker: RabbitMQBroker, queue: str) -> None:
        await broker.declare([queue])
        await broker._publisher.publish(
            [Parcel(queue, b"\x00\x00", b"0"), Parcel(queue, IN_MILLISECONDS, b"odd"), Parcel(queue, b"\x00\x00", b"1")]
        )
        consumer = await broker.consume(queue, prefetch=10)
        taken = await take(consumer, 3)
        assert bodies(taken) == [b"0", b"odd", b"1"]
        await consumer.dead_letter(taken[1], "odd")
        await consumer.ack([taken[0], taken[2]])
        assert [letter.reason for letter in await letters(broker, queue, 1)] == ["odd"]

    async def test_such_a_letter_is_shown_and_moved(self, broker: RabbitMQBroker, queue: str) -> None:
        await broker.declare([queue])
        odd = [Parcel(dlq_of(queue), properties, b"%d" % n) for n, properties in enumerate(UNREADABLE[::3])]
        await broker._publisher.publish(odd)
        found = await letters(broker, queue, 2)
        assert sorted(bodies(found)) == [b"0", b"1"]
        assert await broker.discard(queue, [found[0].id]) == 1
        assert await broker.redrive(queue) == 1
        assert len(await take(await broker.consume(queue, prefetch=2), 1)) == 1

    @pytest.mark.parametrize("died_at", ["inf", "nan", "1e300"])
    async def test_a_time_that_is_none_is_shown(self, broker: RabbitMQBroker, queue: str, died_at: str) -> None:
        await broker.declare([queue])
        properties = encoded(pika.BasicProperties(headers={"x-oraculo-died-at": died_at}))
        await broker._publisher.publish([Parcel(dlq_of(queue), properties, b"")])
        (letter,) = await letters(broker, queue, 1)
        assert await broker.dead_letters(queue, limit=1, after=letter.id) == []

    async def test_half_a_surrogate_pair_in_a_reason_is_replaced(self, broker: RabbitMQBroker, queue: str) -> None:
        await broker.publish([Outgoing(queue, b"", reason="bad \udc80")])
        assert [letter.reason for letter in await letters(broker, queue, 1)] == ["bad ?"]


class TestClosing:
    async def test_a_publish_in_flight_opens_nothing_again(self, url: str, queue: str) -> None:
        async with running(url) as broker:
            await broker.publish(messages(queue, 1))
            with plain_channel(url) as channel:
                channel.queue_delete(queue)
            publishing = asyncio.create_task(broker.publish(messages(queue, 1)))  # it waits before it makes it again
            await asyncio.wait({publishing}, timeout=VANISHED_PAUSE / 2)
            await broker.close()
            with pytest.raises(BrokerUnavailable, match="closed"):
                await publishing
            await assert_nothing_is_left()
            assert (broker._working._raw, broker._publishing._raw) == (None, None)
            await broker.start()
            await broker.publish(messages(queue, 1))

    async def test_a_consume_in_flight_leaves_no_consumer(self, url: str, queue: str) -> None:
        async with running(url) as witness:
            await witness.publish(messages(queue, 1))
            for turns in range(30):
                broker = RabbitMQBroker(url)
                await broker.start()
                consuming = asyncio.create_task(broker.consume(queue, prefetch=1))
                for _ in range(turns):
                    await asyncio.sleep(0)
                await broker.close()
                await asyncio.wait({consuming})
                assert consuming.exception() is None or isinstance(consuming.exception(), BrokerUnavailable)
                assert broker._working._raw is None
            now = await eventually(lambda: state(witness, queue), lambda found: found.consumers == 0)
            assert now.ready + now.dead_letters == 1

    async def test_one_who_subscribed_while_it_closed_is_told(
        self, broker: RabbitMQBroker, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def subscribe(self: RabbitMQConsumer, prefetch: int) -> None:
            broker._is_started = False

        monkeypatch.setattr(RabbitMQConsumer, "subscribe", subscribe)
        with pytest.raises(BrokerUnavailable, match="closed"):
            await broker.consume(queue, prefetch=1)
        assert broker._consumers == set()

    async def test_consumers_that_ended_are_forgotten(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with running(proxy.url) as broker:
                for _ in range(3):
                    await (await broker.consume(queue, prefetch=1)).close()
                lost = await broker.consume(queue, prefetch=1)
                proxy.cut()
                with pytest.raises(BrokerUnavailable):
                    await take(lost, 1)
                assert broker._consumers == set()

    async def test_a_channel_that_opens_too_late_is_closed(self, url: str) -> None:
        with Proxy(url) as proxy:
            async with running(proxy.url, call_timeout=0.2) as broker:
                proxy.swallows = True
                with pytest.raises(BrokerUnavailable, match="did not answer"):
                    await broker._working.channel()
                raw = broker._working._raw
                assert raw is not None
                assert [channel.is_closing for channel in raw._channels.values()] == [True]

    async def test_a_question_that_could_not_be_asked_waits_for_no_answer(self, broker: RabbitMQBroker) -> None:
        channel = await broker._working.channel()
        channel.abandon()
        before = len(channel._waiting)
        with pytest.raises(BrokerUnavailable):
            await channel.call("basic_qos", prefetch_count=1)
        with pytest.raises(BrokerUnavailable):
            await channel.get("q")
        assert len(channel._waiting) == before


class TestOthersQuarantines:
    async def test_more_letters_than_one_consumer_can_hold_are_all_shown(
        self, broker: RabbitMQBroker, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With no bound at all a quorum queue hands over 2,000 at a time."""
        monkeypatch.setattr("oraculo.brokers.rabbitmq.letters._MOST_PREFETCH", 1000)
        await broker.publish([Outgoing(queue, b"%d" % n, reason="r") for n in range(2500)])
        assert len(await broker.dead_letters(queue, limit=3000)) == 2500
        await eventually(lambda: state(broker, queue), lambda now: now.dead_letters == 2500)

    @pytest.mark.parametrize("limit", [1, 3])
    @pytest.mark.parametrize("other", [{}, {"x-overflow": "drop-head"}, {"x-max-length": 1000}])
    async def test_looking_at_letters_does_not_wear_them_out(
        self, broker: RabbitMQBroker, url: str, queue: str, limit: int, other: dict[str, Any]
    ) -> None:
        with plain_channel(url) as channel:
            arguments = {"x-queue-type": "quorum", "x-delivery-limit": limit, **other}
            channel.queue_declare(dlq_of(queue), durable=True, arguments=arguments)
            for _ in range(2):
                channel.basic_publish("", dlq_of(queue), b"plain", pika.BasicProperties(message_id="m"))
            properties = pika.BasicProperties(headers={"x-death": [{"reason": "rejected"}]}, timestamp=1_700_000_000)
            channel.basic_publish("", dlq_of(queue), b"moved", properties)
        await broker.publish([Outgoing(queue, b"ours", reason="kept")])
        await broker._publisher.publish([Parcel(dlq_of(queue), IN_MILLISECONDS, b"odd")])
        first = await letters(broker, queue, 5)
        for _ in range(4 * limit):
            assert await letters(broker, queue, 5) == first
            assert await broker.discard(queue, ["0" * 14 + "-" + "0" * 14]) == 0
        assert await broker.redrive(queue, [first[0].id]) == 1

    async def test_looking_makes_no_queue(self, broker: RabbitMQBroker, queue: str) -> None:
        assert await broker.dead_letters(queue, limit=1) == []
        assert await broker.queues([queue]) == []
        assert await broker.queues() == []

    async def test_who_looked_once_leaves_nothing_in_memory(self, broker: RabbitMQBroker) -> None:
        for n in range(3):
            await broker.dead_letters(f"nobody-{n}", limit=1)
        gc.collect()
        assert len(broker._quarantine._turns) == 0


class TestPublisher:
    async def test_thousands_that_come_back_are_published_again_in_time(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        await broker.declare([queue])
        with plain_channel(url) as channel:
            channel.queue_delete(queue)
        await broker.publish(messages(queue, 10_000))
        assert (await state(broker, queue)).ready == 10_000

    async def test_a_batch_that_nobody_waits_for_claims_nothing(self) -> None:
        batch = _Batch([Parcel("q", b"", b"x")])
        batch.fail(BrokerUnavailable("blocked"))
        assert not batch.claims("q", b"x")
        assert batch.done.exception() is not None

    async def test_each_message_that_comes_back_is_claimed_once(self) -> None:
        parcels = [Parcel("q", b"1", b"x"), Parcel("q", b"2", b"x"), Parcel("r", b"3", b"x")]
        batch = _Batch(parcels)
        assert [batch.claims("q", b"x") for _ in range(3)] == [True, True, False]
        assert not batch.claims("q", b"y")
        assert batch.returned == parcels[:2]

    async def test_a_batch_that_cannot_be_packed_is_not_counted(self, broker: RabbitMQBroker, queue: str) -> None:
        await broker.publish(messages(queue, 1))
        with pytest.raises(pika.exceptions.ShortStringTooLong):
            await broker._publisher.publish([Parcel("q" * 300, b"\x00\x00", b"")])
        async with asyncio.timeout(2):  # its confirm must be found by the tag that the server counts
            await broker._publisher.publish([Parcel(queue, b"\x00\x00", b"next")])
        assert (broker._publisher._unconfirmed, broker._publisher._batches) == ({}, {})


class TestTables:
    async def test_names_of_queues_do_not_fill_the_memory(
        self, broker: RabbitMQBroker, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("oraculo.brokers.rabbitmq.queues._MOST_NAMES", 4)
        monkeypatch.setattr("oraculo.brokers.rabbitmq.publisher._MOST_QUEUES", 2)
        queues = [fresh_name() for _ in range(6)]
        for queue in queues * 2:
            await broker.publish(messages(queue, 1))
            await broker._queues.delay(queue, 60.0)
        assert [len(table) for table in (broker._queues._made, broker._queues._delays)] == [4, 4]
        assert len(broker._publisher._routed) == 2
        consumer = await broker.consume(queues[0], prefetch=2)
        delivery, _ = await take(consumer, 2)
        await broker.declare(queues[1:])
        await consumer.retry(delivery, 0.0, "again")  # as a queue of ours counts it, though it was forgotten
        assert [(each.body, each.redeliveries) for each in await take(consumer, 1)] == [(b"0", 1)]
        with plain_channel(url) as channel:
            channel.queue_delete(queues[1])
        await broker.publish(messages(queues[1], 1))
        assert (await state(broker, queues[1])).ready == 1
        forget(url, queues)


class TestThePlainWorkerOfTheExamples:
    async def test_what_it_cannot_read_is_kept_though_its_queue_has_no_dead_letters(
        self, broker: RabbitMQBroker, url: str, queue: str
    ) -> None:
        with plain_channel(url) as channel:
            channel.queue_declare(queue, durable=True)
        await broker.declare(["resultados"])
        command = {"correlation_id": queue, "tipo_evento": "iniciar_coleta", "payload": {}}
        sent = [b"no JSON", *[json.dumps(command | {"responder_em": name}).encode() for name in (7, "", None)]]
        with plain_channel(url) as channel:
            for body in sent:
                channel.basic_publish("", queue, body)
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "examples/plain_workers/pika_worker.py", url, queue, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            found = await letters(broker, queue, 3)
            assert sorted(bodies(found)) == sorted(sent[:3])
            assert all(letter.reason.startswith("not a command: ") and letter.at for letter in found)
            answers = await broker.consume("resultados", prefetch=1)
            (answer,) = await take(answers, 1)
            assert json.loads(answer.body)["correlation_id"] == queue
            await answers.ack([answer])
            assert broker._queues.is_ours(dlq_of(queue))
        finally:
            with suppress(ProcessLookupError):  # it ended by itself, which the test tells better
                worker.kill()
            await worker.wait()
            forget(url, ["resultados"])
