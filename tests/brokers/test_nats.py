"""NATS JetStream: the suite every broker passes, how it starts and is let in, names, sizes and amounts."""

import asyncio
import os
import re
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from oraculo.brokers.nats import NatsBroker
from oraculo.brokers.nats.broker import _state as queue_state
from oraculo.brokers.nats.known_queues import KnownQueues
from oraculo.brokers.nats.layout import header_block, letter_headers, reason_in
from oraculo.brokers.nats.publisher import WINDOW
from oraculo.brokers.nats.replies import UNANSWERED, ApiError
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings, MessageTooLarge
from oraculo.ports.broker import NO_REASON, Broker, Capabilities, Outgoing, ensure_taken, publish_all
from oraculo.ports.broker_admin import DEAD_LETTER_BODY_BYTES, QueueState
from oraculo.testing.broker_suite import BrokerSuite
from oraculo.wire.naming import LONGEST_REASON, dlq_of
from tests.brokers import nats_stage as stage
from tests.brokers.nats_stage import (
    PATIENCE,
    PROMPT,
    BareNats,
    api,
    assert_fails_soon,
    bodies,
    eventually,
    is_empty,
    numbered,
    plain_client,
    running,
    stays_quiet,
    take,
)
from tests.receipts import takers
from tests.servers.fleet import Fleet
from tests.servers.nats import Nats
from tests.servers.process import free_port
from tests.servers.proxy import Proxy

url, queue = stage.url, stage.queue  # fixtures

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

    async def delete_alone(self, queue: str) -> None:
        async with plain_client(self.url) as client:
            assert "error" not in await api(client, f"STREAM.DELETE.{queue}")


# -- making and starting --------------------------------------------------------------------------------------------


async def test_making_one_connects_to_nobody() -> None:
    broker = NatsBroker("nats://127.0.0.1:1")
    assert broker.capabilities == Capabilities(
        durable=True, shared=True, priorities=False, counts_consumers=False, peeks=True, drops_repeats=True
    )
    assert broker.statuses()[0].trouble is not None
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
    assert broker.statuses()[0].trouble == said
    await broker.close()


async def test_a_start_that_failed_is_made_up_for_by_the_next_call(url: str, queue: str) -> None:
    with Proxy(url) as proxy:
        proxy.refuses = True
        broker = NatsBroker(proxy.url)
        await assert_fails_soon(broker.start(), 3.5)
        proxy.refuses = False
        assert takers(await broker.publish([Outgoing(queue, b"now")])) == ["nats"]
        assert broker.statuses()[0].trouble is None
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
            await publish_all(broker, [Outgoing(queue, b"sealed")])
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
                ensure_taken(await broker.publish([Outgoing("forbidden.queue", b"x")]))
            await publish_all(broker, [Outgoing("allowed", b"x")])


def _hosts(url: str) -> str:
    return url.partition("://")[2]


async def test_of_several_hosts_one_that_refuses_or_does_not_answer_is_passed_over(url: str, queue: str) -> None:
    with BareNats('authorization { token: "t" }') as closed:
        broker = NatsBroker(f"nats://127.0.0.1:{free_port()},{_hosts(closed.url)},{_hosts(url)}")
        await broker.start()
        assert (await broker.check()).endswith(_hosts(url))
        await publish_all(broker, [Outgoing(queue, b"x")])
        await broker.close()
        nobody = NatsBroker(f"nats://{_hosts(closed.url)},{_hosts(closed.url)}")
        with pytest.raises(BrokerError, match="refused the credentials") as caught:
            await nobody.start()
        assert not isinstance(caught.value, BrokerUnavailable)
        await nobody.close()


@pytest.mark.parametrize("patience", [0.2, 30.0], ids=["gives up", "waits"])
async def test_a_host_that_says_nothing_is_passed_over(patience: float, url: str) -> None:
    """By who waits, at once; by who gives up and starts again, then."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"127.0.0.1:{silent.getsockname()[1]},{_hosts(url)}"
        broker = NatsBroker(f"nats://{hosts}", connect_timeout=1.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await broker.start()
        if patience < 1:
            await broker.close()
            async with asyncio.timeout(5):
                await broker.start()
        await broker.check()
        await broker.close()


async def test_it_can_be_started_again(url: str, queue: str) -> None:
    broker = NatsBroker(url)
    for _ in range(3):
        await broker.start()
        await publish_all(broker, [Outgoing(queue, b"x")])
        await broker.close()
        await assert_fails_soon(broker.publish([Outgoing(queue, b"x")]), 0.1)
    await broker.start()
    assert len(await take(await broker.consume(queue, prefetch=3), 3)) == 3
    await broker.close()


# -- names ----------------------------------------------------------------------------------------------------------


async def test_names_that_differ_in_a_dot_are_different_queues(url: str, queue: str) -> None:
    names = [f"{queue}.b", f"{queue}_b", f"{queue}-b", queue, f"{queue}.b.c", f"{queue}.B"]
    async with running(url) as broker:
        await publish_all(broker, [Outgoing(name, name.encode()) for name in names])
        for name in names:
            consumer = await broker.consume(name, prefetch=5)
            assert bodies(await take(consumer, 1)) == [name.encode()]
            await stays_quiet(consumer, 0.05)
        assert set(names) <= {state.queue for state in await broker.queues()}


async def test_a_name_of_the_greatest_length(url: str) -> None:
    name = uuid.uuid4().hex + "." + "n" * (128 - 33)
    async with running(url) as broker:
        await publish_all(broker, [Outgoing(name, b"x"), Outgoing(name, b"y", reason="r")])
        assert [letter.body for letter in await broker.dead_letters(name, limit=2)] == [b"y"]


@pytest.mark.parametrize(
    "bad", ["a..b", ".a", "a.", "", ".", "a b", "a\r\nPUB x 0\r\n", "a.*", "a.>", "a=b", "n" * 300]
)
async def test_a_name_that_is_no_subject_is_refused_and_the_others_go(url: str, queue: str, bad: str) -> None:
    async with running(url) as broker:
        with pytest.raises(BrokerError, match="NATS cannot have the queue") as caught:
            ensure_taken(await broker.publish([Outgoing(queue, b"1"), Outgoing(bad, b"2"), Outgoing(queue, b"3")]))
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
        told = f"a message of {MAX_PAYLOAD + 7} bytes for {queue} is over the server's max_payload of {MAX_PAYLOAD}"
        with pytest.raises(MessageTooLarge, match=f"{told} bytes; raise that") as caught:
            ensure_taken(
                await broker.publish(
                    [Outgoing(queue, b"1"), Outgoing(queue, bytes(MAX_PAYLOAD + 7)), Outgoing(queue, b"2")]
                )
            )
        assert caught.value.excess == 7
        assert bodies(await take(await broker.consume(queue, prefetch=2), 2)) == [b"1", b"2"]


async def test_a_body_of_just_that_limit_can_be_dead_and_live_again(url: str, queue: str) -> None:
    """The headers of a dead letter do not fit beside it."""
    body = os.urandom(MAX_PAYLOAD)
    async with running(url, publish_timeout=30.0) as broker:
        await publish_all(broker, [Outgoing(queue, body)])
        consumer = await broker.consume(queue, prefetch=1)
        await consumer.dead_letter((await take(consumer, 1))[0], "too large to handle")
        (letter,) = await broker.dead_letters(queue, limit=2)
        assert letter.body == body[:DEAD_LETTER_BODY_BYTES]
        assert letter.reason == NO_REASON
        assert await broker.redrive(queue) == 1
        assert bodies(await take(consumer, 1)) == [body]


async def test_a_key_that_does_not_fit_beside_its_body_is_left_out(url: str, queue: str) -> None:
    body = os.urandom(MAX_PAYLOAD - 20)
    async with running(url, publish_timeout=30.0) as broker:
        await publish_all(broker, [Outgoing(queue, body, key="one")])
        assert bodies(await take(await broker.consume(queue, prefetch=1), 1)) == [body]


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


async def test_a_reason_keeps_as_many_characters_as_elsewhere_whatever_they_are(url: str, queue: str) -> None:
    whole, longer = "🛰" * LONGEST_REASON, "é" * (LONGEST_REASON + 1)
    async with running(url) as broker:
        await publish_all(broker, [Outgoing(queue, b"", reason=reason) for reason in (whole, longer)])
        kept = [letter.reason for letter in await broker.dead_letters(queue, limit=3)]
        assert kept == [whole, "é" * (LONGEST_REASON - 1) + "…"]


async def test_many_thousands(url: str, queue: str) -> None:
    count = 20 * WINDOW + 7
    async with running(url) as broker:
        await publish_all(broker, numbered(queue, count))
        consumer = await broker.consume(queue, prefetch=2000)
        seen: list[bytes] = []
        async with asyncio.timeout(PATIENCE):
            while len(seen) < count:
                batch = await consumer.take(1000)
                seen += bodies(batch)
                await consumer.ack(batch)
        assert seen == [b"%d" % number for number in range(count)]
        await eventually(lambda: is_empty(broker, queue))


async def test_large_messages_come_a_few_at_a_time(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server cuts off a client for which too much waits to be read. One message may be over what is asked for."""
    monkeypatch.setattr("oraculo.brokers.nats.consumer.PULL_BYTES", 1_000_000)
    sizes = [*[800_000] * 40, 3_000_000, 2_000_000, *[400_000] * 5]
    with BareNats("max_pending: 8MB") as server:
        async with running(server.url) as broker:
            await publish_all(broker, [Outgoing(queue, bytes(size)) for size in sizes])
            consumer = await broker.consume(queue, prefetch=2000)
            came: list[int] = []
            async with asyncio.timeout(PROMPT):
                while len(came) < len(sizes):
                    taken = await consumer.take(len(sizes))
                    came += [len(each.body) for each in taken]
                    await consumer.ack(taken)  # it would not hold all of them
            assert came == sizes


async def test_one_publish_to_many_queues_that_are_missing(url: str, queue: str) -> None:
    names = [f"{queue}.{number}" for number in range(40)]
    async with running(url) as broker:
        await publish_all(broker, [Outgoing(name, name.encode()) for name in names * 3])
        states = {state.queue: state for state in await broker.queues(names)}
        assert [states[name].ready for name in names] == [3] * 40


async def test_thousands_of_dead_letters_with_gaps_between_them(url: str, queue: str) -> None:
    async with running(url) as broker:
        await publish_all(broker, [Outgoing(queue, b"%d" % number, reason="r") for number in range(1000)])
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


async def test_large_dead_letters_are_looked_at_a_few_at_a_time(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oraculo.brokers.nats.dead_letters.PAGE_BYTES", 4_000_000)
    with BareNats("max_payload: 1MB", "max_pending: 8MB") as server:
        async with running(server.url) as broker:
            await publish_all(broker, [Outgoing(queue, bytes(800_000), reason="r") for _ in range(40)])
            ids: list[str] = []
            while page := await broker.dead_letters(queue, limit=100, after=ids[-1] if ids else None):
                ids += [letter.id for letter in page]
            assert len(ids) == 40
            assert await broker.discard(queue, ids[::2]) == 20
            assert await broker.redrive(queue) == 20


def test_of_many_queues_only_some_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oraculo.brokers.nats.known_queues.MOST_KNOWN", 10)
    known, names = KnownQueues(), {str(number) for number in range(30)}
    for name in names:
        known.note_made([name])
        assert not known.missing({name})
    assert 20 <= len(known.missing(names)) < 30


@pytest.mark.parametrize(
    ("consumer", "expected"),
    [
        ({"num_pending": 0, "num_ack_pending": 0}, QueueState("q", 0, 0, 1)),  # acked since the stream was asked
        ({"num_pending": 2, "num_ack_pending": 1}, QueueState("q", 2, 1, 1)),
        ({"num_pending": 9, "num_ack_pending": 0}, QueueState("q", 3, 0, 1)),  # more than there is
        (ApiError(404), QueueState("q", 3, 0, 1)),
        (UNANSWERED, QueueState("q", 3, None, 1)),
        (ApiError(403, description="no right"), QueueState("q", 3, None, 1)),
    ],
    ids=["acked", "held", "too many", "no consumer", "no answer", "no right"],
)
def test_what_a_consumer_holds_is_known_or_said_to_be_unknown(consumer: Any, expected: QueueState) -> None:
    assert queue_state("q", {"q": 3, "q.dlq": 1}, consumer, 0) == expected
