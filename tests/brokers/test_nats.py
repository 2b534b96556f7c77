"""NATS JetStream: the suite every broker passes, on a real server, and what is its own."""

import asyncio
import gc
import json
import os
import re
import shutil
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import nats
import pytest
from nats.js.api import ConsumerConfig

from oraculo.brokers.nats import NatsBroker
from oraculo.brokers.nats.broker import WINDOW, _GivenBack
from oraculo.brokers.nats.connection import Connection
from oraculo.brokers.nats.layout import NO_REASON, header_block, letter_headers, reason_in
from oraculo.core.naming import dlq_of
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings
from oraculo.ports.broker import Broker, Capabilities, Consumer, DeadLetter, Delivery, Link, Outgoing
from oraculo.ports.clock import SystemClock
from oraculo.testing.broker_suite import BrokerSuite
from tests.servers.fleet import Fleet
from tests.servers.nats import Nats
from tests.servers.process import free_port
from tests.servers.proxy import Proxy
from tests.waiting import until

Seen = TypeVar("Seen")

PATIENCE = 15.0
PROMPT = 4.0  # seconds; a default lease has 60
MAX_PAYLOAD = 8 * 1024 * 1024  # of the tests' server


class TestConformance(BrokerSuite):
    url = ""

    @pytest.fixture(autouse=True)
    def _server(self, fleet: Fleet) -> None:
        self.url = fleet.url("nats")

    async def make_broker(self) -> Broker:
        return NatsBroker(self.url, delivery_limit=self.delivery_limit)

    async def forget(self, queues: Sequence[str]) -> None:
        async with plain_client(self.url) as client:
            for queue in queues:
                for name in (queue, dlq_of(queue)):
                    await client.request(f"$JS.API.STREAM.DELETE.{name.replace('.', '=')}", timeout=5)


class BareNats(Nats):
    """With lines of its own in the configuration."""

    def __init__(self, *lines: str, jetstream: bool = True) -> None:
        super().__init__()
        self._lines = lines
        self._jetstream = jetstream

    def _configuration(self) -> list[str]:
        usual = [line for line in super()._configuration() if self._jetstream or "jetstream" not in line]
        return [*usual, *self._lines]


@pytest.fixture
def url(fleet: Fleet) -> str:
    return fleet.url("nats")


@pytest.fixture
def queue() -> str:
    return f"own-{uuid.uuid4().hex}"


@asynccontextmanager
async def running(url: str, **options: Any) -> AsyncIterator[NatsBroker]:
    broker = NatsBroker(url, **options)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()


@asynccontextmanager
async def plain_client(url: str) -> AsyncIterator[Any]:
    """Somebody who knows nothing of us."""
    client = await nats.connect(url)
    try:
        yield client
    finally:
        await client.close()


async def api(client: Any, verb: str, what: Any = None) -> dict[str, Any]:
    reply = await client.request(f"$JS.API.{verb}", json.dumps(what).encode() if what else b"", timeout=5)
    answer: dict[str, Any] = json.loads(reply.data)
    return answer


async def take(consumer: Consumer, count: int, within: float = PATIENCE) -> list[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(within):
        while len(taken) < count:
            taken += await consumer.take(count - len(taken))
    return taken


async def eventually(look: Callable[[], Awaitable[Seen]]) -> Seen:
    """What it sees, once it sees something."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while not (seen := await look()):
        assert loop.time() < deadline, f"still {seen!r} after {PATIENCE} s"
        await asyncio.sleep(0.005)
    return seen


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [delivery.body for delivery in deliveries]


def numbered(queue: str, count: int) -> list[Outgoing]:
    return [Outgoing(queue, b"%d" % number) for number in range(count)]


async def stays_quiet(consumer: Consumer, seconds: float = 0.3) -> None:
    taking = asyncio.create_task(consumer.take(1))
    await asyncio.wait({taking}, timeout=seconds)
    assert not taking.done(), f"{taking.result()} came"
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)


async def assert_fails_soon(call: Awaitable[object], within: float) -> str:
    """It raises BrokerUnavailable, with words, in that time."""
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        async with asyncio.timeout(within + 5):
            await call
    assert time.monotonic() - started < within, f"it took {time.monotonic() - started:.1f} s"
    return str(caught.value)


# -- making and starting --------------------------------------------------------------------------------------------


async def test_making_one_connects_to_nobody() -> None:
    broker = NatsBroker("nats://127.0.0.1:1")
    assert broker.capabilities == Capabilities(durable=True, shared=True, priorities=False, counts_consumers=False)
    assert broker.links()[0].trouble is not None
    await broker.close()


@pytest.mark.parametrize("bad", ["nats://h?colour=red", "nats://h?ssl_ca_certs=x", "nats://h?replicas=9"])
def test_a_url_with_something_unknown_is_refused(bad: str) -> None:
    with pytest.raises(InvalidSettings):
        NatsBroker(bad)


async def test_a_server_that_is_not_there_is_told_at_once_with_its_place() -> None:
    port = free_port()
    broker = NatsBroker(f"nats://127.0.0.1:{port}")
    said = await assert_fails_soon(broker.start(), 1.5)
    assert f"127.0.0.1:{port}" in said
    assert broker.links()[0].trouble == said
    await broker.close()


async def test_a_start_that_failed_is_made_up_for_by_the_next_call(url: str, queue: str) -> None:
    with Proxy(url) as proxy:
        proxy.refuses = True
        broker = NatsBroker(proxy.url)
        await assert_fails_soon(broker.start(), 3.5)
        proxy.refuses = False
        assert await broker.publish([Outgoing(queue, b"now")]) == "nats"
        assert broker.links()[0].trouble is None
        await broker.close()


async def test_a_server_without_jetstream_is_told() -> None:
    with BareNats(jetstream=False) as server:
        broker = NatsBroker(server.url)
        with pytest.raises(BrokerError, match="JetStream") as caught:
            await broker.start()
        assert not isinstance(caught.value, BrokerUnavailable)
        await broker.close()


async def test_a_user_and_a_password() -> None:
    with Nats(user="ana", password="s3cret") as server:
        async with running(server.url) as broker:
            assert re.fullmatch(r"NATS 2\.\d+\.\d+ at 127\.0\.0\.1:\d+", await broker.check())
        for wrong in (server.url.replace("s3cret", "guess"), f"nats://127.0.0.1:{server.port}"):
            refused = NatsBroker(wrong)
            with pytest.raises(BrokerError, match="refused the credentials") as caught:
                await refused.start()
            assert not isinstance(caught.value, BrokerUnavailable)
            assert "guess" not in str(caught.value)
            await refused.close()


async def test_a_token() -> None:
    with BareNats('authorization { token: "t/k n" }') as server:
        async with running(f"nats://t%2Fk%20n@127.0.0.1:{server.port}") as broker:
            assert await broker.check()
        refused = NatsBroker(f"nats://wrong@127.0.0.1:{server.port}")
        with pytest.raises(BrokerError, match="refused the credentials"):
            await refused.start()
        await refused.close()


async def test_a_credentials_file_that_cannot_be_used_is_told(url: str) -> None:
    broker = NatsBroker(f"{url}?credentials=/nowhere/user.creds")
    with pytest.raises(BrokerError, match=r"nkeys|/nowhere/user\.creds"):
        await broker.start()
    await broker.close()


async def test_tls(queue: str) -> None:
    with Nats(tls=True, user="ana", password="s3cret") as server:
        async with running(server.url) as broker:
            await broker.publish([Outgoing(queue, b"sealed")])
            assert bodies(await take(await broker.consume(queue, prefetch=1), 1)) == [b"sealed"]
        for distrusting in (f"tls://ana:s3cret@127.0.0.1:{server.port}", f"nats://ana:s3cret@127.0.0.1:{server.port}"):
            refused = NatsBroker(distrusting)
            with pytest.raises(BrokerError, match="could not be trusted"):
                await refused.start()
            await refused.close()


async def test_tls_asked_for_and_not_had_sends_no_password() -> None:
    heard = bytearray()

    async def without_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version":"2.10.0","max_payload":1024,"headers":true}\r\n')
        with suppress(OSError):
            while chunk := await reader.read(1024):
                heard.extend(chunk)
        writer.close()

    server = await asyncio.start_server(without_tls, "127.0.0.1", 0)
    async with server:
        broker = NatsBroker(f"tls://ana:s3cret@127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(BrokerError, match="has no TLS"):
            await broker.start()
        await broker.close()
    assert b"s3cret" not in heard


async def test_what_the_account_may_not_do_is_told() -> None:
    rights = '{ user: ana, password: s3, permissions: { publish: { deny: ["forbidden.>"] } } }'
    with BareNats(f"authorization {{ users: [ {rights} ] }}") as server:
        async with running(server.url.replace("//", "//ana:s3@"), publish_timeout=1.0) as broker:
            with pytest.raises(BrokerError, match="does not allow it: permissions violation"):
                await broker.publish([Outgoing("forbidden.queue", b"x")])
            await broker.publish([Outgoing("allowed", b"x")])


# -- names ----------------------------------------------------------------------------------------------------------


async def test_names_that_differ_in_a_dot_are_different_queues(url: str, queue: str) -> None:
    names = [f"{queue}.b", f"{queue}_b", f"{queue}-b", queue, f"{queue}.b.c", f"{queue}.B"]
    async with running(url) as broker:
        await broker.publish([Outgoing(name, name.encode()) for name in names])
        for name in names:
            consumer = await broker.consume(name, prefetch=5)
            assert bodies(await take(consumer, 1)) == [name.encode()]
            await stays_quiet(consumer, 0.05)
        assert set(names) <= {state.queue for state in await broker.queues()}


async def test_a_name_of_the_greatest_length(url: str) -> None:
    name = uuid.uuid4().hex + "." + "n" * (128 - 33)
    async with running(url) as broker:
        await broker.publish([Outgoing(name, b"x"), Outgoing(name, b"y", reason="r")])
        assert [letter.body for letter in await broker.dead_letters(name, limit=2)] == [b"y"]


@pytest.mark.parametrize(
    "bad", ["a..b", ".a", "a.", "", ".", "a b", "a\r\nPUB x 0\r\n", "a.*", "a.>", "a=b", "n" * 300]
)
async def test_a_name_that_is_no_subject_is_refused_and_the_others_go(url: str, queue: str, bad: str) -> None:
    async with running(url) as broker:
        with pytest.raises(BrokerError, match="NATS cannot have the queue") as caught:
            await broker.publish([Outgoing(queue, b"1"), Outgoing(bad, b"2"), Outgoing(queue, b"3")])
        assert not isinstance(caught.value, BrokerUnavailable)
        assert bodies(await take(await broker.consume(queue, prefetch=2), 2)) == [b"1", b"3"]
        for call in (broker.declare([bad]), broker.consume(bad, prefetch=1)):
            with pytest.raises(BrokerError, match="NATS cannot have the queue"):
                await call
        assert await broker.queues([bad]) == []
        assert await broker.dead_letters(bad, limit=1) == []
        assert await broker.redrive(bad) == await broker.redrive(bad, ["1"]) == await broker.discard(bad, ["1"]) == 0


# -- sizes and amounts ----------------------------------------------------------------------------------------------


async def test_a_body_over_the_servers_limit_is_refused_and_the_others_go(url: str, queue: str) -> None:
    async with running(url) as broker:
        with pytest.raises(BrokerError, match=f"max_payload of {MAX_PAYLOAD}"):
            await broker.publish(
                [Outgoing(queue, b"1"), Outgoing(queue, bytes(MAX_PAYLOAD + 1)), Outgoing(queue, b"2")]
            )
        assert bodies(await take(await broker.consume(queue, prefetch=2), 2)) == [b"1", b"2"]


async def test_a_body_of_just_that_limit_can_be_dead_and_live_again(url: str, queue: str) -> None:
    """The headers of a dead letter do not fit beside it."""
    body = os.urandom(MAX_PAYLOAD)
    async with running(url, publish_timeout=30.0) as broker:
        await broker.publish([Outgoing(queue, body)])
        consumer = await broker.consume(queue, prefetch=1)
        await consumer.dead_letter((await take(consumer, 1))[0], "too large to handle")
        (letter,) = await broker.dead_letters(queue, limit=2)
        assert letter.body == body
        assert letter.reason == NO_REASON
        assert await broker.redrive(queue) == 1
        assert bodies(await take(consumer, 1)) == [body]


@pytest.mark.parametrize("length", [10, 1000, 4096, 100_000])
@pytest.mark.parametrize("reason", ["x", "é", "東", "🛰", " a", "%", "\r\n"])
def test_a_reason_is_kept_or_shortened_but_fits(reason: str, length: int) -> None:
    text = reason * length
    for room in (0, 30, 70, 80, 90, 200, 4000, 1_000_000):
        headers = letter_headers(text, 3, room, "an:id")
        if headers is None:
            assert room < 100
            continue
        assert len(header_block(headers)) <= room
        kept = reason_in({name: value.strip() for name, value in headers.items()})
        assert kept in (text, NO_REASON) or (kept.endswith("…") and text.startswith(kept[:-1].rstrip()))


async def test_many_thousands(url: str, queue: str) -> None:
    count = 20 * WINDOW + 7
    async with running(url) as broker:
        await broker.publish(numbered(queue, count))
        consumer = await broker.consume(queue, prefetch=2000)
        seen: list[bytes] = []
        async with asyncio.timeout(PATIENCE):
            while len(seen) < count:
                batch = await consumer.take(1000)
                seen += bodies(batch)
                await consumer.ack(batch)
        assert seen == [b"%d" % number for number in range(count)]
        await eventually(lambda: is_empty(broker, queue))


async def is_empty(broker: Broker, queue: str) -> bool:
    (state,) = await broker.queues([queue])
    return (state.ready, state.unacked) == (0, 0)


async def test_one_publish_to_many_queues_that_are_missing(url: str, queue: str) -> None:
    names = [f"{queue}.{number}" for number in range(40)]
    async with running(url) as broker:
        await broker.publish([Outgoing(name, name.encode()) for name in names * 3])
        states = {state.queue: state for state in await broker.queues(names)}
        assert [states[name].ready for name in names] == [3] * 40


async def test_thousands_of_dead_letters_with_gaps_between_them(url: str, queue: str) -> None:
    async with running(url) as broker:
        await broker.publish([Outgoing(queue, b"%d" % number, reason="r") for number in range(1000)])
        letters = await broker.dead_letters(queue, limit=2000)
        assert [letter.body for letter in letters] == [b"%d" % number for number in range(1000)]
        gone = [letter.id for number, letter in enumerate(letters) if 10 <= number < 900]
        assert await broker.discard(queue, gone) == 890
        left = [letter for letter in letters if letter.id not in set(gone)]
        assert await broker.dead_letters(queue, limit=2000) == left
        assert await broker.dead_letters(queue, limit=5, after=left[8].id) == left[9:14]
        assert await broker.redrive(queue) == 110
        assert await broker.redrive(queue) == 0
        assert len(await take(await broker.consume(queue, prefetch=200), 110)) == 110


# -- plain clients --------------------------------------------------------------------------------------------------


async def test_a_plain_client_takes_what_we_publish_and_we_what_it_publishes(url: str, queue: str) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue, f"{queue}.answers"])
        await broker.publish([Outgoing(queue, b"question")])
        subscription = await client.jetstream().pull_subscribe(queue, durable=queue)
        (message,) = await subscription.fetch(1, timeout=5)
        assert message.data == b"question"
        await message.ack()
        await eventually(lambda: is_empty(broker, queue))
        await client.jetstream().publish(f"{queue}.answers", b"answer")
        (delivery,) = await take(await broker.consume(f"{queue}.answers", prefetch=1), 1)
        assert (delivery.body, delivery.redeliveries) == (b"answer", 0)


async def test_a_plain_message_goes_every_way(url: str, queue: str) -> None:
    async with running(url, delivery_limit=2) as broker, plain_client(url) as client:
        consumer = await broker.consume(queue, prefetch=1)
        await client.publish(queue, b"plain")  # not even JetStream's publish
        await consumer.retry((await take(consumer, 1))[0], 0.0, "once")
        await consumer.retry((await take(consumer, 1))[0], 0.0, "twice")
        (letter,) = await broker.dead_letters(queue, limit=2)
        assert (letter.body, letter.reason, letter.redeliveries) == (b"plain", "twice", 1)
        assert await broker.redrive(queue) == 1
        assert bodies(await take(consumer, 1)) == [b"plain"]


async def test_whatever_a_plain_client_puts_into_the_dlq_is_shown(url: str, queue: str) -> None:
    odd = {"Oraculo-Redeliveries": "²", "Oraculo-Reason": "%ff%zz", "Status": "503"}
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue])
        await client.publish(dlq_of(queue), b"\xff\x00 no text")
        await client.publish(dlq_of(queue), b"", headers=odd)
        await client.publish(dlq_of(queue), b"blank", headers={"Oraculo-Reason": " "})
        await client.flush()
        letters = await eventually(lambda: have_letters(broker, queue, 3))
        assert [letter.body for letter in letters] == [b"\xff\x00 no text", b"", b"blank"]
        assert [letter.redeliveries for letter in letters] == [0, 0, 0]
        assert letters[0].reason == letters[2].reason == NO_REASON
        consumer = await broker.consume(dlq_of(queue), prefetch=3)
        assert len(await take(consumer, 3)) == 3
        await consumer.close()
        assert await broker.redrive(queue) == 3


async def have_letters(broker: Broker, queue: str, count: int) -> Sequence[DeadLetter]:
    letters = await broker.dead_letters(queue, limit=count + 1)
    return letters if len(letters) == count else ()


async def test_a_plain_durable_consumer_is_shared_and_its_traps_are_taken_out(url: str, queue: str) -> None:
    """Made first by the plain client, with a limit at which JetStream would keep messages and tell nobody."""
    async with running(url) as broker, plain_client(url) as client:
        jetstream = client.jetstream()
        await jetstream.add_stream(name=queue, subjects=[queue], retention="workqueue")
        plain = await jetstream.pull_subscribe(queue, durable=queue, config=ConsumerConfig(max_deliver=2, ack_wait=1))
        consumer = await broker.consume(queue, prefetch=1)
        config = (await api(client, f"CONSUMER.INFO.{queue}.{queue}"))["config"]
        assert (config["max_deliver"], config["max_ack_pending"], config["ack_wait"]) == (-1, -1, 60 * 10**9)
        await broker.publish(numbered(queue, 2))
        (ours,) = await take(consumer, 1)
        (theirs,) = await plain.fetch(1, timeout=5)
        assert {ours.body, theirs.data} == {b"0", b"1"}


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ({"retention": "limits"}, "retention 'limits'"),
        ({"retention": "workqueue", "subjects": ["{queue}", "{queue}.more"]}, "has the subjects"),
        ({"retention": "workqueue", "name": "other-{queue}"}, "overlap"),
    ],
)
async def test_a_foreign_stream_in_the_way_is_told(url: str, queue: str, theirs: dict[str, Any], why: str) -> None:
    config = {"name": queue, "subjects": [queue]} | json.loads(json.dumps(theirs).replace("{queue}", queue))
    async with running(url) as broker, plain_client(url) as client:
        assert "error" not in await api(client, f"STREAM.CREATE.{config['name']}", config)
        for call in (broker.declare([queue]), broker.publish([Outgoing(queue, b"x")])):
            with pytest.raises(BrokerError, match=why) as caught:
                await call
            assert not isinstance(caught.value, BrokerUnavailable)
        await api(client, f"STREAM.DELETE.{config['name']}")


async def test_foreign_consumers_and_streams(url: str, queue: str) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await api(client, f"STREAM.CREATE.foreign-{queue}", {"name": f"foreign-{queue}", "subjects": [f"f.{queue}.>"]})
        await api(client, f"STREAM.CREATE.{queue}", {"name": queue, "subjects": [queue], "retention": "workqueue"})
        pushing = {"durable_name": queue, "name": queue, "ack_policy": "explicit", "deliver_subject": f"x.{queue}"}
        await api(client, f"CONSUMER.CREATE.{queue}.{queue}", {"stream_name": queue, "config": pushing})
        with pytest.raises(BrokerError, match="must be a pull consumer"):
            await broker.consume(queue, prefetch=1)
        names = [state.queue for state in await broker.queues()]
        assert queue in names
        assert not [name for name in names if "foreign" in name]


async def test_somebody_who_answers_on_the_subject_confirms_nothing(url: str, queue: str) -> None:
    async with running(url, publish_timeout=0.5) as broker, plain_client(url) as client:

        async def meddle(message: Any) -> None:
            if message.reply:
                await client.publish(message.reply, b"me too")
                await client.publish(message.reply, b'{"answer": 42}')

        await broker.declare([queue])
        await client.subscribe(queue, cb=meddle)
        await client.flush()
        await api(client, f"STREAM.DELETE.{queue}")
        await assert_fails_soon(broker.publish([Outgoing(queue, b"nowhere")]), 2.0)
        await broker.publish(numbered(queue, 50))
        assert len(await take(await broker.consume(queue, prefetch=50), 50)) == 50


# -- leases, counts and limits --------------------------------------------------------------------------------------


async def test_a_queue_may_have_a_lease_of_its_own(url: str, queue: str) -> None:
    leases = {queue: 0.5}
    async with running(url, lease=60, leases=leases) as broker, running(url, lease=60, leases=leases) as other:
        first = await broker.consume(queue, prefetch=10)
        await broker.publish([Outgoing(queue, b"{}")])
        await first.take(10)
        second = await other.consume(queue, prefetch=10)
        assert [delivery.body for delivery in await asyncio.wait_for(second.take(10), 10)] == [b"{}"]


async def test_an_unsettled_delivery_comes_again_after_its_lease_and_is_no_longer_ours(url: str, queue: str) -> None:
    async with running(url, lease=0.5) as broker, running(url, lease=0.5) as other:
        await broker.publish([Outgoing(queue, b"slow")])
        consumer = await broker.consume(queue, prefetch=1)
        (stale,) = await take(consumer, 1)
        (again,) = await take(await other.consume(queue, prefetch=1), 1)
        assert (again.body, again.redeliveries) == (b"slow", 1)
        await consumer.ack([stale])
        await consumer.retry(stale, 0.0, "too late")
        await consumer.dead_letter(stale, "too late")
        (state,) = await broker.queues([queue])
        assert state.ready + state.unacked == 1
        assert state.dead_letters == 0


async def test_an_extended_delivery_does_not_come_again(url: str, queue: str) -> None:
    async with running(url, lease=0.6) as broker, running(url, lease=0.6) as other:
        await broker.publish([Outgoing(queue, b"long work")])
        consumer = await broker.consume(queue, prefetch=1)
        held = await take(consumer, 1)
        waiting = asyncio.create_task(take(await other.consume(queue, prefetch=1), 1))
        for _ in range(8):
            await asyncio.wait({waiting}, timeout=0.2)
            await consumer.extend(held)
        assert not waiting.done()
        await consumer.ack(held)
        await eventually(lambda: is_empty(broker, queue))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_what_waits_behind_a_busy_caller_is_not_given_to_others(url: str, queue: str) -> None:
    """The prefetch is fetched, and the caller handles one message for longer than the lease."""
    async with running(url, lease=0.6, heartbeat=0.1) as broker, running(url, lease=0.6) as other:
        await broker.publish(numbered(queue, 3))
        consumer = await broker.consume(queue, prefetch=3)
        busy = await take(consumer, 1)
        waiting = asyncio.create_task(take(await other.consume(queue, prefetch=1), 1))
        for _ in range(8):
            await asyncio.wait({waiting}, timeout=0.2)
            await consumer.extend(busy)
        assert not waiting.done()
        rest = await take(consumer, 2)
        assert [(each.body, each.redeliveries) for each in rest] == [(b"1", 0), (b"2", 0)]
        await consumer.ack([*busy, *rest])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_lapsed_delivery_makes_room_for_others(url: str, queue: str) -> None:
    async with running(url, lease=0.4, heartbeat=0.1) as broker:
        await broker.publish(numbered(queue, 2))
        consumer = await broker.consume(queue, prefetch=1)
        assert bodies(await take(consumer, 1)) == [b"0"]
        assert {each.body for _ in range(2) for each in await take(consumer, 1)} <= {b"0", b"1"}


async def test_a_delivery_whose_lease_ended_while_it_could_not_be_moved_is_let_go(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url, lease=1.0, heartbeat=0.1) as broker:
        refused = asyncio.Event()

        async def bury(_: object) -> None:
            await refused.wait()
            raise BrokerUnavailable("JetStream is not available now")

        monkeypatch.setattr(broker, "bury", bury)
        await broker.publish([Outgoing(queue, b"bad")])
        consumer = await broker.consume(queue, prefetch=1)
        (stale,) = await take(consumer, 1)
        moving = asyncio.create_task(consumer.dead_letter(stale, "why"))
        again = await take(consumer, 1)
        refused.set()
        with pytest.raises(BrokerUnavailable):
            await moving
        await consumer.ack([stale])
        await consumer.extend([stale])
        await consumer.ack(again)
        await broker.publish([Outgoing(queue, b"next")])
        assert bodies(await take(consumer, 1, PROMPT)) == [b"next"], "its place is free again"


async def test_a_delivery_that_is_being_moved_keeps_its_place(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(url) as broker:
        goes_on, bury = asyncio.Event(), broker.bury

        async def slow(letters: Any) -> None:
            await goes_on.wait()
            await bury(letters)

        monkeypatch.setattr(broker, "bury", slow)
        await broker.publish(numbered(queue, 2))
        consumer = await broker.consume(queue, prefetch=1)
        (delivery,) = await take(consumer, 1)
        moving = asyncio.create_task(consumer.dead_letter(delivery, "why"))
        await stays_quiet(consumer)
        await consumer.ack([delivery])  # too late: it is on its way
        goes_on.set()
        await moving
        assert bodies(await take(consumer, 1, PROMPT)) == [b"1"]
        assert [letter.body for letter in await broker.dead_letters(queue, limit=2)] == [b"0"]


async def test_deliveries_are_counted_across_consumers_and_connections(url: str, queue: str) -> None:
    async with running(url) as broker:
        await broker.publish([Outgoing(queue, b"again")])
    for redeliveries in range(4):
        async with running(url) as broker:
            (delivery,) = await take(await broker.consume(queue, prefetch=1), 1, PROMPT)
            assert (delivery.body, delivery.redeliveries) == (b"again", redeliveries)


async def test_one_that_nobody_ever_settles_ends_in_the_dlq(url: str, queue: str) -> None:
    """Nobody calls retry: it is given back by consumers that close, and by leases that end."""
    async with running(url, delivery_limit=3, lease=0.3) as broker:
        await broker.publish([Outgoing(queue, b"poison"), Outgoing(queue, b"other")])
        seen = []
        for closes in (True, False, True):
            consumer = await broker.consume(queue, prefetch=1)
            (delivery,) = await take(consumer, 1)
            seen.append((delivery.body, delivery.redeliveries))
            await (consumer.close() if closes else take(await broker.consume(queue, prefetch=1), 1))
        heir = await broker.consume(queue, prefetch=2)
        left = asyncio.create_task(drain(heir))
        letters = await eventually(lambda: have_letters(broker, queue, 2))
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert {letter.body for letter in letters} == {b"poison", b"other"}
        assert {letter.reason for letter in letters} == {"delivered 3 times and never settled"}
        assert {letter.redeliveries for letter in letters} == {2}
        assert await is_empty(broker, queue)


async def drain(consumer: Consumer) -> None:
    """Takes and never settles."""
    while await consumer.take(10):
        pass


async def test_what_the_quarantine_does_not_take_stays_in_its_queue(url: str, queue: str) -> None:
    """The quarantine was made by others, for small messages only."""
    dlq = {"name": f"{queue}=dlq", "subjects": [dlq_of(queue)], "retention": "workqueue", "max_msg_size": 200}
    async with running(url, delivery_limit=1) as broker, plain_client(url) as client:
        assert "error" not in await api(client, f"STREAM.CREATE.{queue}=dlq", dlq)
        await broker.publish([Outgoing(queue, bytes(300))])
        consumer = await broker.consume(queue, prefetch=1)
        (delivery,) = await take(consumer, 1)
        for settling in (consumer.dead_letter(delivery, "bad"), consumer.retry(delivery, 0.0, "bad")):
            with pytest.raises(BrokerError, match="message size") as caught:
                await settling
            assert not isinstance(caught.value, BrokerUnavailable)
        assert await ready(broker, queue, 1)
        await consumer.close()
        heir = await broker.consume(queue, prefetch=1)
        await broker.publish([Outgoing(queue, b"small")])
        assert bodies(await take(heir, 1, PROMPT)) == [b"small"], "it is in nobody's way"
        assert await ready(broker, queue, 2)


async def test_thousands_that_wait_for_a_delay_hold_up_no_other(url: str, queue: str) -> None:
    """JetStream counts them as unsettled, and by default stops a consumer at a thousand."""
    async with running(url) as broker:
        await broker.publish(numbered(queue, 1500))
        consumer = await broker.consume(queue, prefetch=1500)
        for delivery in await take(consumer, 1500):
            await consumer.retry(delivery, 60.0, "later")
        await broker.publish([Outgoing(queue, b"quick")])
        assert bodies(await take(consumer, 1, PROMPT)) == [b"quick"]
        (state,) = await broker.queues([queue])
        assert (state.ready, state.unacked) == (1500, 1)


async def test_two_brokers_share_a_queue(url: str, queue: str) -> None:
    handled: list[bytes] = []

    async def work(broker: Broker) -> None:
        consumer = await broker.consume(queue, prefetch=20)
        while batch := await consumer.take(20):
            handled.extend(bodies(batch))
            await consumer.ack(batch)

    async with running(url) as one, running(url) as two:
        workers = [asyncio.create_task(work(broker)) for broker in (one, two)]
        await one.publish(numbered(queue, 2000))
        await until(lambda: len(handled) >= 2000)
        await eventually(lambda: is_empty(one, queue))
        for broker in (one, two):
            await broker.close()
        await asyncio.gather(*workers)
    assert sorted(handled) == sorted(b"%d" % number for number in range(2000))


async def test_a_move_that_is_done_twice_makes_no_duplicate(url: str, queue: str) -> None:
    """The letter was confirmed, and the process died before the ack: it comes again, and is moved again."""
    async with running(url, lease=0.4) as broker, plain_client(url) as client:
        await broker.publish([Outgoing(queue, b"bad")])
        consumer = await broker.consume(queue, prefetch=1)
        (delivery,) = await take(consumer, 1)
        consumer.connection.send = lambda *_: None  # type: ignore[method-assign] # no ack is sent any more
        await consumer.dead_letter(delivery, "broken")
        async with running(url, lease=0.4) as heir:
            successor = await heir.consume(queue, prefetch=1)
            await successor.dead_letter((await take(successor, 1))[0], "broken")
            assert len(await heir.dead_letters(queue, limit=5)) == 1
            await eventually(lambda: is_empty(heir, queue))
        assert (await api(client, f"STREAM.INFO.{queue}=dlq"))["state"]["last_seq"] == 1


# -- deaf consumers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("while_waiting", [True, False])
async def test_a_consumer_deleted_on_the_server_is_noticed_and_made_again(
    url: str, queue: str, while_waiting: bool
) -> None:
    async with running(url, heartbeat=5.0) as broker, plain_client(url) as client:  # silence would tell later
        await broker.publish(numbered(queue, 2))
        consumer = await broker.consume(queue, prefetch=3)
        held = await take(consumer, 2)
        if not while_waiting:
            await api(client, f"CONSUMER.DELETE.{queue}.{queue}")
        taking = asyncio.create_task(consumer.take(1))
        if while_waiting:
            await asyncio.wait({taking}, timeout=0.1)
            await api(client, f"CONSUMER.DELETE.{queue}.{queue}")
        assert queue in await assert_fails_soon(taking, PROMPT)
        await assert_fails_soon(consumer.take(1), 0.1)
        await assert_fails_soon(consumer.ack(held), 0.1)
        assert broker.links()[0].trouble is not None
        assert bodies(await take(await broker.consume(queue, prefetch=2), 2, PROMPT)) == [b"0", b"1"]
        assert broker.links() == [Link("nats", None, 0)]


async def test_a_stream_deleted_on_the_server_is_noticed_and_made_again(url: str, queue: str) -> None:
    async with running(url, heartbeat=5.0) as broker, plain_client(url) as client:  # silence would tell later
        consumer = await broker.consume(queue, prefetch=1)
        taking = asyncio.create_task(consumer.take(1))
        await asyncio.wait({taking}, timeout=0.1)
        await api(client, f"STREAM.DELETE.{queue}")
        await assert_fails_soon(taking, PROMPT)
        consumer = await broker.consume(queue, prefetch=1)
        await broker.publish([Outgoing(queue, b"new")])
        assert bodies(await take(consumer, 1, PROMPT)) == [b"new"]
        assert broker.links()[0].losses == 1, "what the stream held was lost"


async def test_publishing_to_a_stream_that_was_deleted_makes_it_again(url: str, queue: str) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue])
        await api(client, f"STREAM.DELETE.{queue}")
        await api(client, f"STREAM.DELETE.{queue}=dlq")
        await broker.publish([*numbered(queue, 3), Outgoing(queue, b"bad", reason="r")])
        consumer = await broker.consume(queue, prefetch=3)
        assert bodies(await take(consumer, 3, PROMPT)) == [b"0", b"1", b"2"]
        assert len(await broker.dead_letters(queue, limit=2)) == 1


async def test_a_black_hole_is_noticed_by_its_silence(url: str, queue: str) -> None:
    with Proxy(url) as proxy:
        async with running(proxy.url, heartbeat=0.2) as broker:
            consumer = await broker.consume(queue, prefetch=1)
            taking = asyncio.create_task(consumer.take(1))
            await asyncio.wait({taking}, timeout=0.1)
            proxy.swallows = True
            assert "heartbeats" in await assert_fails_soon(taking, 2.0)
            proxy.swallows = False


async def test_a_subscription_that_waits_long_stays_alive(
    url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pulls end and are made again."""
    monkeypatch.setattr("oraculo.brokers.nats.consumer.PULL_EXPIRES", 0.3)
    async with running(url, heartbeat=0.1) as broker:
        consumer = await broker.consume(queue, prefetch=5)
        await stays_quiet(consumer, 1.2)
        await broker.publish(numbered(queue, 5))
        assert len(await take(consumer, 5, PROMPT)) == 5


# -- connections that break -----------------------------------------------------------------------------------------


async def test_a_cut_connection_is_told_at_once_and_what_was_held_comes_again_at_once(url: str, queue: str) -> None:
    with Proxy(url) as proxy:
        async with running(proxy.url) as broker:
            await broker.publish(numbered(queue, 10))
            consumer = await broker.consume(queue, prefetch=10)
            held = await take(consumer, 4)
            await consumer.ack(held[:1])
            await eventually(lambda: ready(broker, queue, 9))
            await take(consumer, 6)
            taking = asyncio.create_task(consumer.take(1))
            await asyncio.wait({taking}, timeout=0.05)
            proxy.cut()
            said = await assert_fails_soon(taking, 2.0)
            assert broker.links()[0].trouble == said
            await assert_fails_soon(consumer.ack(held), 0.1)
            heir = await broker.consume(queue, prefetch=10)
            assert broker.links()[0].trouble is None
            again = await take(heir, 9, PROMPT)
            assert sorted(bodies(again)) == [b"%d" % number for number in range(1, 10)]
            assert {each.redeliveries for each in again} == {1}
            await consumer.close()
            await heir.ack(again)
            await eventually(lambda: is_empty(broker, queue))


async def ready(broker: Broker, queue: str, count: int) -> bool:
    (state,) = await broker.queues([queue])
    return state.ready + state.unacked == count


async def test_all_who_call_after_a_break_share_one_connection(url: str, queue: str) -> None:
    with Proxy(url) as proxy:
        async with running(proxy.url) as broker:
            await broker.declare([queue])
            proxy.cut()
            await until(lambda: broker.links()[0].trouble)
            await asyncio.gather(*(broker.publish(numbered(queue, 10)) for _ in range(20)))
            assert proxy.cut() == 2, "one connection has two halves"


async def test_a_publish_that_is_cut_off_says_so_and_the_next_one_works(url: str, queue: str) -> None:
    with Proxy(url) as proxy:
        async with running(proxy.url) as broker:
            await broker.declare([queue])
            proxy.swallows = True
            publishing = asyncio.create_task(broker.publish(numbered(queue, 100)))
            await asyncio.wait({publishing}, timeout=0.1)
            proxy.cut()
            proxy.swallows = False
            await assert_fails_soon(publishing, 2.0)
            await broker.publish([Outgoing(queue, b"after")])


async def test_everything_unsettled_survives_a_kill_of_the_server(fleet: Fleet, queue: str) -> None:
    server = fleet.breakable("nats")
    async with running(server.url, lease=2.0) as broker:
        await broker.publish([*numbered(queue, 30), Outgoing(queue, b"bad", reason="why")])
        consumer = await broker.consume(queue, prefetch=20)
        held = await take(consumer, 10)
        await consumer.ack(held[:5])
        await eventually(lambda: ready(broker, queue, 25))
        taking = asyncio.create_task(drain(consumer))
        server.kill()
        await assert_fails_soon(taking, 2.0)
        await assert_fails_soon(broker.publish([Outgoing(queue, b"lost")]), 4.0)
        server.start()
        heir = await broker.consume(queue, prefetch=50)
        seen: set[bytes] = set()
        async with asyncio.timeout(PATIENCE):
            while len(seen) < 25:
                batch = await heir.take(50)
                seen.update(bodies(batch))
                await heir.ack(batch)
        assert seen >= {b"%d" % number for number in range(5, 30)}
        (letter,) = await broker.dead_letters(queue, limit=2)
        assert letter.reason == "why"
        assert broker.links() == [Link("nats", None, 0)]


async def test_a_server_that_came_back_empty_counts_as_one_loss(queue: str) -> None:
    with Nats() as server:
        async with running(server.url) as broker:
            await broker.declare([queue, f"{queue}.2"])
            await broker.publish([Outgoing(queue, b"gone")])
            server.kill()
            shutil.rmtree(server.folder / "jetstream")
            server.start()
            await until(lambda: broker.links()[0].trouble)
            await broker.publish([Outgoing(f"{queue}.2", b"new")])
            assert broker.links()[0].losses == 1
            await broker.publish([Outgoing(queue, b"new")])
            assert bodies(await take(await broker.consume(queue, prefetch=1), 1)) == [b"new"]
            assert broker.links()[0].losses == 1


async def test_of_many_queues_only_some_are_remembered(url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("broker", "connection"):
        monkeypatch.setattr(f"oraculo.brokers.nats.{module}.MOST_KNOWN", 10)
    async with running(url) as broker:
        consumer = await broker.consume(queue, prefetch=1)
        for number in range(30):
            name = f"{queue}.{number}"
            await broker.publish([Outgoing(name, b"0"), Outgoing(f"{queue}.used", b"x")])
            other = await broker.consume(name, prefetch=1)
            await other.retry((await take(other, 1))[0], 60.0, "later")
            await other.close()
        assert broker._connection is not None
        tables = (broker._connection.made, broker._born, broker._given_back._due)
        assert [len(table) for table in tables] == [10, 10, 10]
        assert {queue, f"{queue}=used"} <= broker._born.keys(), "what is in use is not forgotten"
        assert broker.links()[0].losses == 0
        await broker.publish(numbered(queue, 1))
        assert bodies(await take(consumer, 1)) == [b"0"]


def test_of_what_is_given_back_only_so_much_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oraculo.brokers.nats.broker.MOST_GIVEN_BACK", 10)
    monkeypatch.setattr("oraculo.brokers.nats.broker.MOST_GIVEN_BACK_TOGETHER", 30)
    given_back = _GivenBack(SystemClock())
    told = {"ack_floor": {"stream_seq": 0}, "num_ack_pending": 100}
    for number in range(5):
        for sequence in range(1, 21):
            given_back.note(f"q{number}", sequence, 60.0)
    assert [given_back.count(f"q{number}", told) for number in range(5)] == [0, 0, 10, 10, 10]
    for number in range(5):
        given_back.forget(f"q{number}", range(1, 21))
    assert given_back._due == {}
    assert given_back._together == 0


async def test_with_many_streams_a_connection_is_made_again_all_the_same(
    queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at all of them would take longer than a connection may."""
    monkeypatch.setattr("oraculo.brokers.nats.broker.PAGE", 8)
    monkeypatch.setattr("oraculo.brokers.nats.broker.LOOKING_FOR_LOSSES", 0.2)
    names = [f"{queue}.{number}" for number in range(30)]
    ask_many = Connection.ask_many

    async def slow(self: Connection, calls: Any) -> Any:
        several = list(calls)
        await asyncio.sleep(0.02 * sum(verb.startswith("STREAM.INFO") for verb, _ in several))
        return await ask_many(self, several)

    with Nats() as server:
        async with running(server.url, connect_timeout=1.0) as broker:
            await broker.declare(names)
            server.kill()
            server.start()
            await until(lambda: broker.links()[0].trouble)
            monkeypatch.setattr(Connection, "ask_many", slow)
            await broker.publish([Outgoing(names[0], b"x")])
            assert broker.links() == [Link("nats", None, 0)]
            server.kill()
            shutil.rmtree(server.folder / "jetstream")
            server.start()
            await until(lambda: broker.links()[0].trouble)
            for name in names:
                await broker.publish([Outgoing(name, b"x")])
            assert broker.links() == [Link("nats", None, 1)], "one loss, although not all were looked at"


async def test_a_frozen_server_blocks_nobody_for_longer_than_the_timeouts(fleet: Fleet, queue: str) -> None:
    server = fleet.breakable("nats")
    async with running(server.url, publish_timeout=0.8, connect_timeout=0.5, heartbeat=0.2) as broker:
        consumer = await broker.consume(queue, prefetch=1)
        taking = asyncio.create_task(consumer.take(1))
        await asyncio.wait({taking}, timeout=0.1)
        server.freeze()
        try:
            await assert_fails_soon(broker.publish([Outgoing(queue, bytes(1024 * 1024))] * 20), 1.5)
            await assert_fails_soon(taking, 1.5)
            await assert_fails_soon(broker.publish([Outgoing(queue, b"x")]), 1.5)
            await assert_fails_soon(broker.check(), 1.5)
            assert broker.links()[0].trouble is not None
        finally:
            server.thaw()
        await broker.publish([Outgoing(queue, b"again")])
        assert broker.links()[0].trouble is None
        consumer = await broker.consume(queue, prefetch=100)
        async with asyncio.timeout(PATIENCE):
            while b"again" not in bodies(await consumer.take(100)):
                pass  # some of those that were not confirmed


async def test_closing_beside_a_frozen_server_is_quick_and_leaves_nothing(fleet: Fleet, queue: str) -> None:
    server = fleet.breakable("nats")
    broker = NatsBroker(server.url, publish_timeout=30.0)
    await broker.start()
    await broker.publish(numbered(queue, 5))
    consumer = await broker.consume(queue, prefetch=5)
    await take(consumer, 2)
    before = asyncio.all_tasks()
    server.freeze()
    try:
        publishing = asyncio.create_task(broker.publish([Outgoing(queue, bytes(1024 * 1024))] * 20))
        taking = asyncio.create_task(consumer.take(1))
        await asyncio.wait({publishing}, timeout=0.1)
        started = time.monotonic()
        await broker.close()
        assert time.monotonic() - started < 4.0
        (outcome,) = await asyncio.gather(publishing, return_exceptions=True)
        assert isinstance(outcome, BrokerUnavailable)
        await asyncio.gather(taking, return_exceptions=True)
    finally:
        server.thaw()
    assert asyncio.all_tasks() <= before
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_nothing_is_left_behind(url: str, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    """No task, no transport, no complaint of asyncio, however it ended."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    with Proxy(url) as proxy:
        async with running(proxy.url) as broker:
            consumer = await broker.consume(queue, prefetch=5)
            publishing = [asyncio.create_task(broker.publish(numbered(queue, 500))) for _ in range(5)]
            await take(consumer, 3)
            proxy.cut()
            await asyncio.gather(*publishing, return_exceptions=True)
            with suppress(BrokerUnavailable):
                await consumer.take(1)
            await broker.publish([Outgoing(queue, b"x")])
            await broker.consume(queue, prefetch=5)
            proxy.refuses = True
            proxy.cut()
            await until(lambda: broker.links()[0].trouble)
            calls = [asyncio.create_task(broker.check()) for _ in range(3)]
            await asyncio.wait(calls, timeout=0.05)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {BrokerUnavailable}
    assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


async def test_it_can_be_started_again(url: str, queue: str) -> None:
    broker = NatsBroker(url)
    for _ in range(3):
        await broker.start()
        await broker.publish([Outgoing(queue, b"x")])
        await broker.close()
        await assert_fails_soon(broker.publish([Outgoing(queue, b"x")]), 0.1)
    await broker.start()
    assert len(await take(await broker.consume(queue, prefetch=3), 3)) == 3
    await broker.close()


# -- other processes ------------------------------------------------------------------------------------------------

_TAKES_AND_HANGS = """
import asyncio, sys
from oraculo.brokers.nats import NatsBroker

async def main():
    broker = NatsBroker(sys.argv[1], lease=1.0)
    await broker.start()
    consumer = await broker.consume(sys.argv[2], prefetch=3)
    taken = []
    while len(taken) < 3:
        taken += await consumer.take(3)
    await consumer.ack(taken[:1])
    await broker.check()
    print("holding", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_what_a_killed_process_held_is_delivered_again(url: str, queue: str) -> None:
    async with running(url, lease=1.0) as broker:
        await broker.publish(numbered(queue, 3))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _TAKES_AND_HANGS, url, queue, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(PATIENCE):
                assert await process.stdout.readline() == b"holding\n"
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        again = await take(await broker.consume(queue, prefetch=3), 2, PROMPT)
        assert [(each.body, each.redeliveries) for each in again] == [(b"1", 1), (b"2", 1)]


async def test_the_plain_worker_of_the_examples_answers(url: str, queue: str) -> None:
    """It knows nothing of ORÁCULO, and makes the queue itself when it comes first."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "examples/plain_workers/nats_worker.py", url, queue, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert worker.stdout is not None
        async with asyncio.timeout(PATIENCE):
            assert queue.encode() in await worker.stdout.readline()
        async with running(url) as broker:
            answers = await broker.consume("resultados", prefetch=1)
            command = {
                "correlation_id": queue,
                "tipo_evento": "iniciar_execucao",
                "payload": {"x": 1},
                "timestamp": "2026-11-15T05:00:00Z",
                "tarefa": "a-task",
                "tentativa": 1,
            }
            await broker.publish([Outgoing(queue, b"no JSON"), Outgoing(queue, json.dumps(command).encode())])
            (delivery,) = await take(answers, 1)
            answer = json.loads(delivery.body)
            await answers.ack([delivery])
            assert (answer["correlation_id"], answer["tarefa"], answer["tentativa"]) == (queue, "a-task", 1)
            assert (answer["tipo_evento"], answer["payload"]["status"]) == ("resultado_execucao", "ok")
            await eventually(lambda: is_empty(broker, queue))
            (letter,) = await broker.dead_letters(queue, limit=2)
            assert letter.body == b"no JSON"
            assert "JSON" in letter.reason
    finally:
        worker.kill()
        await worker.wait()


async def test_the_plain_worker_makes_no_queue_that_nobody_asked_for_and_survives_odd_commands() -> None:
    command = {"correlation_id": "c", "tipo_evento": "iniciar_execucao", "payload": {}}
    odd = [json.dumps(command | {"responder_em": bad}).encode() for bad in (7, "a b", "*", ["x"])]
    with Nats() as server:
        script = "examples/plain_workers/nats_worker.py"
        worker = await asyncio.create_subprocess_exec(sys.executable, script, server.url, "p.q")
        try:
            async with running(server.url) as broker, plain_client(server.url) as client:
                await broker.publish([Outgoing("p.q", json.dumps(command | {"responder_em": "p.answers"}).encode())])
                assert len(await take(await broker.consume("p.answers", prefetch=1), 1)) == 1
                assert (await api(client, "STREAM.INFO.resultados"))["error"]["code"] == 404
                last = json.dumps(command | {"responder_em": None}).encode()
                await broker.publish([Outgoing("p.q", body) for body in (*odd, last)])
                assert len(await take(await broker.consume("resultados", prefetch=1), 1)) == 1
                assert [letter.body for letter in await broker.dead_letters("p.q", limit=9)] == odd
            assert worker.returncode is None
        finally:
            worker.kill()
            await worker.wait()
