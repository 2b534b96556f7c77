"""How a webhook is posted: who looks up its host, by which proxy, with what it must not carry along."""

import asyncio
import re
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import h11
import httpx2
import pytest

from oraculo.core.webhook_rules import LOOPBACK
from oraculo.engine.deliver import addresses, webhooks
from oraculo.engine.deliver.webhooks import HttpPost, NotPosted, TargetRefused
from oraculo.pipeline.retry import RetryPolicy
from oraculo.settings import EngineSettings, Settings, WebhookSettings
from oraculo.testing.harness import Harness
from tests.engine.test_deliveries import receiving
from tests.servers.certificates import make_certificates
from tests.servers.listener import listening
from tests.servers.process import free_port
from tests.waiting import until

_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nset-cookie: sessao=1; Path=/\r\nconnection: close\r\n\r\n"


class Heads(list[str]):
    """The heads of the requests that a server got."""

    port = 0


@asynccontextmanager
async def heads(
    *, gate: asyncio.Barrier | None = None, tls: ssl.SSLContext | None = None, first: bytes = b""
) -> AsyncIterator[Heads]:
    got = Heads()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append((await reader.readuntil(b"\r\n\r\n")).decode())
        if gate is not None:
            await gate.wait()
        writer.write(first + _OK)
        await writer.drain()
        writer.close()

    async with listening(serve, ssl=tls, backlog=500) as got.port:
        yield got


@asynccontextmanager
async def never_to_the_point(answer: bytes) -> AsyncIterator[str]:
    """A receiver that sends this again and again; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(answer)
                await writer.drain()
        writer.close()

    async with listening(serve) as port:
        yield f"http://127.0.0.1:{port}/"


@asynccontextmanager
async def posting(**settings: Any) -> AsyncIterator[HttpPost]:
    post = HttpPost(WebhookSettings(**({"timeout": 5, "allow": LOOPBACK} | settings)))
    yield post
    await post.close()


class Names:
    """A name server: it knows these, and says nothing of any other until it is let go."""

    def __init__(self, **known: list[str]) -> None:
        self.known = known
        self.asked: list[str] = []
        self.speaks = threading.Event()

    def look_up(self, host: str, port: object, *_: object, **__: object) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        if host not in self.known and not self.speaks.wait(30):
            raise AssertionError("nobody let it go")
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(_family(address), socket.SOCK_STREAM, 6, "", (address, port)) for address in self.known[host]]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.lower(), raising=False)
    names = Names(bom=["127.0.0.1"])
    monkeypatch.setattr(socket, "getaddrinfo", names.look_up)
    yield names
    names.speaks.set()


async def test_a_host_whose_name_server_is_silent_holds_up_nobody(names: Names) -> None:
    # Time enough to read all certificates on a slow machine; and places for all of the silent host's at once.
    webhook = WebhookSettings(timeout=3, max_attempts=1, concurrency=240, allow=LOOPBACK)
    settings = Settings(webhook=webhook, engine=EngineSettings(poll=0.02, note_linger=0.005))
    request = {"destinos": ["escavador_a"], "timeout": 0.05}
    async with receiving() as receiver, Harness(settings=settings) as oraculo:
        silent = [await oraculo.submit(request | {"webhook": "http://mudo/"}) for _ in range(60)]
        await until(lambda: names.asked, saying="the lookup")
        await oraculo.submit(request | {"webhook": receiver.url.replace("127.0.0.1", "bom")})
        await until(lambda: receiver.received, within=5, saying="the webhook of a host that is known")
        assert await asyncio.wait_for(asyncio.to_thread(int, "1"), 5), "the threads of others are free"

        async def given_up() -> bool:
            heads = await oraculo.store.heads(silent)
            return all(head.deliveries[0].error == "its name was not resolved in 3 s" for head in heads.values())

        await until(given_up)
        assert names.asked.count("mudo") == 1, "those who wait for the same host share its lookup"


async def test_a_name_that_is_nobodys_is_told_at_once(names: Names) -> None:
    names.speaks.set()
    async with posting() as post:
        with pytest.raises(NotPosted, match=r"^its name was not resolved: Name or service not known$"):
            await post("http://ninguem/", b"{}", {})


async def test_a_host_is_called_by_its_name_at_the_first_of_its_addresses_that_answers(names: Names) -> None:
    async with heads() as got, posting() as post:
        names.known["dois"] = ["127.0.0.9", "127.0.0.1"]
        assert await post(f"http://dois:{got.port}/gancho?a=1", b"{}", {}) == 200
    (head,) = got
    assert head.startswith("POST /gancho?a=1 HTTP/1.1\r\n")
    assert f"\r\nhost: dois:{got.port}\r\n" in head.lower()


async def test_a_host_is_reached_though_most_of_its_addresses_are_dead(names: Names) -> None:
    async with heads() as got, posting() as post:
        names.known["muitos"] = [*(f"127.0.0.{last}" for last in range(2, 10)), "127.0.0.1"]
        assert await post(f"http://muitos:{got.port}/", b"{}", {}) == 200


async def test_no_family_of_addresses_keeps_the_other_from_its_turn(names: Names) -> None:
    names.known["seis"] = [*(f"::{last}" for last in range(2, 30)), "127.0.0.1", "127.0.0.2"]
    found = await addresses.Addresses().of("seis")
    assert found[:5] == ["::2", "127.0.0.1", "::3", "127.0.0.2", "::4"]
    assert len(found) == 16


async def test_a_lookup_whose_thread_cannot_be_started_is_begun_again(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(addresses, "_AT_ONCE", 1)
    lookups = addresses.Addresses()
    with monkeypatch.context() as no_room:
        no_room.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="can't start new thread"):
            await lookups.of("bom")
    assert await asyncio.wait_for(lookups.of("bom"), 5) == ["127.0.0.1"]


async def test_a_host_that_was_found_is_not_looked_up_again_at_once(names: Names) -> None:
    lookups = addresses.Addresses()
    assert await lookups.of("bom") == await lookups.of("bom")
    assert names.asked == ["bom"]


async def test_a_host_that_was_not_reached_is_looked_up_again(names: Names) -> None:
    async with posting() as post:
        for _ in range(2):
            with pytest.raises(httpx2.ConnectError):
                await post("http://bom:1/", b"{}", {})
    assert names.asked == ["bom", "bom"]


async def test_silent_names_hold_up_no_host_that_was_found_before(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_AT_ONCE", 2)
    monkeypatch.setattr(addresses, "_FRESH", 0.0)
    lookups = addresses.Addresses()
    await lookups.of("bom")
    await lookups.of("bom")
    assert names.asked == ["bom", "bom"], "what is no longer fresh is looked up while there is a place"
    silent = [asyncio.create_task(lookups.of(f"mudo{number}")) for number in range(3)]
    await until(lambda: len(names.asked) == 4, saying="the lookups of the silent names")
    assert await asyncio.wait_for(lookups.of("bom"), 5) == ["127.0.0.1"]
    names.speaks.set()
    await asyncio.gather(*silent, return_exceptions=True)


async def test_callers_who_gave_up_waiting_for_a_place_leave_no_lookup_behind(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_AT_ONCE", 1)
    lookups = addresses.Addresses()
    silent = asyncio.create_task(lookups.of("mudo"))
    await until(lambda: names.asked, saying="the lookup of the silent name")
    for number in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lookups.of(f"mudo{number}"), 0.01)
    names.speaks.set()
    await asyncio.gather(silent, return_exceptions=True)
    assert await asyncio.wait_for(lookups.of("bom"), 5) == ["127.0.0.1"]
    assert names.asked == ["mudo", "bom"]


async def test_only_so_many_hosts_are_remembered(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_MOST_REMEMBERED", 2)
    names.known |= {"um": ["127.0.0.1"], "dois": ["127.0.0.1"]}
    lookups = addresses.Addresses()
    for host in ("bom", "um", "dois", "um", "bom"):
        await lookups.of(host)
    assert names.asked == ["bom", "um", "dois", "bom"], "the oldest is forgotten first"


async def test_a_certificate_is_checked_against_the_hosts_name(
    names: Names, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificates = make_certificates(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates.certificate, certificates.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    names.known |= {"localhost": ["127.0.0.1"], "outro": ["127.0.0.1"]}
    async with heads(tls=tls) as got, posting() as post:
        assert await post(f"https://localhost:{got.port}/", b"{}", {}) == 200
        with pytest.raises(Exception, match="Hostname mismatch"):
            await post(f"https://outro:{got.port}/", b"{}", {})


async def test_a_host_behind_a_proxy_is_the_proxys_to_look_up(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    async with heads() as proxy, posting() as post:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        assert await post("http://longe.example/gancho", b"{}", {}) == 200
    assert proxy[0].startswith("POST http://longe.example/gancho HTTP/1.1\r\n")
    assert names.asked == []


async def test_a_host_that_no_proxy_names_is_called_directly(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    async with heads() as proxy, heads() as got, posting() as post:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("NO_PROXY", "bom")
        assert await post(f"http://bom:{got.port}/gancho", b"{}", {}) == 200
    assert proxy == []
    assert got[0].startswith("POST /gancho HTTP/1.1\r\n")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "[::1]"])
async def test_this_machine_is_called_without_a_proxy(names: Names, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    names.known["localhost"] = ["127.0.0.1"]
    async with heads() as proxy, posting() as post:
        for variable in ("HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(httpx2.ConnectError):  # nobody is there, and it would be the proxy's to say so
            await post(f"http://{host}:{free_port()}/gancho", b"{}", {})
    assert proxy == []


async def test_which_proxies_there_are_is_read_once(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole environment at each attempt is a good part of what one takes."""
    reads = 0

    def read() -> dict[str, str]:
        nonlocal reads
        reads += 1
        return {}

    monkeypatch.setattr(webhooks, "getproxies", read)
    async with heads() as got, posting() as post:
        for _ in range(3):
            assert await post(f"http://bom:{got.port}/", b"{}", {}) == 200
    assert reads == 1


async def test_a_proxy_that_cannot_be_used_is_told_when_a_webhook_is_posted(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "socksio", None)
    async with Harness():
        pass
    async with posting() as post:
        with pytest.raises(NotPosted, match="cannot be used: a SOCKS proxy needs pip install socksio"):
            await post("http://longe.example/", b"{}", {})


@pytest.mark.parametrize(
    "proxy",
    ["http://u:s3cr/et@127.0.0.1:1", "http://u:s3cr#et@h", "http://u:s3cr?et@h", "s3cr://h", "http://u:p@h:s3cr"],
)
async def test_a_proxy_that_cannot_be_read_is_told_without_its_password(
    names: Names, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    async with posting() as post:
        with pytest.raises(NotPosted, match=r"its URL cannot be read; .* written %2F, %23 and %3F$") as refused:
            await post("http://longe.example/", b"{}", {})
    assert "s3cr" not in str(refused.value)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4000, "sent more than 16 informational answers (1xx) before any other"),
        (
            b"HTTP/1.1 103 Early Hints\r\nlink: " + b"x" * 60_000 + b"\r\n\r\n",
            "sent more than 128 kB without a status and its headers",
        ),
    ],
    ids=["many", "large"],
)
async def test_a_receiver_that_never_comes_to_the_point_is_left_at_once(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, told: str
) -> None:
    taken = []
    skip = h11.Connection.next_event

    def count(connection: h11.Connection) -> Any:
        taken.append(skip(connection))
        return taken[-1]

    monkeypatch.setattr(h11.Connection, "next_event", count)
    async with never_to_the_point(answer) as url, posting() as post:
        with pytest.raises(NotPosted, match=f"^{re.escape(told)}$"):
            await post(url, b"{}", {})
    assert len([event for event in taken if isinstance(event, h11.InformationalResponse)]) <= 16


async def test_a_few_informational_answers_come_before_the_one_that_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str((certificates := make_certificates(tmp_path)).authority))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates.certificate, certificates.key)
    hint = b"HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\n"
    async with heads(tls=tls, first=hint * 16) as good, heads(tls=tls, first=hint * 17) as bad, posting() as post:
        assert await post(f"https://127.0.0.1:{good.port}/", b"{}", {}) == 200
        with pytest.raises(NotPosted, match="more than 16 informational"):
            await post(f"https://127.0.0.1:{bad.port}/", b"{}", {})


async def test_an_answer_that_quotes_others_is_taken_by_its_own_status() -> None:
    body = b"HTTP/1.1 103 Early Hints\n" * 20
    answer = b"HTTP/1.1 201 Created\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    async with heads(first=answer) as got, posting() as post:
        assert await post(f"http://127.0.0.1:{got.port}/", b"{}", {}) == 201


async def test_no_cookie_goes_from_one_webhook_to_the_next() -> None:
    async with heads() as got, posting() as post:
        for path in ("uma", "outra"):
            await post(f"http://127.0.0.1:{got.port}/{path}", b"{}", {})
    assert len(got) == 2
    assert not any("cookie" in head.lower() for head in got)


async def test_as_many_are_posted_at_once_as_was_set() -> None:
    async with heads(gate=asyncio.Barrier(120)) as got, posting(concurrency=120) as post:
        url = f"http://127.0.0.1:{got.port}/"
        assert set(await asyncio.gather(*(post(url, b"{}", {}) for _ in range(120)))) == {200}


# -- targets that are not global ---------------------------------------------------------------------------------------


async def test_a_name_that_leads_to_this_machine_is_not_connected_to(names: Names) -> None:
    async with heads() as got, posting(allow=()) as post:
        refused = "127.0.0.1.*ORACULO_WEBHOOK_ALLOW"
        with pytest.raises(TargetRefused, match=refused):
            await post(f"http://bom:{got.port}/", b"{}", {})
    assert got == []


async def test_a_name_that_changes_its_address_between_two_looks_gains_nothing(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address that was looked up is the one that is checked and connected to: nobody asks a second time."""
    answers = [["127.0.0.2"], ["127.0.0.1"]]
    monkeypatch.setattr(addresses, "_addresses", lambda _host: answers.pop(0))
    async with heads() as got, posting(allow=["127.0.0.2"]) as post:
        with pytest.raises(httpx2.ConnectError):  # nobody listens at the first, and the second is not tried
            await post(f"http://muda:{got.port}/", b"{}", {})
        with pytest.raises(TargetRefused):
            await post(f"http://muda:{got.port}/", b"{}", {})
    assert (got, answers) == ([], [])


async def test_only_those_addresses_of_a_host_are_tried_that_may_be(names: Names) -> None:
    names.known["misto"] = ["127.0.0.9", "127.0.0.1"]
    async with heads() as got, posting(allow=["127.0.0.9"]) as post:
        with pytest.raises(httpx2.ConnectError):
            await post(f"http://misto:{got.port}/", b"{}", {})
    assert got == []


@pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "127.1", "localhost", "[::ffff:127.0.0.1]"])
async def test_no_proxy_is_asked_to_reach_this_machine(
    names: Names, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    async with heads() as proxy, posting(allow=()) as post:
        monkeypatch.setenv("ALL_PROXY", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(TargetRefused):
            await post(f"http://{host}/", b"{}", {})
    assert proxy == []


async def test_a_redirect_is_not_followed(names: Names) -> None:
    async with heads() as inside:
        moved = b"HTTP/1.1 307 x\r\nlocation: http://127.0.0.1:%d/\r\ncontent-length: 0\r\n\r\n" % inside.port
        async with heads(first=moved) as got, posting() as post:
            assert await post(f"http://bom:{got.port}/", b"{}", {}) == 307
    assert (len(got), inside) == (1, [])


async def test_a_refused_target_ends_its_delivery_at_once_and_the_run_says_why(names: Names) -> None:
    settings = Settings(engine=EngineSettings(poll=0.02, note_linger=0.005))
    async with receiving() as receiver, Harness(settings=settings) as oraculo:
        url = receiver.url.replace("127.0.0.1", "bom")
        run = await oraculo.run({"destinos": ["escavador_a"], "timeout": 0.05, "webhook": url})

        async def given_up() -> bool:
            (delivery,) = (await oraculo.operations.run(run["correlation_id"])).head.deliveries
            return (delivery.status, delivery.attempts) == ("nao_entregue", 1)

        await until(given_up)
        why = "reaches the address 127.0.0.1, which is not global;"
        assert f"given up after 1 attempt ({why}" in await oraculo.operations.explain(run["correlation_id"])
        last = (await oraculo.operations.history(run["correlation_id"]))[-1]
        assert last.what == "entrega_abandonada"
        assert why in (last.detail or "")
    assert receiver.received == []


def test_a_receiver_may_be_away_for_most_of_a_day() -> None:
    settings = WebhookSettings()
    retry = RetryPolicy(settings.max_attempts, settings.backoff, settings.max_backoff)
    hours = sum(retry.delay(attempt, 0.5) for attempt in range(1, settings.max_attempts)) / 3600
    assert 19 < hours < 20
