"""Redis Streams: clients that know nothing of us, and the plain workers of the examples."""

import importlib.util
import json
import time
from typing import Any

import pytest
import redis

from oraculo.brokers.redis_streams.scripts import TRIMMED
from oraculo.ports.broker import NO_REASON, Outgoing, publish_all
from oraculo.ports.broker_admin import DEAD_LETTER_BODY_BYTES
from oraculo.testing.broker_suite import GARBAGE
from oraculo.wire.naming import dlq_name
from tests.brokers import redis_streams_stage as stage
from tests.brokers.redis_streams_stage import LEASE, PATIENCE, bodies, messages, read_plain, started, state, take
from tests.receipts import takers
from tests.servers.valkey import Valkey
from tests.test_plain_workers import PLAIN, Start, installed, start  # noqa: F401 - fixtures
from tests.waiting import until

url, plain, queue = stage.url, stage.plain, stage.queue  # fixtures


class TestPlainClients:
    async def test_what_one_publishes_is_delivered(self, url: str, plain: Any, queue: str) -> None:
        plain.xadd(queue, {"body": b"early"})
        async with started(url) as broker:
            consumer = await broker.consume(queue, prefetch=10)
            plain.xadd(queue, {"body": b"late"})
            taken = await take(consumer, 2)
            assert [(each.body, each.redeliveries) for each in taken] == [(b"early", 0), (b"late", 0)]
            await consumer.ack(taken)
            assert plain.xlen(queue) == 0

    async def test_one_consumes_what_is_published(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 2))
            ((_, entries),) = read_plain(plain, queue)
            assert [fields for _, fields in entries] == [{b"body": b"0"}, {b"body": b"1"}]
            assert (await state(broker, queue)).unacked == 2
            for entry, _ in entries:
                plain.xack(queue, queue, entry)
                plain.xdel(queue, entry)
            found = await state(broker, queue)
            assert (found.ready, found.unacked) == (0, 0)

    @pytest.mark.parametrize("count", [1, 3])
    async def test_a_queue_that_was_deleted_has_its_group_again_with_the_next_message(
        self, url: str, plain: Any, queue: str, count: int
    ) -> None:
        """As by a purge: a plain worker that only reads would get NOGROUP for ever."""
        other = f"{queue}-other"
        async with started(url) as broker:
            await publish_all(broker, [*messages(queue, 1), *messages(other, 1)])
            plain.delete(queue)
            vias = takers(await broker.publish([*messages(queue, count), *messages(other, 1)]))
            assert vias == [broker.name] * (count + 1)
            ((_, entries),) = read_plain(plain, queue)
            assert [fields[b"body"] for _, fields in entries] == [b"%d" % number for number in range(count)]
            assert plain.xlen(other) == 2  # what was there took its message once
            await publish_all(broker, messages(queue, 1))
            assert plain.xlen(queue) == count + 1

    async def test_what_is_deleted_together_with_a_refusal_is_told_apart(
        self, url: str, plain: Any, queue: str
    ) -> None:
        """Some of a batch found their queue deleted, others found something else under its name."""
        other = f"{queue}-other"
        async with started(url) as broker:
            await publish_all(broker, [*messages(queue, 1), *messages(other, 1)])
            plain.delete(queue, other)
            plain.set(other, "no stream")
            receipts = await broker.publish([*messages(queue, 1), *messages(other, 1)])
            assert takers(receipts) == [broker.name, None]
            assert len(read_plain(plain, queue)[0][1]) == 1
            plain.delete(other)

    async def test_both_share_a_queue(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            consumer = await broker.consume(queue, prefetch=1)
            await publish_all(broker, messages(queue, 2))
            assert bodies(await take(consumer, 1)) == [0]
            ((_, entries),) = read_plain(plain, queue)
            assert [fields[b"body"] for _, fields in entries] == [b"1"]
            assert (await state(broker, queue)).consumers == 2

    async def test_what_one_acked_and_did_not_delete_is_not_ready(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 3))
            if "lag" not in plain.xinfo_groups(queue)[0]:
                pytest.skip("Redis tells what was never delivered since version 7")
            ((_, entries),) = read_plain(plain, queue, count=2)
            plain.xack(queue, queue, *(entry for entry, _ in entries))
            found = await state(broker, queue)
            assert (found.ready, found.unacked) == (1, 0)

    async def test_what_one_trimmed_while_it_was_out_hides_nothing_that_waits(
        self, url: str, plain: Any, queue: str
    ) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 5))
            if "lag" not in plain.xinfo_groups(queue)[0]:
                pytest.skip("Redis tells what was never delivered since version 7")
            read_plain(plain, queue)
            plain.xtrim(queue, maxlen=0, approximate=False)
            await publish_all(broker, messages(queue, 2))
            assert (await state(broker, queue)).ready == 2

    async def test_what_one_left_pending_is_claimed_when_its_lease_is_over(
        self, url: str, plain: Any, queue: str
    ) -> None:
        async with started(url, lease=LEASE) as broker:
            await publish_all(broker, messages(queue, 2))
            read_plain(plain, queue)
            taken = await take(await broker.consume(queue, prefetch=10), 2)
            assert [each.redeliveries for each in taken] == [1, 1]

    async def test_a_queue_may_have_a_lease_of_its_own(self, url: str, plain: Any, queue: str) -> None:
        async with started(url, lease=60, leases={queue: LEASE}) as broker:
            await publish_all(broker, messages(queue, 2))
            read_plain(plain, queue)
            taken = await take(await broker.consume(queue, prefetch=10), 2)
            assert [each.redeliveries for each in taken] == [1, 1]

    async def test_a_page_shows_of_many_and_long_fields_only_the_beginnings(
        self, url: str, plain: Any, queue: str
    ) -> None:
        size = DEAD_LETTER_BODY_BYTES // 2
        plain.xadd(dlq_name(queue), {b"first": b"1" * size, b"second": b"2" * size, b"third": b"3" * size})
        plain.xadd(dlq_name(queue), {b"body": b"x", b"beside": b"y" * size})
        async with started(url) as broker:
            fields, body = await broker.dead_letters(queue, limit=10)
        assert fields.body == (b"first: %b\nsecond: %b" % (b"1" * size, b"2" * size))[:DEAD_LETTER_BODY_BYTES]
        assert fields.cut_from is not None
        assert fields.cut_from > 3 * size
        assert (body.body, body.cut_from) == (b"x", None)

    async def test_fields_of_others_are_carried_along(self, url: str, plain: Any, queue: str) -> None:
        fields = {b"body": b"x", b"colour": b"blue \xff"}
        async with started(url) as broker:
            plain.xadd(queue, fields)
            consumer = await broker.consume(queue, prefetch=1)
            for delay in (0.0, 0.01):
                await consumer.retry((await take(consumer, 1))[0], delay, "again")
            await consumer.dead_letter((await take(consumer, 1))[0], "bad")
            ((_, letter),) = plain.xrange(queue + ".dlq")
            assert letter.items() >= {**fields, b"reason": b"bad", b"redeliveries": b"2"}.items()
            await broker.redrive(queue)
            ((_, redriven),) = plain.xrange(queue)
            assert redriven == fields

    async def test_an_entry_without_a_body_goes_every_way(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            plain.xadd(queue, {"other": '{"a": 1}', "and": "this", "redeliveries": "-7x"})
            consumer = await broker.consume(queue, prefetch=1)
            (delivery,) = await take(consumer, 1)
            assert (delivery.body, delivery.redeliveries) == (b"", 0)
            await consumer.retry(delivery, 0.0, "again")
            await consumer.dead_letter((await take(consumer, 1))[0], "no body")
            (letter,) = await broker.dead_letters(queue, limit=5)
            assert (letter.reason, letter.redeliveries) == ("no body; the JSON must be in the field `body`", 1)
            assert letter.body == b'other: {"a": 1}\nand: this', "what it has is shown all the same"
            assert await broker.redrive(queue) == 1
            assert (await take(consumer, 1))[0].redeliveries == 0

    async def test_garbage_in_the_dead_letter_queue_is_shown_and_redriven(
        self, url: str, plain: Any, queue: str
    ) -> None:
        wrong = {"reason": b"\xff\xfe", "at": "yesterday", "redeliveries": "many"}
        for body in GARBAGE:
            plain.xadd(queue + ".dlq", {"body": body})
        plain.xadd(queue + ".dlq", {"body": b"wrong", **wrong})
        plain.xadd(queue + ".dlq", {"nothing": "known"}, id="*")
        async with started(url) as broker:
            letters = await broker.dead_letters(queue, limit=100)
            assert [letter.body for letter in letters] == [*GARBAGE, b"wrong", b"nothing: known"]
            assert {letter.reason for letter in letters[:-2]} == {NO_REASON}
            assert all(abs(letter.at - time.time()) < 60 for letter in letters)
            assert all(letter.redeliveries == 0 for letter in letters)
            assert (await state(broker, queue)).dead_letters == len(letters)
            assert await broker.redrive(queue, [letters[0].id]) == 1
            assert await broker.redrive(queue) == len(letters) - 1
            taken = await take(await broker.consume(queue, prefetch=100), len(letters))
            assert [each.body for each in taken] == [*GARBAGE, b"wrong", b""]


@pytest.fixture
def trimmed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oraculo.brokers.redis_streams.trimming.TRIMMED_EVERY", 0.0)


def left_of(plain: Any, queue: str) -> list[bytes]:
    return [fields[b"body"] for _, fields in plain.xrange(queue)]


@pytest.mark.usefixtures("trimmed_at_once")
class TestTrimming:
    """What workers ack and do not delete, as most of what is written about streams has it."""

    @pytest.mark.parametrize("noack", [False, True])
    async def test_what_was_done_leaves_the_stream_and_what_waits_stays(
        self, url: str, plain: Any, queue: str, noack: bool
    ) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 5))
            found = plain.xreadgroup(queue, "plain", {queue: ">"}, count=3, noack=noack)
            ((_, entries),) = found.items() if isinstance(found, dict) else found
            plain.xack(queue, queue, *(entry for entry, _ in entries))
            await publish_all(broker, [Outgoing(queue, b"5")])
            assert left_of(plain, queue) == [b"3", b"4", b"5"]
            found = await state(broker, queue)
            assert (found.ready, found.unacked) == (3, 0)

    async def test_a_queue_that_is_sent_nothing_more_is_trimmed_with_another(
        self, url: str, plain: Any, queue: str
    ) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 2))
            ((_, entries),) = read_plain(plain, queue)
            await publish_all(broker, messages(f"{queue}.dlq", 1))
            assert plain.xlen(queue) == 2, "they are held"
            plain.xack(queue, queue, *(entry for entry, _ in entries))
            await publish_all(broker, messages(f"{queue}.dlq", 1))
            assert plain.xlen(queue) == 0

    async def test_what_is_held_stays_with_all_that_came_after_it(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 4))
            ((_, entries),) = read_plain(plain, queue)
            plain.xack(queue, queue, entries[0][0], entries[2][0])
            await publish_all(broker, [Outgoing(queue, b"4")])
            assert left_of(plain, queue) == [b"1", b"2", b"3", b"4"]
            assert (await state(broker, queue)).unacked == 2

    async def test_what_a_group_is_to_be_given_again_stays(self, url: str, plain: Any, queue: str) -> None:
        """Its last id may be set back, while some of what comes after it is held."""
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 3))
            ((_, entries),) = read_plain(plain, queue)
            plain.xack(queue, queue, entries[0][0], entries[1][0])
            plain.xgroup_setid(queue, queue, entries[0][0])
            await publish_all(broker, [Outgoing(queue, b"3")])
            assert left_of(plain, queue) == [b"1", b"2", b"3"]

    async def test_a_stream_that_others_read_too_keeps_all(self, url: str, plain: Any, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 2))
            plain.xgroup_create(queue, f"{queue}-audit", "0")
            ((_, entries),) = read_plain(plain, queue)
            plain.xack(queue, queue, *(entry for entry, _ in entries))
            await publish_all(broker, [Outgoing(queue, b"2")])
            assert left_of(plain, queue) == [b"0", b"1", b"2"]

    async def test_dead_letters_stay_though_somebody_read_them(self, url: str, plain: Any, queue: str) -> None:
        dlq = f"{queue}.dlq"
        async with started(url) as broker:
            for _ in range(3):
                await publish_all(broker, [Outgoing(queue, b"x", reason="bad")])
                plain.xack(dlq, dlq, *(entry for _, entries in read_plain(plain, dlq) for entry, _ in entries))
            assert plain.xlen(dlq) == 3

    async def test_very_much_goes_in_parts(self, url: str, plain: Any, queue: str) -> None:
        count = TRIMMED * 3 // 2
        async with started(url) as broker:
            await broker.declare([queue])
            plain.eval("for i = 1, ARGV[1] do redis.call('XADD', KEYS[1], '*', 'body', 'x') end", 1, queue, count)
            plain.xgroup_setid(queue, queue, "$")
            await publish_all(broker, [Outgoing(queue, b"first")])
            await publish_all(broker, [Outgoing(queue, b"second")])
            assert count - TRIMMED <= plain.xlen(queue) < count - TRIMMED // 2
            await publish_all(broker, [Outgoing(queue, b"third")])
            assert left_of(plain, queue) == [b"first", b"second", b"third"]


class TestPlainWorkers:
    """Those of the examples."""

    @pytest.mark.parametrize("name", ["redis_worker.py", "node_ioredis"])
    async def test_odd_commands_are_answered_or_buried_as_they_came(
        self,
        name: str,
        start: Start,  # noqa: F811 - a fixture
    ) -> None:
        command = {"correlation_id": "c", "tipo_evento": "iniciar_coleta", "payload": {}}
        odd = [GARBAGE[2], b'{"a": "\xff"}', json.dumps(command | {"responder_em": 7}).encode()]
        fine = [command | {"responder_em": None}, command | {"responder_em": "other"}, command]
        with Valkey() as server, redis.Redis.from_url(server.url) as plain:
            for body in [*odd, *(json.dumps(each).encode() for each in fine)]:
                plain.xadd("q", {"body": body})
            worker = start(name, server.url, "q")

            def is_done() -> bool:
                worker.expect_alive()
                return bool(plain.exists("q")) and plain.xlen("q") == 0

            await until(is_done, within=PATIENCE)
            assert [fields[b"body"] for _, fields in plain.xrange("q.dlq")] == odd
            assert (plain.xlen("resultados"), plain.xlen("other")) == (2, 1)

    @pytest.mark.parametrize("settled", [True, False])
    def test_what_another_has_claimed_is_passed_over(self, url: str, plain: Any, queue: str, settled: bool) -> None:
        spec = importlib.util.spec_from_file_location("redis_worker", PLAIN / "redis_worker.py")
        assert spec is not None
        assert spec.loader is not None
        worker = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(worker)
        plain.xgroup_create(queue, queue, "0", mkstream=True)
        plain.xadd(queue, {"body": b"{}"})
        plain.xreadgroup(queue, "me", {queue: ">"})
        read = worker.read

        def read_slowly(client: Any, queue: str, name: str, after: str) -> Any:
            if after == ">":
                raise EOFError
            found = read(client, queue, name, after)
            for entry, _ in found:
                plain.xclaim(queue, queue, "another", 0, [entry])
                if settled:
                    plain.xack(queue, queue, entry)
                    plain.xdel(queue, entry)
            return found

        worker.read = read_slowly  # type: ignore[attr-defined]
        with pytest.raises(EOFError):
            worker.main(url, queue, "me")
        assert plain.xlen(queue + ".dlq") == 0
        assert plain.xpending(queue, queue)["pending"] == (0 if settled else 1)
