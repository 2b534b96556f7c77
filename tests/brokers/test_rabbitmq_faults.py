"""RabbitMQ: connections, servers and processes that break, and queues that vanish."""

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import pytest
from pika.exceptions import ConnectionWrongStateError

from oraculo.brokers.age import warning_of_age
from oraculo.brokers.rabbitmq import RabbitMQBroker
from oraculo.brokers.rabbitmq.connection import ACCESS_REFUSED, BLOCKED, Channel, Refused
from oraculo.brokers.rabbitmq.frames import Parcel
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Outgoing, Receipt, ensure_taken, publish_all
from oraculo.wire.naming import dlq_of
from tests.brokers import rabbitmq_stage as stage
from tests.brokers.rabbitmq_stage import (
    PATIENCE,
    already,
    assert_nothing_is_left,
    bodies,
    eventually,
    forget,
    fresh_name,
    letters,
    messages,
    plain_channel,
    published,
    running,
    state,
    subscribed,
    take,
    trouble,
)
from tests.receipts import places_down, reasons, takers
from tests.servers.fleet import Fleet
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ

url, queue, broker, nothing_goes_unheard = stage.url, stage.queue, stage.broker, stage.nothing_goes_unheard  # fixtures


# -- when the connection, the server or a process breaks ------------------------------------------------------------


class TestBreaking:
    async def test_a_cut_connection_ends_the_consumer_and_all_comes_again(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with running(proxy.url) as broker:
                await publish_all(broker, messages(queue, 5))
                consumer = await broker.consume(queue, prefetch=3)
                first, *held = await take(consumer, 3)
                await consumer.ack([first])
                await eventually(lambda: state(broker, queue), lambda now: now.ready + now.unacked == 4)
                proxy.cut()
                with pytest.raises(BrokerUnavailable, match="lost"):
                    await take(consumer, 100)
                assert "the connection broke" in trouble(broker)
                with pytest.raises(BrokerUnavailable, match="lost"):
                    await consumer.extend(held)
                await consumer.ack(held)
                with pytest.raises(BrokerUnavailable, match="lost"):  # or it would be taken to be there
                    await consumer.dead_letter(held[0], "too late")
                heir = await subscribed(broker, queue)
                again = await take(heir, 4)
                assert sorted(bodies(again)) == [b"1", b"2", b"3", b"4"]
                assert [each.redeliveries for each in again if each.body in {b"1", b"2"}] == [1, 1]
                assert (await state(broker, queue)).dead_letters == 0
                await published(broker, messages(queue, 1))
                assert trouble(broker) == ""

    @pytest.mark.parametrize("is_closing", [False, True], ids=["", "while it closes"])
    async def test_what_pika_raises_is_raised_as_ours(
        self, url: str, queue: str, is_closing: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with running(url) as broker:

            async def fail(_: object) -> None:
                if is_closing:
                    await broker.close()
                raise ConnectionWrongStateError("it is closing")

            with monkeypatch.context() as patched:
                patched.setattr(broker._publisher, "publish", fail)
                with pytest.raises(BrokerUnavailable, match=r"RabbitMQ at .*it is closing"):
                    await publish_all(broker, messages(queue, 1))
            if not is_closing:
                assert "it is closing" in trouble(broker)
                await published(broker, messages(queue, 1))
                assert trouble(broker) == ""

    async def test_many_who_call_at_once_share_one_attempt_to_connect(self, url: str, queue: str) -> None:
        with Proxy(url) as proxy:
            async with running(proxy.url) as broker:
                await broker.declare([queue])
                assert proxy.cut() == 4  # two connections, each with two halves
                await eventually(lambda: already(trouble(broker)), bool)
                calls = [broker.publish(messages(queue, 1)) for _ in range(20)]
                await asyncio.gather(*calls, *[broker.queues([queue]) for _ in range(20)])
                assert proxy.cut() == 4

    async def test_a_server_that_was_killed_gives_all_again(self, fleet: Fleet) -> None:
        server, queue = fleet.breakable("rabbitmq"), fresh_name()
        async with running(server.url) as broker:
            await publish_all(broker, [*messages(queue, 100), Outgoing(queue, b"dead", reason="kept")])
            consumer = await broker.consume(queue, prefetch=10)
            first, *_ = await take(consumer, 10)
            await consumer.retry(first, 3.0, "later")
            await eventually(lambda: broker.queues([queue]), lambda found: found[0].ready - found[0].delayed == 89)
            server.kill()  # now that it has left its queue
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
            await publish_all(broker, messages(queue, 1))
            other = RabbitMQBroker(server.url)
            await other.start()
            await other.consume(queue, prefetch=1)
            server.freeze()
            try:
                for _ in range(2):  # on the connection of before, and on a new one
                    began = time.monotonic()
                    with pytest.raises(BrokerUnavailable):
                        await publish_all(broker, messages(queue, 1))
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

    async def test_a_slow_line_takes_its_time_until_it_falls_silent(self, url: str, queue: str) -> None:
        batch = [Outgoing(queue, bytes(64 * 1024))] * 16
        with Proxy(url) as proxy:
            async with running(url) as near, running(proxy.url, publish_timeout=1.0) as broker:
                await broker.declare([queue])
                proxy.delay = 0.1  # for each 64 kB, at most
                began = time.monotonic()
                await asyncio.gather(broker.publish(batch[:10]), broker.publish(batch[10:]))
                assert time.monotonic() - began > 1.6, "the line was not slow"
                assert (trouble(broker), (await state(near, queue)).ready) == ("", 16)
                publishing = asyncio.create_task(broker.publish(batch))
                await eventually(lambda: state(near, queue), lambda now: now.ready > 18)
                proxy.swallows = True
                began = time.monotonic()
                with pytest.raises(BrokerUnavailable, match="did not confirm"):
                    await publishing
                assert time.monotonic() - began < 3.0
                proxy.cut()

    @pytest.mark.parametrize("owner", ["ours", "the user's"])
    async def test_over_a_slow_line_a_call_for_many_queues_takes_its_time_and_none_is_taken_for_down(
        self, url: str, owner: str
    ) -> None:
        """With another broker behind it, what is for those would go there, and nobody may listen."""
        queues = await _existing_queues(url, owner)
        with Proxy(url) as proxy:
            async with running(proxy.url, publish_timeout=2.0) as broker:
                proxy.delay = 0.03
                assert takers(await broker.publish([Outgoing(name, b"") for name in queues])) == ["rabbitmq"] * len(
                    queues
                )
                assert broker.statuses()[0].stuck == ()
        forget(url, queues)

    async def test_a_queue_whose_making_is_never_answered_holds_up_no_other(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        queues = [fresh_name() for _ in range(20)]
        async with running(url, publish_timeout=4.0) as broker:
            _never_answer_for(queues[7], monkeypatch)
            receipts = await broker.publish([Outgoing(name, b"") for name in queues])
            assert places_down(receipts) == {7}
            assert takers(receipts) == [None if number == 7 else "rabbitmq" for number in range(20)]
            assert [name for name, _ in broker.statuses()[0].stuck] == [queues[7]]
        forget(url, queues)

    async def test_a_queue_is_not_taken_for_down_when_the_connection_breaks_while_it_is_made(
        self, url: str, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With another broker behind it, what is for the queue would go there for half a minute."""
        call = Channel.call
        with Proxy(url) as proxy:

            async def cut_first(channel: Channel, method: str, **arguments: Any) -> Any:
                if method == "queue_declare":
                    patched.undo()
                    proxy.cut()
                return await call(channel, method, **arguments)

            async with running(proxy.url) as broker:
                with monkeypatch.context() as patched:
                    patched.setattr(Channel, "call", cut_first)
                    with pytest.raises(BrokerUnavailable, match="the channel was lost"):
                        await broker.publish(messages(queue, 1))
                assert broker.statuses()[0].stuck == ()
                await published(broker, messages(queue, 1))
                assert trouble(broker) == ""

    async def test_confirms_that_drip_in_are_not_waited_for_without_end(
        self, url: str, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("oraculo.brokers.rabbitmq.publisher.LONGEST", 1)
        with Proxy(url) as proxy:
            async with running(proxy.url, publish_timeout=0.5) as broker:
                await broker.declare([queue])
                proxy.delay = 0.05
                with pytest.raises(BrokerUnavailable, match="did not confirm"):
                    await publish_all(broker, [Outgoing(queue, bytes(64 * 1024))] * 16)

    async def test_what_a_killed_process_held_comes_again(self, url: str, queue: str) -> None:
        async with running(url) as broker:
            await publish_all(broker, messages(queue, 3))
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
            await publish_all(broker, messages(queue, 5))
            consumer = await broker.consume(queue, prefetch=3)
            bad, *good = await take(consumer, 3)

            async def told_on_publishing() -> str:
                with suppress(BrokerUnavailable):  # the server says it to who publishes, and not before
                    await publish_all(broker, [Outgoing(queue, b"more")])
                return trouble(broker)

            server.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.0000001).")
            try:
                await eventually(told_on_publishing, BLOCKED.__eq__)
                for call in (broker.publish(messages(queue, 1)), broker.check()):
                    with pytest.raises(BrokerUnavailable, match=BLOCKED):
                        await call
                await consumer.dead_letter(bad, "not now")
                await consumer.ack(good)
                assert [(each.body, each.redeliveries) for each in await take(consumer, 2)] == [(b"3", 0), (b"4", 0)]
            finally:
                server.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.4).")
            await eventually(lambda: already(trouble(broker)), "".__eq__)
            await publish_all(broker, messages(queue, 1))
            assert [(letter.body, letter.reason) for letter in await letters(broker, queue, 1)] == [(b"0", "not now")]


async def _existing_queues(url: str, owner: str) -> list[str]:
    """So many that to look at them one by one takes longer than a publish may."""
    names = [fresh_name() for _ in range(40 if owner == "ours" else 12)]
    if owner == "ours":
        async with running(url) as broker:
            await broker.declare(names)
    else:
        with plain_channel(url) as channel:
            for name in names:
                channel.queue_declare(name, durable=True)
    return names


def _never_answer_for(queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer as a cluster that cannot make this queue now."""
    call = Channel.call

    async def called(channel: Channel, method: str, **arguments: Any) -> Any:
        if arguments.get("queue") == queue:
            await asyncio.sleep(channel._timeout)
            raise BrokerUnavailable("RabbitMQ did not answer")
        return await call(channel, method, **arguments)

    monkeypatch.setattr(Channel, "call", called)


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


# -- what RabbitMQ refuses ------------------------------------------------------------------------------------------

DIRECT_REPLY = "amq.rabbitmq.reply-to"


class TestRefused:
    async def test_a_queue_that_is_refused_holds_up_no_other(self, broker: RabbitMQBroker, queue: str) -> None:
        refused = f"amq.{queue}"
        for _ in range(2):  # when it is first seen, and when it is known
            receipts = await broker.publish([*messages(refused, 1), *messages(queue, 3), *messages(refused, 1)])
            assert takers(receipts) == [None, "rabbitmq", "rabbitmq", "rabbitmq", None]
            assert isinstance(receipts[0].error, Refused)
            assert refused in reasons(receipts)
        assert [name for name, _ in broker.statuses()[0].stuck] == [refused]
        assert trouble(broker) == ""
        assert [(found.queue, found.ready) for found in await broker.queues()] == [(queue, 6)]

    @pytest.mark.parametrize("name", [DIRECT_REPLY, f"{DIRECT_REPLY}.g1h2AA5yZXBseQ==.iuv8zYurFCUM6F6Mk2AOHw=="])
    async def test_direct_reply_to_is_no_queue_of_ours(self, broker: RabbitMQBroker, name: str) -> None:
        """RabbitMQ says that it is there, and delivers nothing to it, or delivers it and sends it back all the same."""
        with pytest.raises(Refused, match="name a queue of yours"):
            ensure_taken(await broker.publish(messages(name, 1)))
        assert await broker.queues([name]) == []
        assert trouble(broker) == ""

    async def test_what_always_comes_back_is_refused_and_ends_no_connection(
        self, broker: RabbitMQBroker, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that RabbitMQ says is there, without being known for it."""
        monkeypatch.setattr("oraculo.brokers.rabbitmq.queues._is_direct_reply", lambda _: False)
        with pytest.raises(Refused, match=f"RabbitMQ has no queue {DIRECT_REPLY}"):
            ensure_taken(await broker.publish(messages(DIRECT_REPLY, 2)))
        receipts = await broker.publish([*messages(DIRECT_REPLY, 1), *messages(queue, 1)])
        assert takers(receipts) == [None, "rabbitmq"]
        assert (await state(broker, queue)).ready == 1
        assert trouble(broker) == ""

    async def test_a_queue_that_the_user_has_no_right_to_look_at_is_sent_to(
        self, broker: RabbitMQBroker, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As RabbitMQ 4.2.6 and later hide the reply queues that they name from an engine with exact rights."""
        call = Channel.call

        async def hiding(self: Channel, method: str, **arguments: Any) -> Any:
            if arguments.get("passive"):
                raise Refused(ACCESS_REFUSED, "ACCESS_REFUSED - configure access to queue refused")
            return await call(self, method, **arguments)

        monkeypatch.setattr(Channel, "call", hiding)
        with plain_channel(url) as channel:
            reply = channel.queue_declare("", exclusive=True).method.queue
            await publish_all(broker, messages(reply, 2))
            assert [channel.basic_get(reply, auto_ack=True)[2] for _ in range(2)] == [b"0", b"1"]
        with pytest.raises(Refused, match=f"RabbitMQ has no queue {reply}"):
            ensure_taken(await broker.publish(messages(reply, 1)))
        assert trouble(broker) == ""

    async def test_a_user_who_may_not_publish_is_told_of_until_he_may(self, fleet: Fleet) -> None:
        server, queue = cast("RabbitMQ", fleet.server("rabbitmq")), fresh_name()
        async with running(server.url) as founder:
            await founder.declare([queue])
        server.evaluate(_ADD_READER + _MAY_WRITE % (server.vhost, "^nothing$"))
        async with running(server.url.replace("guest:guest", "reader:pw")) as broker:
            for _ in range(2):
                with pytest.raises(BrokerUnavailable, match="access to exchange"):
                    await publish_all(broker, messages(queue, 1))
                await broker.check()
                assert "access to exchange" in trouble(broker)
            server.evaluate(_MAY_WRITE % (server.vhost, ".*"))
            await publish_all(broker, messages(queue, 1))
            assert trouble(broker) == ""


_ADD_READER = 'rabbit_auth_backend_internal:add_user(<<"reader">>, <<"pw">>, <<"tests">>), '
_MAY_WRITE = """
rabbit_auth_backend_internal:set_permissions(<<"reader">>, <<"%s">>, <<".*">>, <<"%s">>, <<".*">>, <<"tests">>).
"""


# -- policies -------------------------------------------------------------------------------------------------------


class TestPolicies:
    async def test_looking_wears_no_letter_out_where_a_policy_limits_deliveries(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server heeds the lower one of what a policy says and what we declared."""
        monkeypatch.setattr("oraculo.brokers.rabbitmq.dead_letters.CHUNK", 2)
        server, queue = cast("RabbitMQ", fleet.server("rabbitmq")), fresh_name()
        policy = '[{<<"delivery-limit">>, 1}], 0, <<"queues">>, <<"tests">>'
        server.evaluate(f'rabbit_policy:set(<<"{server.vhost}">>, <<"poison">>, <<"^{queue}">>, {policy}).')
        async with running(server.url) as broker:
            await publish_all(broker, [Outgoing(queue, b"%d" % n, reason="kept") for n in range(5)])
            first = await letters(broker, queue, 5)
            for _ in range(6):
                assert await broker.dead_letters(queue, limit=10) == first
            assert await broker.redrive(queue, [letter.id for letter in first[:3]]) == 3
            assert await letters(broker, queue, 2) == first[3:]

    async def test_of_a_large_quarantine_a_part_is_published_anew_at_each_look(
        self, url: str, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In pieces that a slow link can carry, and not so much that memory is filled by what arrives meanwhile."""
        monkeypatch.setattr("oraculo.brokers.rabbitmq.dead_letters.CHUNK_BYTES", 200)
        monkeypatch.setattr("oraculo.brokers.rabbitmq.dead_letters.RENEWED_BYTES", 350)
        async with running(url) as broker:
            await publish_all(broker, [Outgoing(queue, b"%d" % n * 100, reason="kept") for n in range(8)])
            first = await letters(broker, queue, 8)
            publish, anew = broker._dead_letters._publish, list[list[bytes]]()

            async def noting(parcels: Sequence[Parcel]) -> Sequence[Receipt]:
                anew.append([parcel.body[:1] for parcel in parcels])
                return await publish(parcels)

            monkeypatch.setattr(broker._dead_letters, "_publish", noting)
            for _ in range(2):
                assert await broker.dead_letters(queue, limit=10) == first
            if warning_of_age(broker._working.version, (4, 3)):  # since then looking counts for nothing
                assert anew == [[b"0", b"1"], [b"2", b"3"], [b"4", b"5"], [b"6", b"7"]]
            else:
                assert anew == []

    @pytest.mark.parametrize("refused", [1, 3])
    async def test_letters_that_cannot_be_published_anew_can_be_looked_at_and_are_there_once(
        self, broker: RabbitMQBroker, queue: str, refused: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As when the server takes no message of that size any more."""
        await publish_all(broker, [Outgoing(queue, b"%d" % n, reason="kept") for n in range(3)])
        await letters(broker, queue, 3)
        publish, too_large = broker._dead_letters._publish, Receipt(error=BrokerError("message is too large"))

        async def take_some(parcels: Sequence[Parcel]) -> Sequence[Receipt]:
            return [*[too_large] * refused, *await publish(parcels[refused:])]

        monkeypatch.setattr(broker._dead_letters, "_publish", take_some)
        for _ in range(2):
            found = await broker.dead_letters(queue, limit=10)
            assert sorted(letter.body for letter in found) == [b"0", b"1", b"2"]


# -- deaf consumers and queues that vanish --------------------------------------------------------------------------


class TestVanishing:
    async def test_a_consumer_whose_queue_is_deleted_hears_of_it_at_once(self, url: str, queue: str) -> None:
        async with running(url) as broker:
            await publish_all(broker, messages(queue, 1))
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
            await publish_all(broker, messages(queue, 1))
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
        await publish_all(broker, messages(queue, 2))
        consumer = await broker.consume(queue, prefetch=1)
        await consumer.retry((await take(consumer, 1))[0], 60.0, "later")
        with plain_channel(url) as channel:
            channel.queue_delete(f"{queue}.retry.60000")
        await consumer.retry((await take(consumer, 1))[0], 60.0, "later")
        now = await state(broker, queue)
        assert (now.ready, now.delayed) == (1, 1)
        assert [found.queue for found in await broker.queues()] == [queue]
