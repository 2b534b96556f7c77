"""RabbitMQ: the suite every broker passes, the names it can have, and how it starts, is let in and stops."""

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from oraculo.brokers.address import read_address
from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.brokers.rabbitmq.connection import Connection
from oraculo.brokers.rabbitmq.consumer import RabbitMQConsumer
from oraculo.brokers.rabbitmq.publisher import VANISHED_PAUSE
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings
from oraculo.ports.broker import Broker, BrokerStatus, Capabilities, Outgoing, publish_all
from oraculo.testing.broker_suite import BrokerSuite
from tests.brokers import rabbitmq_stage as stage
from tests.brokers.rabbitmq_stage import (
    already,
    assert_nothing_is_left,
    eventually,
    forget,
    fresh_name,
    messages,
    plain_channel,
    running,
    silent_server,
    state,
    take,
    trouble,
)
from tests.servers.certificates import make_certificates
from tests.servers.fleet import Fleet
from tests.servers.process import free_port
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ

url, queue, broker, nothing_goes_unheard = stage.url, stage.queue, stage.broker, stage.nothing_goes_unheard  # fixtures


class TestConformance(BrokerSuite):
    url: str

    @pytest.fixture(autouse=True)
    def _server(self, url: str) -> None:
        self.url = url

    async def make_broker(self) -> Broker:
        return RabbitMQBroker(self.url, delivery_limit=self.delivery_limit)

    async def forget(self, queues: Sequence[str]) -> None:
        forget(self.url, queues)

    async def delete_alone(self, queue: str) -> None:
        with plain_channel(self.url) as channel:
            channel.queue_delete(queue)


# -- many queues ----------------------------------------------------------------------------------------------------


async def test_many_queues_are_declared_at_once_and_somebody_elses_is_used_as_it_is(
    broker: RabbitMQBroker, url: str, queue: str
) -> None:
    names = [f"{queue}.{number}" for number in range(20)]
    with plain_channel(url) as channel:
        channel.queue_declare(names[3], durable=True)  # a classic one
    await broker.declare(names)
    assert [name for name in names if not broker._queues.is_ours(name)] == [names[3]]
    assert len(await broker.queues(names)) == 20
    await broker.remove(names)


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["", "n" * 300, "ç" * 130, "respostas\n", "a\rb", "\r\n", "amq.gen-x\n"])
async def test_a_name_that_no_queue_can_have_is_refused_and_not_waited_for(
    bad: str, broker: RabbitMQBroker, queue: str
) -> None:
    for call in (
        publish_all(broker, [Outgoing(queue, b"1"), Outgoing(bad, b"2")]),
        publish_all(broker, [Outgoing(bad, b"2", reason="r")]),
        broker.declare([bad]),
        broker.consume(bad, prefetch=1),
    ):
        with pytest.raises(BrokerError, match="RabbitMQ cannot have the queue") as caught:
            await call
        assert not isinstance(caught.value, BrokerUnavailable)
    await publish_all(broker, [Outgoing(queue, b"3")])
    assert [one.body for one in await take(await broker.consume(queue, prefetch=3), 2)] == [b"1", b"3"]


async def test_what_is_asked_of_a_name_with_a_line_break_concerns_no_other_queue(
    broker: RabbitMQBroker, queue: str
) -> None:
    """RabbitMQ would look at, and delete, the one that is named so without the break."""
    await publish_all(broker, [Outgoing(queue, b"1"), Outgoing(queue, b"2", reason="r")])
    for broken in (f"{queue}\n", f"\r{queue}"):
        assert await broker.queues([broken]) == []
        assert await broker.dead_letters(broken, limit=1) == []
        assert await broker.redrive(broken) == 0
        assert await broker.discard(broken, ["x"]) == 0
        await broker.remove([broken])
    found = await state(broker, queue)
    assert (found.ready, found.dead_letters) == (1, 1)


async def test_every_other_character_may_stand_in_a_name(broker: RabbitMQBroker, queue: str) -> None:
    blanks = "".join(chr(code) for code in (*range(33), 0x7F, 0x85, 0xA0, 0x2028) if chr(code) not in "\r\n")
    odd = blanks + queue + blanks
    await publish_all(broker, [Outgoing(odd, b"1")])
    assert (await take(await broker.consume(odd, prefetch=1), 1))[0].body == b"1"
    await broker.remove([odd])


async def test_a_call_that_is_never_answered_holds_up_none_behind_it(broker: RabbitMQBroker, queue: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):  # pika misses the answer
            await broker._queues._call("queue_declare", queue=f"{queue}\n", durable=True)
    await publish_all(broker, [Outgoing(queue, b"1")])
    assert (await state(broker, queue)).ready == 1


# -- starting -------------------------------------------------------------------------------------------------------


class TestStarting:
    async def test_it_says_what_it_can_do(self, broker: RabbitMQBroker, url: str) -> None:
        assert broker.capabilities == Capabilities(
            durable=True,
            shared=True,
            priorities=False,
            counts_consumers=True,
            lists_queues=False,
        )
        assert broker.statuses() == [BrokerStatus("rabbitmq", None)]
        place = f"{urlsplit(url).hostname}:{urlsplit(url).port}"
        assert (await broker.check()).startswith("RabbitMQ ")
        assert (await broker.check()).endswith(f" at {place}")

    async def test_nothing_is_done_before_it_is_started(self, url: str) -> None:
        broker = RabbitMQBroker(url, name="second")
        with pytest.raises(BrokerUnavailable, match="call start"):
            await publish_all(broker, messages("q", 1))
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
        silent = silent_server()
        broker = RabbitMQBroker(f"amqp://127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.3)
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable, match=r"no answer in 0\.3 s"):
            await broker.start()
        assert time.monotonic() - began < 2.0
        await broker.close()
        silent.close()
        await assert_nothing_is_left()

    @pytest.mark.parametrize("step", [0, 1, 2], ids=["always in the same order", "turned by one", "turned by two"])
    async def test_a_name_of_several_nodes_is_served_by_one_that_answers(
        self, step: int, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever the resolver does with them each time that it is asked."""
        silent, found = silent_server(), urlsplit(url)
        answering = (socket.gethostbyname(found.hostname or ""), found.port)
        addresses = [silent.getsockname(), answering, silent.getsockname()]
        nodes = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address) for address in addresses]

        def resolve(*_: object, **__: object) -> list[Any]:
            nodes[:] = nodes[step:] + nodes[:step]
            return list(nodes)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        told: list[str] = []
        address = read_address(url, port=5672)
        # Long enough for the one that answers also where the cores are busy: it has the same time as the silent ones.
        connection = Connection(address, "test", told.append, connect_timeout=1.0, call_timeout=1.0)
        for _ in addresses:
            with suppress(BrokerUnavailable):
                await connection.start()
        await connection.start()
        assert len(told) <= len(addresses)
        await connection.close()
        silent.close()

    async def test_of_several_hosts_one_that_answers_is_found_at_once(self, url: str, queue: str) -> None:
        refusing = free_port()
        broker = RabbitMQBroker(f"amqp://127.0.0.1:{refusing},{urlsplit(url).netloc.rpartition('@')[2]}")
        await broker.start()
        assert (await broker.check()).endswith(f"at 127.0.0.1:{urlsplit(url).port}")
        await publish_all(broker, messages(queue, 1))
        assert trouble(broker) == ""
        await broker.close()

    async def test_of_several_hosts_one_that_refuses_is_passed_over(
        self, url: str, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a node does that lacks the user: what is published must not be taken for refused."""
        attempts, open_node = [], Connection._open_node

        async def refuse_first(connection: Connection) -> Any:
            attempts.append(connection.place)
            if connection.place.startswith("elsewhere:"):
                raise BrokerError("refused the user")
            return await open_node(connection)

        monkeypatch.setattr(Connection, "_open_node", refuse_first)
        broker = RabbitMQBroker(f"amqp://elsewhere:1,{urlsplit(url).netloc.rpartition('@')[2]},elsewhere:2")
        await broker.start()
        await publish_all(broker, messages(queue, 1))
        assert sorted(set(attempts)) == [f"127.0.0.1:{urlsplit(url).port}", "elsewhere:1"]
        await broker.close()
        nobody = RabbitMQBroker("amqp://elsewhere:1,elsewhere:2")
        with pytest.raises(BrokerError, match=r"\Arefused the user; refused the user\Z") as caught:
            await nobody.start()
        assert not isinstance(caught.value, BrokerUnavailable)
        await nobody.close()

    async def test_who_gives_up_and_starts_again_begins_with_the_next_host(self, url: str) -> None:
        silent = silent_server()
        hosts = f"127.0.0.1:{silent.getsockname()[1]},{urlsplit(url).netloc.rpartition('@')[2]}"
        broker = RabbitMQBroker(f"amqp://{hosts}", connect_timeout=30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await broker.start()
        await broker.close()
        async with asyncio.timeout(5):
            await broker.start()
        await broker.close()
        silent.close()

    async def test_of_several_hosts_that_do_not_answer_each_is_told_of(self) -> None:
        silent, refusing = silent_server(), free_port()
        places = f"127.0.0.1:{silent.getsockname()[1]}", f"127.0.0.1:{refusing}"
        broker = RabbitMQBroker(f"amqp://{','.join(places)}", connect_timeout=0.3)
        with pytest.raises(BrokerUnavailable) as caught:
            await broker.start()
        silent_told, refusing_told = str(caught.value).split("; ")
        assert silent_told == f"cannot reach RabbitMQ at {places[0]}: no answer in 0.3 s"
        assert refusing_told.startswith(f"cannot reach RabbitMQ at {places[1]}: ")
        await broker.close()
        silent.close()
        await assert_nothing_is_left()

    @pytest.mark.parametrize("pause", [0.0, 0.1])
    async def test_closing_while_it_connects_tells_who_waits(self, pause: float) -> None:
        silent = silent_server()
        broker = RabbitMQBroker(f"amqp://127.0.0.1:{silent.getsockname()[1]}", connect_timeout=30)
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
            await publish_all(broker, messages(queue, 1))
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

    async def test_who_is_not_let_in_again_after_a_break_may_be_later(
        self, url: str, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A refusal would be taken for one of the messages, which would then be given up."""
        with Proxy(url) as proxy:
            async with running(proxy.url) as broker:
                await publish_all(broker, messages(queue, 1))
                monkeypatch.setattr("oraculo.brokers.rabbitmq.connection._vhost", lambda _: "no-such")
                proxy.cut()
                await eventually(lambda: already(trouble(broker)), bool)
                for call in (broker.publish(messages(queue, 1)), broker.consume(queue, prefetch=1), broker.check()):
                    with pytest.raises(BrokerUnavailable, match="refused the vhost"):
                        await call
                assert "refused the vhost" in trouble(broker)
                monkeypatch.undo()
                await publish_all(broker, messages(queue, 1))
                assert trouble(broker) == ""

    async def test_the_path_is_the_vhost_and_the_user_may_have_odd_signs(self, fleet: Fleet) -> None:
        server = cast("RabbitMQ", fleet.server("rabbitmq"))
        server.evaluate(_ADD_USER_AND_VHOST)
        async with running(f"amqp://odd%40user:p%2Fw%3A%3F@127.0.0.1:{server.port}/a%2Fb") as broker:
            await publish_all(broker, messages("in-the-vhost", 1))
        async with running(server.url) as elsewhere:
            assert await elsewhere.queues(["in-the-vhost"]) == []

    async def test_a_vhost_that_has_no_room_now_is_waited_for(self, fleet: Fleet) -> None:
        server = cast("RabbitMQ", fleet.server("rabbitmq"))
        server.evaluate(_ADD_VHOST_WITHOUT_ROOM)
        broker = RabbitMQBroker(f"amqp://guest:guest@127.0.0.1:{server.port}/cheio")
        with pytest.raises(BrokerUnavailable, match=r"limit \(0\) is reached"):
            await broker.start()
        await broker.close()

    async def test_closing_leaves_nothing_behind(self, url: str, queue: str) -> None:
        async with running(url) as broker:
            await publish_all(broker, messages(queue, 3))
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.take(1)
        await assert_nothing_is_left()


_ADD_USER_AND_VHOST = """
rabbit_vhost:add(<<"a/b">>, <<"tests">>),
rabbit_auth_backend_internal:add_user(<<"odd@user">>, <<"p/w:?">>, <<"tests">>),
rabbit_auth_backend_internal:set_permissions(<<"odd@user">>, <<"a/b">>, <<".*">>, <<".*">>, <<".*">>, <<"tests">>).
"""

_ADD_VHOST_WITHOUT_ROOM = """
rabbit_vhost:add(<<"cheio">>, <<"tests">>),
rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"cheio">>, <<".*">>, <<".*">>, <<".*">>, <<"tests">>),
rabbit_vhost_limit:set(<<"cheio">>, [{<<"max-connections">>, 0}], <<"tests">>).
"""


class TestTls:
    async def test_with_the_right_authority_it_works(self, fleet: Fleet) -> None:
        server = cast("RabbitMQ", fleet.server("rabbitmq"))
        async with running(server.tls_url) as broker:
            name = fresh_name()
            await publish_all(broker, [Outgoing(name, b"x" * 300_000)])
            (delivery,) = await (await broker.consume(name, prefetch=1)).take(1)
            assert len(delivery.body) == 300_000

    async def test_another_authority_is_not_trusted(self, fleet: Fleet, tmp_path: Path) -> None:
        server = cast("RabbitMQ", fleet.server("rabbitmq"))
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


# -- stopping -------------------------------------------------------------------------------------------------------


class TestClosing:
    async def test_a_publish_in_flight_opens_nothing_again(self, url: str, queue: str) -> None:
        async with running(url) as broker:
            await publish_all(broker, messages(queue, 1))
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
            await publish_all(broker, messages(queue, 1))

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
