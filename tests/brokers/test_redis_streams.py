"""Redis Streams: the suite every broker passes, how it starts and stops, and whom a server lets in."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from oraculo.brokers.redis_streams import RedisStreamsBroker
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings
from oraculo.ports.broker import Broker, ensure_taken, publish_all
from oraculo.testing.broker_suite import BrokerSuite
from tests.brokers import redis_streams_stage as stage
from tests.brokers.redis_streams_stage import (
    ENDS,
    PATIENCE,
    PROMPTLY,
    bodies,
    fresh_name,
    messages,
    shows,
    started,
    take,
    waiting,
)
from tests.receipts import takers
from tests.servers.certificates import make_certificates
from tests.servers.fleet import Fleet
from tests.servers.listener import listening
from tests.servers.process import Server, free_port
from tests.servers.proxy import Proxy
from tests.servers.valkey import Sentinel, Valkey
from tests.waiting import until

url, plain, queue, server = stage.url, stage.plain, stage.queue, stage.server  # fixtures


class TestConformance(BrokerSuite):
    @pytest.fixture(autouse=True)
    def _server(self, fleet: Fleet) -> None:
        self.url = fleet.url("redis")

    async def make_broker(self) -> Broker:
        return RedisStreamsBroker(self.url, delivery_limit=self.delivery_limit)

    async def forget(self, queues: Sequence[str]) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.delete(*(queue + end for queue in queues for end in ENDS))

    async def delete_alone(self, queue: str) -> None:
        with redis.Redis.from_url(self.url) as client:
            client.delete(queue)


class TestLife:
    async def test_the_check_names_server_version_and_place(self, url: str) -> None:
        async with started(url) as broker:
            assert (await broker.check()).startswith(("Valkey ", "Redis "))
            assert url.partition("//")[2].partition("/")[0].rpartition("@")[2] in await broker.check()

    async def test_it_connects_only_when_it_is_started(self) -> None:
        broker = RedisStreamsBroker(f"redis://127.0.0.1:{free_port()}")
        with pytest.raises(BrokerUnavailable, match="start"):
            await publish_all(broker, messages("q", 1))
        assert "start" in str(broker.statuses()[0].trouble)
        await broker.close()

    async def test_closing_leaves_nothing_behind(self, url: str, plain: Any, queue: str) -> None:
        before = asyncio.all_tasks()
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 2))
            consumers = [await broker.consume(queue, prefetch=1) for _ in range(3)]
            await take(consumers[0], 1)
            abandoned = asyncio.create_task(consumers[1].take(1))  # nobody looks at what it was given
            await asyncio.wait({abandoned}, timeout=PATIENCE)
            taking = await waiting(consumers[2])
        assert list(await taking) == []
        assert asyncio.all_tasks() == before
        assert plain.xinfo_consumers(queue, queue) == []
        assert plain.xpending(queue, queue)["pending"] == 0
        assert plain.xlen(queue) == 2
        assert not [each for each in plain.client_list() if each["name"].startswith("oraculo-")]

    async def test_what_arrives_for_a_cancelled_take_is_kept_or_given_back(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            consumer = await broker.consume(queue, prefetch=10)
            taking = await waiting(consumer)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            await publish_all(broker, messages(queue, 1))
            await until(shows(broker, queue, unacked=1), saying="the delivery")
            assert bodies(await take(consumer, 1)) == [0]
            taking = await waiting(consumer)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            await publish_all(broker, messages(queue, 1))
            await until(shows(broker, queue, unacked=2), saying="the delivery")
            await consumer.close()
            again = await take(await broker.consume(queue, prefetch=10), 2, within=PROMPTLY)
            assert {each.redeliveries for each in again} == {1}

    async def test_what_is_given_back_does_not_go_to_the_wait_of_whoever_gives_it(self, url: str, queue: str) -> None:
        async with started(url) as broker:
            await publish_all(broker, messages(queue, 3))
            consumer = await broker.consume(queue, prefetch=10)
            await take(consumer, 3)
            taking = await waiting(consumer)
            await consumer.close()
            assert list(await taking) == []
            again = await take(await broker.consume(queue, prefetch=10), 3, within=PROMPTLY)
            assert {each.redeliveries for each in again} == {1}


class WithoutAuth(Valkey):
    """Answers `ERR unknown command 'AUTH', with args beginning with: …`, as a proxy or an old server does."""

    def command(self) -> list[str]:
        return [*super().command(), "--rename-command", "AUTH", ""]


class WithoutExec(Valkey):
    """Begins a transaction and cannot end it, as a proxy may that knows only some commands."""

    def command(self) -> list[str]:
        return [*super().command(), "--rename-command", "EXEC", ""]


class Clustered(Valkey):
    def command(self) -> list[str]:
        return [*super().command(), "--cluster-enabled", "yes"]


class TestAccess:
    async def test_tls(self, url: str, queue: str, tmp_path: Path) -> None:
        certificates = make_certificates(tmp_path)
        with Proxy(url, certificates) as proxy:
            secure = proxy.url.replace("redis://", "rediss://")
            async with started(f"{secure}?ssl_ca_certs={certificates.authority}") as broker:
                await publish_all(broker, messages(queue, 1))
                consumer = await broker.consume(queue, prefetch=1)
                await consumer.ack(await take(consumer, 1))
            stranger = RedisStreamsBroker(secure)
            with pytest.raises(BrokerError, match=f"certificate of 127.0.0.1:{proxy.port} is not trusted"):
                await stranger.start()
            await stranger.close()
            without = RedisStreamsBroker(proxy.url, connect_timeout=0.5)
            with pytest.raises(BrokerUnavailable, match=str(proxy.port)):
                await without.start()
            await without.close()

    async def test_tls_to_a_server_that_has_none(self, url: str) -> None:
        broker = RedisStreamsBroker(url.replace("redis://", "rediss://"), connect_timeout=1.0)
        with pytest.raises(BrokerError, match=r"127\.0\.0\.1"):
            await broker.start()
        await broker.close()

    async def test_passwords_and_users(self) -> None:
        with Valkey(password="s3cret/ü") as server, redis.Redis(port=server.port, password="s3cret/ü") as plain:
            plain.acl_setuser("worker", enabled=True, passwords=["+p@ss"], keys=["*"], commands=["+@all"])
            place = f"127.0.0.1:{server.port}/0"
            for login in (":s3cret%2F%C3%BC@", "worker:p%40ss@"):
                async with started(f"redis://{login}{place}") as broker:
                    await publish_all(broker, messages("q", 1))
            for login, what in ((":wrong@", "password"), ("worker@", "WRONGPASS"), ("", "wants a password")):
                stranger = RedisStreamsBroker(f"redis://{login}{place}")
                with pytest.raises(BrokerError, match=what) as caught:
                    await stranger.start()
                assert not isinstance(caught.value, BrokerUnavailable)
                assert "p@ss" not in str(caught.value)
                await stranger.close()

    @pytest.mark.parametrize("login", ["worker@", "worker:@", "worker:any@"])
    async def test_a_user_without_a_password_is_that_user(self, login: str) -> None:
        with Valkey() as server, redis.Redis(port=server.port) as plain:
            plain.acl_setuser("worker", enabled=True, nopass=True, keys=["q"], commands=["+@all"])
            async with started(f"redis://{login}127.0.0.1:{server.port}/0") as broker:
                assert {each["user"] for each in plain.client_list() if int(each["id"]) != plain.client_id()} == {
                    "worker"
                }
                await publish_all(broker, messages("q", 1))
                with pytest.raises(BrokerError, match="NOPERM"):
                    ensure_taken(await broker.publish(messages("of-others", 1)))

    @pytest.mark.parametrize("login", ["", ":@", "default@", "default:@", "default:any@"])
    async def test_the_default_user_of_a_server_without_passwords(self, login: str, url: str) -> None:
        async with started(url.replace("://", f"://{login}")) as broker:
            assert await broker.check()

    async def test_a_password_for_a_server_that_has_none(self, url: str) -> None:
        broker = RedisStreamsBroker(url.replace("://", "://:s3cr3t@"))
        with pytest.raises(BrokerError, match=r"127\.0\.0\.1:\d+ has no password, and the URL has one$"):
            await broker.start()
        await broker.close()

    async def test_a_server_that_repeats_what_it_was_told_makes_no_password_known(self) -> None:
        with WithoutAuth() as server:
            broker = RedisStreamsBroker(f"redis://ana:s3cr3t@127.0.0.1:{server.port}/0")
            with pytest.raises(BrokerError, match="refused the user or the password") as caught:
                await broker.start()
            assert "s3cr3t" not in f"{caught.value} {broker.statuses()}"
            await broker.close()

    async def test_a_password_that_changes_later_gives_no_message_up(self) -> None:
        with Valkey(password="old") as server, redis.Redis(port=server.port, password="old") as plain:
            async with started(server.url) as broker:
                plain.config_set("requirepass", "new")
                plain.client_kill_filter(_type="normal", skipme=True)
                await until(lambda: broker.statuses()[0].trouble is not None, saying="trouble")
                with pytest.raises(BrokerUnavailable, match="password"):
                    await publish_all(broker, messages("q", 1))

    @pytest.mark.parametrize("more", [["+info"], []], ids=["with info", "without info"])
    async def test_a_user_without_rights_of_an_operator_gives_back_too(self, more: list[str]) -> None:
        with Valkey() as server, redis.Redis(port=server.port) as plain:
            rights = ["+@all", "-@dangerous", *more]
            plain.acl_setuser("worker", enabled=True, passwords=["+pass"], keys=["*"], commands=rights)
            async with started(f"redis://worker:pass@127.0.0.1:{server.port}") as broker:
                await publish_all(broker, messages("q", 1))
                consumer = await broker.consume("q", prefetch=2)
                await take(consumer, 1)
                taking = await waiting(consumer)
                heir = await broker.consume("q", prefetch=2)
                await consumer.close()
                assert list(await taking) == []
                (again,) = await take(heir, 1, within=PROMPTLY)
                assert again.redeliveries == 1
                assert str(server.port) in await broker.check()

    async def test_a_server_that_cannot_end_a_transaction_is_told_nothing_in_vain(self) -> None:
        with WithoutExec() as server, redis.Redis(port=server.port) as plain:
            async with started(server.url) as broker:
                with pytest.raises(BrokerUnavailable, match="does not do transactions"):
                    await publish_all(broker, messages("q", 3))
                await publish_all(broker, messages("q", 1))
                assert plain.xlen("q") == 1

    @pytest.mark.parametrize("right", ["-exec", "-multi"])
    async def test_a_user_without_transactions_publishes_too(self, right: str) -> None:
        with Valkey() as server, redis.Redis(port=server.port) as plain:
            plain.acl_setuser("worker", enabled=True, passwords=["+pass"], keys=["*"], commands=["+@all", right])
            async with started(f"redis://worker:pass@127.0.0.1:{server.port}") as broker:
                for _ in range(2):
                    assert takers(await broker.publish(messages("q", 3))) == ["redis"] * 3
                assert plain.xlen("q") == 6

    @pytest.mark.parametrize(
        ("kind", "what"), [(Clustered, "a node of a Redis Cluster"), (Sentinel, "a Redis Sentinel")]
    )
    async def test_a_cluster_and_a_sentinel_are_refused_in_words(self, kind: Any, what: str) -> None:
        with kind(durable=False) as server:
            broker = RedisStreamsBroker(server.url)
            for call in (broker.start, broker.check):
                with pytest.raises(BrokerError, match=rf"is {what}: use the address of a single server") as caught:
                    await call()
                assert not isinstance(caught.value, BrokerUnavailable)
            assert what in str(broker.statuses()[0].trouble)
            await broker.close()

    async def test_the_database_is_that_of_the_path(self, server: Server) -> None:
        queue = fresh_name()
        with redis.Redis(port=server.port, db=3) as plain:
            async with started(f"redis://127.0.0.1:{server.port}/3") as broker:
                await publish_all(broker, messages(queue, 1))
                assert plain.xlen(queue) == 1
                assert bodies(await take(await broker.consume(queue, prefetch=1), 1)) == [0]
        missing = RedisStreamsBroker(f"redis://127.0.0.1:{server.port}/999")
        with pytest.raises(BrokerError, match="database 999"):
            await missing.start()
        await missing.close()

    @pytest.mark.parametrize("end", ["/zero", "/-1", "/0?colour=blue", "?ssl_ca_certs=x"])
    def test_a_url_with_a_fault_is_refused_at_once(self, end: str) -> None:
        with pytest.raises(InvalidSettings, match="redis://localhost"):
            RedisStreamsBroker(f"redis://localhost{end}")

    @pytest.mark.parametrize(
        "login", ["u:hid/den@h", "u:1hid/den@h", ":12/hidden@h", "u:12#hidden@h", "u:12?hidden@h", ":hid[den@h"]
    )
    def test_a_password_that_was_not_encoded_is_not_told(self, login: str) -> None:
        with pytest.raises(InvalidSettings, match="percent-encoded") as caught:
            RedisStreamsBroker(f"redis://{login}")
        assert "hid" not in str(caught.value)
        assert caught.value.__context__ is None or caught.value.__suppress_context__

    async def test_something_that_is_no_redis_is_told(self) -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            writer.close()

        async with listening(answer) as port:
            broker = RedisStreamsBroker(f"redis://127.0.0.1:{port}")
            with pytest.raises(BrokerUnavailable, match="does not speak Redis"):
                await broker.start()
            await broker.close()
