"""NATS JetStream: streams that are full, rights that are missing, and queues that do not work on a server that does."""

import asyncio
import re

import pytest

from oraculo.brokers.nats import NatsBroker
from oraculo.brokers.nats.dead_letters import raise_worst
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge, QueueUnavailable
from oraculo.ports.broker import Outgoing, ensure_taken, publish_all
from tests.brokers import nats_stage as stage
from tests.brokers.nats_stage import (
    PATIENCE,
    BareNats,
    api,
    bodies,
    eventually,
    numbered,
    plain_client,
    ready,
    running,
    take,
)
from tests.receipts import places_down, reasons, takers
from tests.waiting import until

url, queue = stage.url, stage.queue  # fixtures


# -- streams that are full ------------------------------------------------------------------------------------------


async def test_what_a_full_stream_does_not_take_is_told_and_the_others_go(url: str, queue: str) -> None:
    other = f"{queue}-other"
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue])
        config = (await api(client, f"STREAM.INFO.{queue}"))["config"]
        told = await api(client, f"STREAM.UPDATE.{queue}", {**config, "max_msgs": 2, "discard": "new"})
        assert "error" not in told
        batch = [one for both in zip(numbered(queue, 4), numbered(other, 4), strict=True) for one in both]
        receipts = await broker.publish(batch)
        assert re.search(rf"refused a message for {queue}: maximum messages exceeded", reasons(receipts))
        assert takers(receipts) == ["nats"] * 4 + [None, "nats", None, "nats"]
        assert not places_down(receipts)
        assert [link.trouble for link in broker.statuses()] == [None]
        assert await ready(broker, queue, 2)
        assert await ready(broker, other, 4)


async def test_what_a_full_account_does_not_take_is_tried_again_later(queue: str) -> None:
    """It is no fault of the message: a worker must not throw its answer away for it."""
    account = "accounts { A { jetstream: { max_file: 100KB, max_mem: 0 }, users: [ { user: a, password: p } ] } }"
    with BareNats(account) as server:
        async with running(server.url.replace("//", "//a:p@")) as broker:
            small, large = Outgoing(queue, b"small"), Outgoing(queue, bytes(60_000))
            receipts = await broker.publish([large, large, small])
            assert re.search("resource limits exceeded for account", reasons(receipts))
            assert takers(receipts) == ["nats", None, "nats"]
            assert not places_down(receipts)
            consumer = await broker.consume(queue, prefetch=2)
            await consumer.ack(await take(consumer, 2))
            assert await eventually(lambda: ready(broker, queue, 0))
            await publish_all(broker, [large])


async def test_a_full_server_is_unavailable_until_it_stores_something(
    queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it answers to those who store nothing."""
    large = [Outgoing(queue, bytes(60_000), key=str(number)) for number in range(3)]
    with BareNats(storage="100KB") as server:
        async with running(server.url) as broker:
            await publish_all(broker, large[:2])
            with pytest.raises(BrokerUnavailable, match="insufficient resources"):
                await publish_all(broker, large)
            consumer = await broker.consume(queue, prefetch=2)
            taken = await take(consumer, 2)
            await publish_all(broker, large[:1])  # which it has
            assert "insufficient resources" in str(broker.statuses()[0].trouble)
            with pytest.raises(BrokerUnavailable, match="insufficient resources"):
                await broker.check()
            await consumer.ack(taken)
            assert await eventually(lambda: ready(broker, queue, 0))
            await publish_all(broker, large[2:])
            assert broker.statuses()[0].trouble is None
            assert await broker.check()
            monkeypatch.setattr("oraculo.brokers.nats.known_queues.FULL_FOR", 0.2)
            with pytest.raises(BrokerUnavailable, match="insufficient resources"):
                await publish_all(broker, [Outgoing(queue, bytes(60_000)) for _ in range(2)])
            with pytest.raises(BrokerUnavailable, match="insufficient resources"):
                await broker.check()
            await until(lambda: broker.statuses()[0].trouble is None, saying="another try")
            assert await broker.check()


async def test_what_a_full_stream_did_not_take_is_no_repeat_later(url: str, queue: str) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await broker.declare([queue])
        config = (await api(client, f"STREAM.INFO.{queue}"))["config"]
        await api(client, f"STREAM.UPDATE.{queue}", {**config, "max_msgs": 1, "discard": "new"})
        first, second = (Outgoing(queue, body, key=body.decode()) for body in (b"first", b"second"))
        for _ in range(2):
            receipts = await broker.publish([first, second])
            assert takers(receipts) == ["nats", None]
        consumer = await broker.consume(queue, prefetch=2)
        await consumer.ack(await take(consumer, 1))
        assert await eventually(lambda: ready(broker, queue, 0))
        await publish_all(broker, [first, second])
        assert bodies(await take(consumer, 1)) == [b"second"]


async def test_a_redrive_into_a_full_stream_moves_what_it_takes(url: str, queue: str) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await publish_all(broker, [Outgoing(queue, b"%d" % number, reason="r") for number in range(5)])
        config = (await api(client, f"STREAM.INFO.{queue}"))["config"]
        await api(client, f"STREAM.UPDATE.{queue}", {**config, "max_msgs": 2, "discard": "new"})
        for _ in range(2):
            with pytest.raises(QueueUnavailable, match="maximum messages exceeded"):
                await broker.redrive(queue)
        assert [link.trouble for link in broker.statuses()] == [None]
        assert [letter.body for letter in await broker.dead_letters(queue, limit=9)] == [b"2", b"3", b"4"]
        assert bodies(await take(await broker.consume(queue, prefetch=2), 2)) == [b"0", b"1"]


async def test_a_redrive_of_one_that_its_stream_will_never_take_moves_the_others(url: str, queue: str) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await publish_all(broker, [Outgoing(queue, body, reason="r") for body in (b"0", bytes(2000), b"2")])
        config = (await api(client, f"STREAM.INFO.{queue}"))["config"]
        await api(client, f"STREAM.UPDATE.{queue}", {**config, "max_msg_size": 1000})
        for _ in range(2):
            with pytest.raises(MessageTooLarge, match="message size exceeds maximum allowed"):
                await broker.redrive(queue)
        assert [letter.body for letter in await broker.dead_letters(queue, limit=4)] == [bytes(2000)]
        assert await ready(broker, queue, 2)


# -- queues that do not work, on a server that does -----------------------------------------------------------------


def _user(*denied: str) -> str:
    subjects = ", ".join(f'"{subject}"' for subject in denied)
    ana = f"{{ user: ana, password: s3, permissions: {{ publish: {{ deny: [{subjects}] }} }} }}"
    return f"authorization {{ users: [ {ana}, {{ user: owner, password: s3 }} ] }}"


async def test_a_queue_that_we_may_not_send_to_holds_up_no_other() -> None:
    with BareNats(_user("bad")) as server:
        async with running(server.url.replace("//", "//ana:s3@")) as broker, asyncio.timeout(2):
            receipts = await broker.publish([Outgoing("bad", b"0"), *numbered("good", 2)])
            assert re.search('does not allow it: permissions violation for publish to "bad"', reasons(receipts))
            assert takers(receipts) == [None, "nats", "nats"]
            for receipt in await broker.publish(numbered("bad", 2)):
                assert not isinstance(receipt.error, BrokerUnavailable), "waiting does not help"
            assert await ready(broker, "good", 2)


def test_of_several_refusals_one_that_no_retry_will_mend_is_raised() -> None:
    raise_worst([None])
    with pytest.raises(BrokerError, match="no right") as raised:
        raise_worst([None, BrokerUnavailable("no leader"), BrokerError("no right")])
    assert type(raised.value) is BrokerError


@pytest.mark.parametrize(
    ("denied", "what"), [("$JS.API.CONSUMER.MSG.NEXT.>", "read"), ("$JS.ACK.>", "settle what comes on")]
)
async def test_a_consumer_that_may_not_pull_or_ack_says_so(denied: str, what: str) -> None:
    with BareNats(_user(denied)) as server:
        async with running(server.url.replace("//", "//ana:s3@")) as broker, asyncio.timeout(PATIENCE):
            await publish_all(broker, [Outgoing("Queue", b"x"), Outgoing("other", b"x")])
            consumer = await broker.consume("Queue", prefetch=1)

            async def take_and_ack() -> None:
                while True:
                    await consumer.ack(await consumer.take(1))

            with pytest.raises(BrokerUnavailable, match=f"does not allow us to {what} Queue: permissions violation"):
                await take_and_ack()
            assert "does not allow us" in (broker.statuses()[0].trouble or "")


async def test_a_consumer_is_not_blamed_for_what_another_may_not() -> None:
    names = ("1", "pedidos.1", "um.pedidos")
    with BareNats(_user("$JS.ACK.Pedidos.>")) as server:
        async with running(server.url.replace("//", "//ana:s3@")) as broker, asyncio.timeout(PATIENCE):
            others = [await broker.consume(name, prefetch=1) for name in names]
            denied = await broker.consume("Pedidos", prefetch=1)
            await publish_all(broker, [Outgoing("Pedidos", b"x")])
            await denied.ack(await denied.take(1))
            with pytest.raises(BrokerUnavailable, match="does not allow us to settle what comes on Pedidos: "):
                await denied.take(1)
            await publish_all(broker, [Outgoing(name, b"x") for name in names])
            assert [bodies(await take(each, 1)) for each in others] == [[b"x"]] * 3


async def test_answers_that_may_not_be_heard_are_told() -> None:
    rights = '{ user: ana, password: s3, permissions: { subscribe: { deny: ["_INBOX.>"] } } }'
    with BareNats(f"authorization {{ users: [ {rights} ] }}") as server:
        with pytest.raises(BrokerError, match="does not allow it: permissions violation for subscription") as refused:
            await NatsBroker(server.url.replace("//", "//ana:s3@"), connect_timeout=1.0).start()
        assert not isinstance(refused.value, BrokerUnavailable)


async def test_a_queue_that_cannot_be_made_holds_up_no_other(url: str, queue: str) -> None:
    async with running(url) as broker, plain_client(url) as client:
        await api(client, f"STREAM.CREATE.other-{queue}", {"name": f"other-{queue}", "subjects": [f"{queue}.bad"]})
        await api(
            client,
            f"STREAM.CREATE.{queue}=mute",
            {"name": f"{queue}=mute", "subjects": [f"{queue}.mute"], "retention": "workqueue", "no_ack": True},
        )
        names = (f"{queue}.bad", f"{queue}.mute", queue)
        receipts = await broker.publish([Outgoing(name, b"x") for name in names])
        assert re.search(r"overlap.*no_ack", reasons(receipts))
        assert (takers(receipts), places_down(receipts)) == ([None, None, "nats"], {0, 1})
        await api(client, f"STREAM.DELETE.other-{queue}")
        await publish_all(broker, [Outgoing(f"{queue}.bad", b"x")])


@pytest.mark.parametrize("limit", ["rights", "number"])
async def test_a_queue_that_is_there_and_that_we_could_not_make_is_used(limit: str) -> None:
    server = BareNats(_user("$JS.API.STREAM.CREATE.>"))
    if limit == "number":
        users = "users: [ { user: ana, password: s3 }, { user: owner, password: s3 } ]"
        server = BareNats(f"accounts {{ A {{ jetstream: {{ max_file: 1GB, max_streams: 2 }}, {users} }} }}")
    with server:
        async with running(server.url.replace("//", "//owner:s3@")) as owner:
            await owner.declare(["there"])
        async with running(server.url.replace("//", "//ana:s3@")) as broker, asyncio.timeout(2):
            await publish_all(broker, [Outgoing("there", b"x")])
            assert bodies(await take(await broker.consume("there", prefetch=1), 1)) == [b"x"]
            receipts = await broker.publish([Outgoing("missing", b"x"), Outgoing("there", b"y")])
            assert re.search("missing", reasons(receipts))
            assert takers(receipts) == [None, "nats"]


async def test_a_queue_that_confirms_nothing_holds_up_no_other(url: str, queue: str) -> None:
    """Its owner changed it while it was in use."""
    mute = f"{queue}.mute"
    async with running(url, publish_timeout=1.0) as broker, plain_client(url) as client:
        await broker.declare([mute])
        config = (await api(client, f"STREAM.INFO.{queue}=mute"))["config"]
        await api(client, f"STREAM.UPDATE.{queue}=mute", {**config, "no_ack": True})
        receipts = await broker.publish([Outgoing(mute, b"x"), Outgoing(queue, b"y")])
        assert re.search(f"did not confirm what is for {mute}", reasons(receipts))
        assert (takers(receipts), places_down(receipts)) == ([None, "nats"], {0})
        ((stuck, _),) = broker.statuses()[0].stuck
        assert stuck == mute
        assert broker.statuses()[0].trouble is None
        async with asyncio.timeout(0.5):
            await publish_all(broker, [Outgoing(queue, b"z")])
            with pytest.raises(BrokerError, match="no_ack"):
                ensure_taken(await broker.publish([Outgoing(mute, b"x")]))
        assert await ready(broker, queue, 2)
