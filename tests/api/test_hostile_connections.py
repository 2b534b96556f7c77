"""What a stranger without a key may do to a connection: each attack of one table."""

import logging
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from oraculo.api.server.bounds import HEAD_BYTES, HEAD_FIELDS, client_of
from oraculo.core.run import RunStatus
from oraculo.ports.browse import RunQuery
from oraculo.settings import ApiSettings
from tests.api.live import LiveService, live
from tests.api.service import SETTINGS
from tests.cli.processes import environment, until

KEY = "chave-de-teste-0123456789"
# Each deadline is short enough to wait for, and another one, so that a test sees which of them it was.
HEADER_TIMEOUT, KEEP_ALIVE = 0.6, 0.3
MOST = 4
BOUNDED = msgspec.structs.replace(
    SETTINGS,
    api=ApiSettings(
        keys=(KEY,), header_timeout=HEADER_TIMEOUT, keep_alive=KEEP_ALIVE, client_connections=MOST, max_wait=30
    ),
)
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
JSON = b"Content-Type: application/json\r\n"
CHUNKED = b"POST /orquestracoes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + JSON
A_KEY = b"X-API-Key: " + KEY.encode() + b"\r\n"
MEGABYTE = b"a" * 2**20


# -- gone too early ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
def test_who_asks_and_hangs_up_at_once_leaves_no_traceback(
    server: LiveService, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    of_other_tests = server.answers_under_way()
    with connected(server) as connection:
        connection.send((b"GET /orquestracoes HTTP/1.1\r\nHost: x\r\n" + A_KEY + b"\r\n") * count)
        connection.end()
        connection.read_to_end()
    until(lambda: not server.answers_under_way() - of_other_tests, saying="the end of the last answer")
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_client_that_offers_another_protocol_is_answered_and_not_logged(
    server: LiveService, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(server) as connection:
        offer = b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        connection.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + offer)
        connection.end()
        assert connection.read_to_end().startswith(b"HTTP/1.1 200")
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


# -- too large ---------------------------------------------------------------------------------------------------------


class Attack(NamedTuple):
    """What is sent first, and what follows without an end."""

    opening: bytes
    more: bytes = MEGABYTE


TOO_LARGE = {
    "one header that never ends": Attack(GET + b"X: "),
    "headers without end": Attack(GET, b"a: b\r\n" * 10_000),
    "a header more than allowed": Attack(GET + b"a: b\r\n" * HEAD_FIELDS + b"\r\n", b""),
    "headers of a byte more than allowed": Attack(GET + b"X: " + b"a" * (HEAD_BYTES - len(GET)) + b"\r\n\r\n", b""),
    "a path that never ends": Attack(b"GET /"),
    "a trailer that never ends": Attack(CHUNKED + A_KEY + b"\r\n0\r\nX: "),
    "trailers without end": Attack(CHUNKED + A_KEY + b"\r\n0\r\n", b"a: b\r\n" * 10_000),
    "a trailer more than allowed": Attack(CHUNKED + A_KEY + b"\r\n0\r\n" + b"a: b\r\n" * (HEAD_FIELDS + 1), b"\r\n"),
    "a chunk extension that never ends": Attack(CHUNKED + A_KEY + b"\r\n1;x="),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    with live(tmp_path_factory.mktemp("api"), BOUNDED) as service:
        yield service


@pytest.mark.parametrize("attack", TOO_LARGE)
def test_what_is_too_large_gets_431_and_the_connection_is_closed(server: LiveService, attack: str) -> None:
    with connected(server) as connection:
        connection.send(TOO_LARGE[attack].opening)
        sent = connection.send_until_cut(TOO_LARGE[attack].more) if TOO_LARGE[attack].more else 0
        reply = connection.read_to_end()
    assert reply.startswith(b"HTTP/1.1 431 "), reply
    assert b"application/problem+json" in reply
    assert sent < 64 * 2**20, "it was read on and on"


WITHIN = {
    "as many headers as allowed": GET + b"a: b\r\n" * (HEAD_FIELDS - 1) + b"\r\n",
    "headers as large as allowed": GET + b"X: " + b"a" * (HEAD_BYTES - 200) + b"\r\n\r\n",
    "tiny chunks and small extensions": CHUNKED + A_KEY + b"\r\n" + b"1;a=b\r\n1\r\n" * 20_000 + b"0\r\nZ: z\r\n\r\n",
}


@pytest.mark.parametrize("request_", WITHIN)
def test_what_is_within_the_bounds_is_read(server: LiveService, request_: str) -> None:
    with connected(server) as connection:
        connection.send(WITHIN[request_])
        assert connection.status() == (422 if "chunks" in request_ else 200)


def test_lines_without_end_before_a_request_are_refused(server: LiveService) -> None:
    with connected(server) as connection:
        assert connection.send_until_cut(b"\r\n" * 10_000) < 64 * 2**20
        assert connection.status() in (400, 431)


def test_a_trailer_is_no_header(server: LiveService) -> None:
    """A key, an address or the mark of a webhook must be where a proxy looks for it."""
    with connected(server) as connection:
        connection.send(CHUNKED + b"\r\n0\r\n" + A_KEY + b"\r\n")
        assert connection.status() == 401


def test_a_pipelined_request_that_is_too_large_answers_no_other(server: LiveService) -> None:
    with connected(server) as connection:
        connection.send(GET + b"\r\n")
        assert connection.status() == 200
        connection.send(GET + b"\r\n" + GET + b"X: ")
        connection.send_until_cut(MEGABYTE)
        statuses = re.findall(rb"HTTP/1.1 (\d+)", connection.read_to_end())
    assert statuses[:1] != [b"431"], "it would be taken for the answer to the request before"


def test_a_request_that_was_answered_is_not_answered_again(server: LiveService) -> None:
    with connected(server) as connection:
        connection.send(CHUNKED + b"\r\n")
        assert connection.status() == 401
        connection.send(b"0\r\nX: ")
        connection.send_until_cut(MEGABYTE)
        assert b"HTTP/1.1" not in connection.read_to_end()


def test_no_key_is_needed_to_be_refused_and_none_helps(server: LiveService) -> None:
    for key in (b"", A_KEY):
        with connected(server) as connection:
            connection.send(b"GET /filas HTTP/1.1\r\nHost: x\r\n" + key + b"X: ")
            connection.send_until_cut(MEGABYTE)
            assert b" 431 " in connection.read_to_end()[:20]


# -- too slow ----------------------------------------------------------------------------------------------------------

TOO_SLOW: dict[str, tuple[bytes, bytes, bytes]] = {  # what is sent at first, then every moment; how the reply begins
    "silence": (b"", b"", b""),
    "a header in part": (GET, b"", b"HTTP/1.1 408 "),
    "a header by a byte now and then": (GET + b"X: ", b"a", b"HTTP/1.1 408 "),
    "silence after a request": (GET + b"\r\n", b"", b"HTTP/1.1 200 "),
    "a second header by a byte now and then": (GET + b"\r\n" + GET + b"X: ", b"a", b"HTTP/1.1 200 "),
    "a body that nobody reads, by a byte now and then": (
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n" + JSON + b"\r\n",
        b"a",
        b"HTTP/1.1 405 ",
    ),
    "empty lines now and then": (b"\r\n", b"\r\n", b"HTTP/1.1 40"),
}


@pytest.mark.parametrize("attack", TOO_SLOW)
def test_who_is_slow_is_cut_off(server: LiveService, attack: str) -> None:
    opening, drop, beginning = TOO_SLOW[attack]
    with connected(server) as connection:
        began = time.monotonic()
        connection.send(opening)
        reply = connection.drip_until_closed(drop)
        was_patient = time.monotonic() - began > KEEP_ALIVE / 2
    assert reply.startswith(beginning), reply
    assert bool(reply) == bool(beginning)
    assert was_patient


def test_who_waits_for_a_run_is_not_slow(server: LiveService) -> None:
    body = b'{"destinos": ["escavador_x"], "timeout": 1.5}'
    with connected(server) as connection:
        connection.send(b"POST /orquestracoes HTTP/1.1\r\nHost: x\r\nPrefer: wait=20\r\n" + A_KEY)
        connection.send(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert connection.status() == 200
        assert connection.seconds > HEADER_TIMEOUT + KEEP_ALIVE


# -- too many ----------------------------------------------------------------------------------------------------------


def test_silent_connections_keep_out_nobody(server: LiveService) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3 * MOST)]
    try:
        with connected(server) as connection:
            connection.send(GET + b"\r\n")
            assert connection.status() == 200
        silent[0].settimeout(10)
        assert silent[0].recv(1) == b"", "the oldest gave way"
    except ConnectionResetError:
        pass  # so it may say, too
    finally:
        for each in silent:
            each.close()


def test_a_client_with_as_many_requests_as_it_may_have_gets_429(server: LiveService) -> None:
    body = b'{"destinos": ["escavador_y"], "timeout": 60}'
    asked = b"POST /orquestracoes HTTP/1.1\r\nHost: x\r\nPrefer: wait=20\r\n" + A_KEY
    asked += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    waiting = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MOST)]
    try:
        for each in waiting:
            each.sendall(asked)
        until(lambda: _running(server) == MOST, saying="as many waiting requests")
        assert _status_of_one_more(server) == 429
    finally:
        for each in waiting:
            each.close()
    until(lambda: _status_of_one_more(server) == 200, saying="200 once they are gone")


def _running(server: LiveService) -> int:
    query = RunQuery(statuses=frozenset({RunStatus.RUNNING}))
    return len(server.do(server.service.operations.runs(query)).heads)


def _status_of_one_more(server: LiveService) -> int:
    with connected(server) as connection:
        connection.send(GET + b"\r\n")
        return connection.status()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::2:0:0:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_a_client_is_an_address_or_a_network_of_ipv6(one: str, other: str, same: bool) -> None:
    assert (client_of(one) == client_of(other)) is same


# -- uvicorn by itself -------------------------------------------------------------------------------------------------


def test_uvicorn_with_our_app_is_bounded_too(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "oraculo.main:app", "--port", "0", "--http", "h11"],
        cwd=tmp_path,
        env=environment(ORACULO_API_KEYS=KEY, ORACULO_LOG_FORMAT="console"),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        found = next(filter(None, (re.search(r"running on http://127.0.0.1:(\d+)", line) for line in server.stderr)))
        with Connection(int(found[1])) as connection:
            connection.send(GET + b"X: ")
            connection.send_until_cut(MEGABYTE)
            assert b" 431 " in connection.read_to_end()[:20]
    finally:
        server.terminate()
        server.communicate(timeout=30)


# -- a raw connection --------------------------------------------------------------------------------------------------


class Connection:
    """A client that sends bytes as they are, and keeps what comes back."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._began = time.monotonic()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def end(self) -> None:
        """Sends nothing more, and goes on reading."""
        self._socket.shutdown(socket.SHUT_WR)

    def send_until_cut(self, data: bytes) -> int:
        """Sends `data` again and again, at most 64 MB, and returns how many bytes went out before that failed."""
        sent = 0
        with suppress(ConnectionError):
            while sent < 64 * 2**20:
                self._socket.sendall(data)
                sent += len(data)
        return sent

    def drip_until_closed(self, drop: bytes) -> bytes:
        """Sends `drop` now and then until the server closes the connection, and returns what it wrote."""
        self._socket.settimeout(HEADER_TIMEOUT / 10)
        reply = b""
        while self.seconds < 10:
            try:
                if not (part := self._socket.recv(65536)):
                    return reply
                reply += part
            except TimeoutError:
                with suppress(ConnectionError):
                    self._socket.sendall(drop)
            except ConnectionError:
                return reply
        raise AssertionError(f"the connection is open after {self.seconds:.0f} s: {reply!r}")

    def status(self) -> int:
        """Of one reply, whose body is left out of account."""
        head = b""
        while b"\r\n" not in head:
            part = self._socket.recv(65536)
            assert part, head
            head += part
        return int(head.split()[1])

    def read_to_end(self) -> bytes:
        reply = b""
        while True:
            try:
                part = self._socket.recv(65536)
            except ConnectionError:
                return reply
            if not part:
                return reply
            reply += part


@contextmanager
def connected(server: LiveService) -> Iterator[Connection]:
    with Connection(server.port) as connection:
        yield connection
