"""Redis Streams: leases, delays and the quarantine, and queues that many share."""

import asyncio
import re
from typing import Any

import pytest
import redis

from oraculo.brokers.prefetch import FIRST
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Outgoing, ensure_taken, publish_all
from tests.brokers import redis_streams_stage as stage
from tests.brokers.redis_streams_stage import (
    LEASE,
    PROMPTLY,
    bodies,
    fresh_name,
    idle_times,
    messages,
    read_plain,
    shows,
    started,
    state,
    take,
    waiting,
)
from tests.receipts import places_down, reasons, takers
from tests.servers.valkey import Valkey
from tests.waiting import until

url, plain, queue = stage.url, stage.plain, stage.queue  # fixtures


def leave_unsettled(plain: Any, queue: str, count: int) -> None:
    """As a consumer does that took them and died an hour ago."""
    ((_, entries),) = read_plain(plain, queue, count=count)
    plain.xclaim(queue, queue, "plain", 0, [entry for entry, _ in entries], idle=3_600_000, justid=True)


class TestLeases:
    async def test_what_is_not_settled_in_time_goes_to_another(self, url: str, queue: str) -> None:
        async with started(url, lease=LEASE) as broker, started(url, lease=LEASE) as other:
            await publish_all(broker, messages(queue, 2))
            stuck = await broker.consume(queue, prefetch=10)
            stale = await take(stuck, 2)
            heir = await other.consume(queue, prefetch=10)
            again = await take(heir, 2)
            assert {each.redeliveries for each in again} == {1}
            await stuck.ack(stale[:1])
            await stuck.dead_letter(stale[1], "too late")
            found = await state(broker, queue)
            assert (found.unacked, found.dead_letters) == (2, 0)
            await heir.ack(again)
            found = await state(broker, queue)
            assert (found.ready, found.unacked) == (0, 0)

    async def test_extending_keeps_it(self, url: str, queue: str) -> None:
        lease = 4 * LEASE  # long enough for a busy machine to extend it in time
        async with started(url, lease=lease) as broker:
            await publish_all(broker, messages(queue, 2))
            busy = await broker.consume(queue, prefetch=10)
            kept, left = await take(busy, 2)
            taking = asyncio.create_task(take(await broker.consume(queue, prefetch=10), 1))
            while not taking.done():
                await busy.extend([kept])
                await asyncio.wait({taking}, timeout=lease / 16)
            assert bodies(await taking) == [int(left.body)]
            await busy.ack([kept])
            assert (await state(broker, queue)).unacked == 1

    async def test_extending_takes_nothing_from_another(self, url: str, queue: str) -> None:
        async with started(url, lease=LEASE) as broker:
            await publish_all(broker, messages(queue, 1))
            stuck, heir = [await broker.consume(queue, prefetch=10) for _ in range(2)]
            stale = await take(stuck, 1)
            again = await take(heir, 1)
            await stuck.extend(stale)
            await heir.ack(again)
            assert (await state(broker, queue)).unacked == 0

    async def test_running_out_too_often_ends_in_quarantine(self, url: str, queue: str) -> None:
        async with started(url, lease=LEASE, delivery_limit=2) as broker:
            await publish_all(broker, messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=10)
            assert [each.redeliveries for each in await take(consumer, 2)] == [0, 1]
            taking = asyncio.create_task(consumer.take(1))
            await until(shows(broker, queue, dead_letters=1), saying="the dead letter")
            (letter,) = await broker.dead_letters(queue, limit=5)
            assert "2 times" in letter.reason
            assert "lease" in letter.reason
            assert letter.redeliveries == 1
            await consumer.close()
            await taking

    async def test_all_that_one_left_is_claimed_without_a_pause(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 600))
            leave_unsettled(plain, queue, 600)
            consumer = await broker.consume(queue, prefetch=600)
            taken = await take(consumer, 600, within=3.0)  # a page each second would be five
            assert sorted(bodies(taken)) == list(range(600))

    async def test_what_is_new_does_not_wait_for_all_that_one_left(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 300))
            leave_unsettled(plain, queue, 300)
            await publish_all(broker, [Outgoing(queue, b"300")])
            taken = await take(await broker.consume(queue, prefetch=400), 301)
            assert bodies(taken).index(300) == FIRST  # behind the first page

    async def test_names_of_consumers_that_are_long_gone_are_deleted(self, url: str, plain: Any, queue: str) -> None:
        async with started(url, lease=LEASE / 10) as broker:
            await publish_all(broker, messages(queue, 1))
            plain.xgroup_createconsumer(queue, queue, "gone")
            read_plain(plain, queue)
            consumer = await broker.consume(queue, prefetch=1)
            await until(lambda: sorted(idle_times(plain, queue))[1] > LEASE * 1000, saying="two idle names")
            assert b"gone" in idle_names(plain, queue)
            await consumer.close()
            await broker.consume(queue, prefetch=1)
            names = idle_names(plain, queue)
            assert b"gone" not in names
            assert b"plain" in names  # it holds a message

    async def test_consumers_that_are_long_silent_are_not_counted(self, url: str, plain: Any, queue: str) -> None:
        async with started(url, lease=LEASE) as broker:
            await publish_all(broker, messages(queue, 1))
            read_plain(plain, queue)
            assert (await state(broker, queue)).consumers == 1
            await until(shows(broker, queue, consumers=0), saying="the silent one not counted")


def idle_names(plain: Any, queue: str) -> set[bytes]:
    return {each["name"] for each in plain.xinfo_consumers(queue, queue)}


class TestDelays:
    async def test_a_delayed_message_survives_the_process_that_delayed_it(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry((await take(consumer, 1))[0], 0.3, "later")
        async with started(url) as other:
            found = await state(other, queue)
            assert (found.ready, found.delayed) == (1, 1)
            (again,) = await take(await other.consume(queue, prefetch=1), 1)
            assert (again.body, again.redeliveries) == (b"0", 1)

    async def test_it_reaches_a_consumer_that_waits_already(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            (delivery,) = await take(consumer, 1)
            taking = await waiting(await broker.consume(queue, prefetch=1))
            await consumer.retry(delivery, 0.05, "later")
            async with asyncio.timeout(PROMPTLY):
                assert bodies(await taking) == [0]

    async def test_many_that_are_due_at_once_all_come(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 250))
            consumer = await broker.consume(queue, prefetch=250)
            delayed = await take(consumer, 250)
            await asyncio.gather(*(consumer.retry(each, 0.05, "later") for each in delayed))
            again = await take(consumer, 250)
            assert sorted(bodies(again)) == list(range(250))
            await consumer.ack(again)
            found = await state(broker, queue)
            assert (found.ready, found.unacked) == (0, 0)

    async def test_waiting_for_one_keeps_its_place_in_the_limit(self, url: str, queue: str) -> None:
        async with started(url, delivery_limit=2) as broker:
            await publish_all(broker, messages(queue, 1))
            consumer = await broker.consume(queue, prefetch=1)
            for reason in ("first", "second"):
                await consumer.retry((await take(consumer, 1))[0], 0.02, reason)
            (letter,) = await broker.dead_letters(queue, limit=5)
            assert (letter.reason, letter.redeliveries) == ("second", 1)


class TestQuarantine:
    async def test_closing_too_often_ends_there(self, url: str, queue: str) -> None:
        async with started(url, delivery_limit=2) as broker:
            await publish_all(broker, messages(queue, 250))
            for _ in range(2):
                consumer = await broker.consume(queue, prefetch=250)
                await take(consumer, 250)
                await consumer.close()
            letters = await broker.dead_letters(queue, limit=1000)
            assert [int(letter.body) for letter in letters] == list(range(250))
            assert "closed" in letters[0].reason
            found = await state(broker, queue)
            assert (found.ready, found.unacked, found.dead_letters) == (0, 0, 250)

    async def test_a_letter_given_back_by_a_consumer_of_the_dlq_keeps_reason_and_count(
        self, url: str, queue: str
    ) -> None:
        async with started(url, delivery_limit=1) as broker:
            await publish_all(broker, [Outgoing(queue, b"0", reason="why")])
            (before,) = await broker.dead_letters(queue, limit=5)
            for _ in range(3):
                consumer = await broker.consume(queue + ".dlq", prefetch=1)
                await consumer.retry((await take(consumer, 1))[0], 0.0, "not yet")
                await take(consumer, 1)
                await consumer.close()
            (after,) = await broker.dead_letters(queue, limit=5)
            assert (after.reason, after.at, after.redeliveries) == (before.reason, before.at, before.redeliveries)

    async def test_a_letter_buried_again_has_the_new_reason(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, [Outgoing(queue, b"0", reason="old")])
            consumer = await broker.consume(queue + ".dlq", prefetch=1)
            await consumer.dead_letter((await take(consumer, 1))[0], "new")
            (letter,) = await broker.dead_letters(queue, limit=5)
            assert letter.reason == "new"

    async def test_paging_goes_on_behind_a_letter_that_is_gone(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, [Outgoing(queue, b"%d" % number, reason="bad") for number in range(3)])
            first, *rest = await broker.dead_letters(queue, limit=10)
            await broker.discard(queue, [first.id])
            assert await broker.dead_letters(queue, limit=10, after=first.id) == rest

    @pytest.mark.parametrize("after", ["nonsense", "", "1", "1-", "-1", "1-x", "99999999999999999999-0", "1-1\n"])
    async def test_a_page_behind_no_id_at_all_is_refused(self, url: str, queue: str, after: str) -> None:
        async with started(url) as broker:
            with pytest.raises(BrokerError, match="after"):
                await broker.dead_letters(queue, limit=10, after=after)

    async def test_redriving_what_a_consumer_of_the_dlq_holds_takes_it_from_it(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, [Outgoing(queue, b"0", reason="bad")])
            consumer = await broker.consume(queue + ".dlq", prefetch=1)
            held = await take(consumer, 1)
            assert await broker.redrive(queue) == 1
            await consumer.retry(held[0], 0.0, "too late")
            found = await state(broker, queue)
            assert (found.ready, found.dead_letters) == (1, 0)

    async def test_thousands_are_redriven_once_each(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, [Outgoing(queue, b"%d" % number, reason="bad") for number in range(2500)])
            first, *_ = await broker.dead_letters(queue, limit=1)
            assert await broker.redrive(queue, [first.id, first.id]) == 1
            assert await broker.redrive(queue) == 2499
            taken = await take(await broker.consume(queue, prefetch=2500), 2500)
            assert bodies(taken) == list(range(2500))


class TestSharing:
    async def test_who_waits_has_all_of_a_small_batch_at_once(self, url: str, queue: str) -> None:
        other = fresh_name()
        async with started(url) as broker:
            consumer = await broker.consume(queue, prefetch=10)
            for _ in range(5):  # with luck they come together once
                taking = await waiting(consumer)
                await publish_all(broker, [Outgoing(other, b"7"), *messages(queue, 3)])
                taken = await taking
                assert bodies(taken) == [0, 1, 2]
                await consumer.ack(taken)

    async def test_one_batch_reaches_many_queues(self, url: str, plain: Any) -> None:
        names = [fresh_name() for _ in range(300)]
        async with started(url) as broker:
            await publish_all(broker, [Outgoing(name, b"%d" % number) for number in range(3) for name in names])
            found = await broker.queues(names)
            assert [(each.queue, each.ready) for each in found] == [(name, 3) for name in names]
            assert bodies(await take(await broker.consume(names[-1], prefetch=5), 3)) == [0, 1, 2]
        plain.delete(*names)

    async def test_deliveries_are_counted_across_consumers_and_connections(self, url: str, queue: str) -> None:
        async with started(url) as publisher:
            await publish_all(publisher, messages(queue, 1))
        for redeliveries in range(4):
            async with started(url) as broker:
                consumer = await broker.consume(queue, prefetch=1)
                (delivery,) = await take(consumer, 1)
                assert delivery.redeliveries == redeliveries
                if redeliveries % 2:
                    await consumer.retry(delivery, 0.0, "again")

    async def test_a_queue_that_is_named_like_something_of_another_is_no_trouble(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await broker.declare([f"{queue}.delayed"])
            await publish_all(broker, [Outgoing(queue, b"0"), Outgoing(f"{queue}.delayed", b"1")])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.retry((await take(consumer, 1))[0], 0.05, "later")
            assert bodies(await take(consumer, 1)) == [0]
            assert bodies(await take(await broker.consume(f"{queue}.delayed", prefetch=1), 1)) == [1]

    async def test_only_queues_are_told(self, url: str, plain: Any, queue: str) -> None:
        others = {f"{queue}-{kind}": kind for kind in ("string", "stream", "group")}
        plain.set(f"{queue}-string", "x")
        plain.xadd(f"{queue}-stream", {"x": "y"})
        plain.xgroup_create(f"{queue}-group", "another", "0", mkstream=True)
        plain.xgroup_create(queue, queue, "0", mkstream=True)
        async with started(url) as broker:
            told = [found.queue for found in await broker.queues() if found.queue.startswith(queue)]
            assert told == [queue]
        plain.delete(*others)

    async def test_of_a_batch_with_one_bad_queue_it_is_known_what_was_taken(
        self, url: str, plain: Any, queue: str
    ) -> None:
        bad = fresh_name()
        plain.lpush(bad, "mine")
        async with started(url) as broker:
            for ready in (2, 4):  # the second time the queue is known
                receipts = await broker.publish([Outgoing(bad, b"0"), *messages(queue, 2)])
                assert re.search(f"refused a message for {bad}: .*not a stream", reasons(receipts))
                assert (takers(receipts), places_down(receipts)) == ([None, "redis", "redis"], {0})
                assert (await state(broker, queue)).ready == ready
        plain.delete(bad)

    @pytest.mark.parametrize("count", [1, 2], ids=["each alone", "in one step"])
    async def test_a_queue_that_a_user_may_not_write_to_keeps_none_from_the_others(self, count: int) -> None:
        with Valkey() as server, redis.Redis(port=server.port) as plain:
            plain.acl_setuser("worker", enabled=True, passwords=["+pass"], keys=["own*"], commands=["+@all"])
            async with started(f"redis://worker:pass@127.0.0.1:{server.port}") as broker:
                receipts = await broker.publish([Outgoing("foreign", b"0"), *messages("own", count)])
                assert re.search("refused a message for foreign: .*does not permit", reasons(receipts))
                assert takers(receipts) == [None, *["redis"] * count]
                assert plain.xlen("own") == count
                with pytest.raises(BrokerError, match=r"foreign.*does not permit") as refused:
                    ensure_taken(await broker.publish(messages("foreign", 2)))
                assert not isinstance(refused.value, BrokerUnavailable)

    async def test_a_foreign_stream_is_passed_over_where_it_was_not_asked_for(self) -> None:
        with Valkey() as server, redis.Redis(port=server.port) as plain:
            plain.acl_setuser("worker", enabled=True, passwords=["+pass"], keys=["own*"], commands=["+@all"])
            plain.xgroup_create("foreign", "foreign", "0", mkstream=True)
            async with started(f"redis://worker:pass@127.0.0.1:{server.port}") as broker:
                await broker.declare(["own"])
                assert [found.queue for found in await broker.queues()] == ["own"]
                with pytest.raises(BrokerError, match="does not permit"):
                    await broker.queues(["foreign"])
