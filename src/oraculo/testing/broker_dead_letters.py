"""The tests of the broker suite about dead letters. `broker_suite` has the rest."""

import asyncio

from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.broker_admin import DEAD_LETTER_BODY_BYTES, DEAD_LETTER_PAGE_BYTES, DeadLetter, NotAnId
from oraculo.testing.broker_stage import BrokerStage
from oraculo.wire.naming import dlq_of


def _body(letter: DeadLetter) -> bytes:
    return letter.body


class BrokerDeadLetters(BrokerStage):
    """Tests about dead letters."""

    async def test_a_dead_letter_has_its_reason_and_its_time(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"earlier", reason="the first")])
            await publish_all(broker, [Outgoing(queue, b"bad")])
            consumer = await broker.consume(queue, prefetch=1)
            await consumer.dead_letter(await self.take_one(consumer), "field x is missing")
            earlier, letter = await self.dead_letters(broker, queue, 2)
            assert (letter.queue, letter.body, letter.reason) == (queue, b"bad", "field x is missing")
            assert letter.id != earlier.id
            assert letter.at >= earlier.at > 0
            await self.assert_empty(broker, queue)

    async def test_a_message_published_with_a_reason_goes_to_the_dead_letters(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"bad", reason="no such task"), Outgoing(queue, b"good")])
            consumer = await broker.consume(queue, prefetch=2)
            assert (await self.take_one(consumer)).body == b"good"
            (letter,) = await self.dead_letters(broker, queue, 1)
            assert (letter.queue, letter.body, letter.reason) == (queue, b"bad", "no such task")

    async def test_a_message_published_to_the_dlq_by_name_is_a_dead_letter(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(dlq_of(queue), b"by another client")])
            (letter,) = await self.dead_letters(broker, queue, 1)
            assert (letter.queue, letter.body) == (queue, b"by another client")

    async def test_the_dlq_can_be_consumed(self) -> None:
        async with self.running() as (broker, queue):
            await self.add_dead_letters(broker, queue, 2)
            consumer = await broker.consume(dlq_of(queue), prefetch=2)
            taken = await self.take(consumer, 2)
            assert [delivery.body for delivery in taken] == [b"letter 0", b"letter 1"]
            await consumer.ack(taken)
            await self.dead_letters(broker, queue, 0)

    async def test_looking_takes_nothing_out(self) -> None:
        async with self.running() as (broker, queue):
            first = await self.add_dead_letters(broker, queue, 3)
            assert [letter.body for letter in first] == [b"letter 0", b"letter 1", b"letter 2"]
            assert await broker.dead_letters(queue, limit=10) == first
            await self.state_where(broker, queue, lambda state: state.dead_letters == 3)

    async def test_looking_page_by_page_sees_each_once(self) -> None:
        async with self.running() as (broker, queue):
            everything = list(await self.add_dead_letters(broker, queue, 7))
            pages: list[DeadLetter] = []
            while page := await broker.dead_letters(queue, limit=3, after=pages[-1].id if pages else None):
                assert len(page) <= 3
                pages += page
            assert pages == everything

    async def test_a_page_of_large_letters_ends_early_and_the_next_goes_on(self) -> None:
        async with self.running() as (broker, queue):
            size = DEAD_LETTER_PAGE_BYTES // 8 - DEAD_LETTER_PAGE_BYTES // 128  # 9 of them pass the bound
            for number in range(10):
                await publish_all(broker, [Outgoing(queue, b"%d" % number * size, reason="large")])
            page = await self.eventually(lambda: broker.dead_letters(queue, limit=100), lambda page: len(page) >= 9)
            assert [letter.body[:1] for letter in page] == [b"%d" % number for number in range(9)]
            (last,) = await broker.dead_letters(queue, limit=100, after=page[-1].id)
            assert (last.body, last.cut_from) == (b"9" * size, None)

    async def test_a_large_letter_is_cut_on_a_page_and_whole_where_it_is_looked_for(self) -> None:
        async with self.running() as (broker, queue):
            body = b"{" + b"a" * DEAD_LETTER_BODY_BYTES + b"}"
            most = broker.capabilities.max_message
            if most is not None and most < len(body) + 1000:
                return
            await publish_all(
                broker, [Outgoing(queue, body, reason="large"), Outgoing(queue, b"small", reason="small")]
            )
            large, small = await self.dead_letters(broker, queue, 2)
            assert (large.body, large.cut_from, large.reason) == (body[:DEAD_LETTER_BODY_BYTES], len(body), "large")
            assert (small.body, small.cut_from) == (b"small", None)
            seen: list[DeadLetter] = []
            await broker.look_through(queue, seen.append, [large.id])
            assert [letter.body for letter in seen] == [body]
            seen.clear()
            await broker.look_through(queue, seen.append)
            assert sorted(map(_body, seen)) == [b"small", body]

    async def test_looking_through_all_shows_each_once_and_takes_nothing_out(self) -> None:
        async with self.running() as (broker, queue):
            everything = await self.add_dead_letters(broker, queue, 5)
            for _ in range(2):
                seen: list[DeadLetter] = []
                await broker.look_through(queue, seen.append)
                assert sorted(seen, key=_body) == list(everything)
            assert await self.dead_letters(broker, queue, 5) == everything

    async def test_letters_are_looked_up_by_their_ids(self) -> None:
        async with self.running() as (broker, queue):
            first, second, third = await self.add_dead_letters(broker, queue, 3)
            assert await broker.discard(queue, [second.id]) == 1
            seen: list[DeadLetter] = []
            await broker.look_through(queue, seen.append, [third.id, second.id, "", "no such id", first.id])
            assert sorted(seen, key=_body) == [first, third]
            await broker.look_through(queue, seen.append, [])
            await broker.look_through(self.fresh_name(), seen.append)
            assert len(seen) == 2

    async def test_several_become_dead_letters_together_each_with_its_reason(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, f"message {n}".encode()) for n in range(5)])
            consumer = await broker.consume(queue, prefetch=5)
            zero, one, two, three, four = await self.take(consumer, 5)
            await consumer.ack([one])
            together = [(one, "too late"), (zero, "reason 0"), (three, "reason 3"), (four, "reason 4")]
            await consumer.dead_letter_all(together)
            await consumer.dead_letter_all(together)
            found = {letter.body: letter.reason for letter in await self.dead_letters(broker, queue, 3)}
            assert found == {b"message 0": "reason 0", b"message 3": "reason 3", b"message 4": "reason 4"}
            await consumer.ack([two])
            await self.assert_empty(broker, queue)

    async def test_dead_letters_belong_to_one_queue(self) -> None:
        async with self.running() as (broker, queue):
            other = self.fresh_name()
            await broker.declare([other])
            letters = await self.add_dead_letters(broker, queue, 2)
            assert list(await broker.dead_letters(other, limit=10)) == []
            assert await broker.redrive(other) == 0
            assert await broker.discard(other, [letter.id for letter in letters]) == 0
            await self.dead_letters(broker, queue, 2)

    async def test_redriving_all_moves_them_back_in_order(self) -> None:
        async with self.running() as (broker, queue):
            await self.add_dead_letters(broker, queue, 3)
            assert await broker.redrive(queue) == 3
            consumer = await broker.consume(queue, prefetch=10)
            assert [d.body for d in await self.take(consumer, 3)] == [b"letter 0", b"letter 1", b"letter 2"]
            await self.dead_letters(broker, queue, 0)

    async def test_redriving_by_id_moves_only_those(self) -> None:
        async with self.running() as (broker, queue):
            first, second, third = await self.add_dead_letters(broker, queue, 3)
            assert await broker.redrive(queue, [second.id]) == 1
            consumer = await broker.consume(queue, prefetch=10)
            assert (await self.take_one(consumer)).body == b"letter 1"
            assert list(await self.dead_letters(broker, queue, 2)) == [first, third]

    async def test_unknown_ids_are_passed_over(self) -> None:
        async with self.running() as (broker, queue):
            kept, gone = await self.add_dead_letters(broker, queue, 2)
            assert await broker.discard(queue, [gone.id]) == 1
            unknown = [gone.id, "", "no such id", "-1", "9" * 40]
            assert await broker.redrive(queue, unknown) == 0
            assert await broker.discard(queue, unknown) == 0
            assert await broker.redrive(queue, []) == 0
            assert await broker.redrive(queue, [*unknown, kept.id]) == 1

    async def test_redriving_counts_deliveries_from_zero(self) -> None:
        async with self.running() as (broker, queue):
            await publish_all(broker, [Outgoing(queue, b"mended")])
            consumer = await broker.consume(queue, prefetch=1)
            for _ in range(self.delivery_limit):
                await consumer.retry(await self.take_one(consumer), 0.0, "broken")
            await self.dead_letters(broker, queue, 1)
            assert await broker.redrive(queue) == 1
            for redeliveries in range(self.delivery_limit):
                delivery = await self.take_one(consumer)
                assert (delivery.body, delivery.redeliveries) == (b"mended", redeliveries)
                await consumer.retry(delivery, 0.0, "still broken")
            (letter,) = await self.dead_letters(broker, queue, 1)
            assert "still broken" in letter.reason

    async def test_discarding_deletes(self) -> None:
        async with self.running() as (broker, queue):
            first, second, third = await self.add_dead_letters(broker, queue, 3)
            assert await broker.discard(queue, [first.id, third.id]) == 2
            assert list(await self.dead_letters(broker, queue, 1)) == [second]
            await self.assert_empty(broker, queue)

    async def test_the_dead_letters_of_a_queue_that_somebody_deleted_are_listed_and_moved_back(self) -> None:
        async with self.running() as (broker, queue):
            await self.add_dead_letters(broker, queue, 2)
            await self.delete_alone(queue)
            await self.state_where(broker, queue, lambda s: (s.ready, s.unacked, s.dead_letters) == (0, 0, 2))
            assert [state.dead_letters for state in await broker.queues() if state.queue == queue] == [2]
            assert len(await self.dead_letters(broker, queue, 2)) == 2
            assert await broker.redrive(queue) == 2
            consumer = await broker.consume(queue, prefetch=10)
            assert sorted(delivery.body for delivery in await self.take(consumer, 2)) == [b"letter 0", b"letter 1"]

    async def test_what_cannot_be_the_id_of_a_letter_is_refused_as_that(self) -> None:
        async with self.running() as (broker, queue):
            looking = broker.dead_letters(queue, limit=10, after="no id at all")
            [outcome] = await asyncio.gather(looking, return_exceptions=True)
            assert isinstance(outcome, NotAnId), f"{outcome!r} is not NotAnId"

    async def test_a_queue_that_does_not_exist_has_no_dead_letters(self) -> None:
        async with self.running() as (broker, _):
            nowhere = self.fresh_name()
            assert list(await broker.dead_letters(nowhere, limit=10)) == []
            assert await broker.redrive(nowhere) == 0
