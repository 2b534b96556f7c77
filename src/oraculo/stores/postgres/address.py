"""The address of the server. asyncpg reads the URL as libpq does, and this file tries its hosts one by one.

Each host gets a part of the time, so that a silent one leaves some to the others.
"""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlencode

import asyncpg

from oraculo.errors import StoreError, StoreRefuses, StoreUnavailable
from oraculo.settings.urls import hosts_of, node_urls, redacted
from oraculo.stores.postgres.faults import translated

OLDEST_SERVER = 13
_FILES = ("sslrootcert", "sslcrl", "sslcert", "sslkey")

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"  # generic only for the type checker


class Address:
    """One server, or several of which one is the primary."""

    def __init__(self, url: str, *, connect_timeout: float, call_timeout: float) -> None:
        self._hosts = _each_host(url)  # the one that worked last is first
        self._connect_timeout = connect_timeout
        self.call_timeout = call_timeout
        self.place = place_of(url)
        self._took_us = False
        self._turns = Counter[str]()  # host -> how many of its addresses were silent

    @property
    def first(self) -> str:
        """Return the host that is tried first: after `connect`, the one that accepted."""
        return self._hosts[0]

    def pass_by(self, host: str) -> None:
        """Try this host last from now on: it accepts connections and no writes, as a standby does."""
        if host == self.first:
            self._hosts = [*self._hosts[1:], host]

    async def connect(self, session: str) -> Connection:
        """Return a connection. Raises StoreUnavailable with the trouble of each host.

        Raises StoreError when no host ever accepted and no host will. A host that accepted once may do so again,
        whatever is wrong now: its certificate, or a file of ours.
        """
        ends = asyncio.get_running_loop().time() + self._connect_timeout
        troubles: dict[str, StoreError] = {}
        connection = await self._tried(self._hosts, session, ends, troubles)
        silent = [host for host, trouble in troubles.items() if isinstance(trouble.__cause__, TimeoutError)]
        if connection is None and 0 < len(silent) < len(troubles):  # the others left some of their time
            connection = await self._tried(silent, session, ends, troubles)
        if connection is None:
            raise _together(list(troubles.values()), may_pass=self._took_us)
        return connection

    async def _tried(
        self, hosts: list[str], session: str, ends: float, troubles: dict[str, StoreError]
    ) -> "Connection | None":
        for number, host in enumerate(hosts):
            seconds = (ends - asyncio.get_running_loop().time()) / (len(hosts) - number)
            turn = self._turns[host]
            try:
                connection = await _connect(host, session, seconds, turn)
            except StoreError as trouble:
                troubles[host] = trouble
                was_silent = isinstance(trouble.__cause__, TimeoutError)  # asyncpg itself skips an address that refuses
                self._turns[host] = turn + 1 if was_silent else 0  # counted once, even if several callers tried it
            else:
                self._hosts = [host, *(other for other in self._hosts if other != host)]
                self._took_us = True
                return connection
        return None


def version_of(connection: Connection) -> str:
    return f"PostgreSQL {connection.get_settings().server_version}"


def place_of(url: str) -> str:
    """Return `host:port/database` without any part of the password, even of one that is not percent-encoded."""
    host, slash, database = redacted(url).partition("://")[2].rpartition("@")[2].partition("/")
    return f"{unquote(host) or ':'.join(_host_in_query(url)) or 'localhost'}{slash}{database}"


# -- the hosts -------------------------------------------------------------------------------------------------------


def _each_host(url: str) -> list[str]:
    """Return the URL once for each of its hosts, which are before the path or in the query."""
    if "," in os.environ.get("PGPORT", ""):  # asyncpg pairs hosts and ports
        return [url]
    if any(hosts_of(url)):
        return list(node_urls(url))
    host, *port = _host_in_query(url) or [""]
    hosts, ports = host.split(","), ",".join(port).split(",")
    if len(hosts) == 1 or len(ports) not in (1, len(hosts)):
        return [url]
    each = zip(hosts, ports * (len(hosts) // len(ports)), strict=True)
    return [_with_parameters(url, host=host, port=port) for host, port in each]


def _host_in_query(url: str) -> list[str]:
    """Return the host in the query, with its port if the query has one."""
    parameters = _parameters(url)
    return [parameters[name] for name in ("host", "port") if name in parameters and "host" in parameters]


def _parameters(url: str) -> dict[str, str]:
    return dict(parse_qsl(url.partition("#")[0].partition("?")[2]))


def _with_parameters(url: str, **parameters: str) -> str:
    return f"{url.partition('?')[0]}?{urlencode(_parameters(url) | parameters)}"


def _together(troubles: list[StoreError], *, may_pass: bool) -> StoreError:
    if len(troubles) == 1 and (isinstance(troubles[0], StoreUnavailable) or not may_pass):
        return troubles[0]
    reasons = "; ".join(map(str, troubles))
    if all(isinstance(trouble, StoreRefuses) for trouble in troubles):
        return StoreRefuses(reasons)
    may_pass = may_pass or any(isinstance(trouble, StoreUnavailable) for trouble in troubles)
    return StoreUnavailable(reasons) if may_pass else StoreError(reasons)


# -- one of them -----------------------------------------------------------------------------------------------------


async def _connect(url: str, session: str, seconds: float, turn: int) -> Connection:
    place = place_of(url)
    with translated(place):
        async with asyncio.timeout(seconds):
            with _clearer_errors(url, place):
                where = await _where(url, turn)
                connection: Connection = await asyncpg.connect(url, server_settings=_server_settings(url), **where)
            try:
                _refuse_unfit(connection, place)
                await connection.execute(session)
            except BaseException:
                connection.terminate()
                raise
    return connection


async def _where(url: str, turn: int) -> dict[str, Any]:
    """Return the address to connect to.

    After a failure by name, each address of the host gets its turn. asyncpg always begins with the first, and a silent
    one would take all the time. A certificate that must match the name needs the name.
    """
    first, *others = hosts_of(url)
    name, _, port = unquote(first).partition(":")
    mode = _parameters(url).get("sslmode") or os.environ.get("PGSSLMODE")
    if not turn or others or not name or name[0] in "/[" or mode == "verify-full":
        return {}
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = sorted({address[0] for *_, address in found})  # sorted, because a resolver may rotate them
    number = turn % (len(addresses) + 1)
    if len(addresses) == 1 or number == 0:
        return {}
    return {"host": addresses[number - 1], "port": int(port) if port else None}


def _server_settings(url: str) -> dict[str, str]:
    return {} if "application_name=" in url else {"application_name": "oraculo"}


@contextmanager
def _clearer_errors(url: str, place: str) -> Iterator[None]:
    """Raise errors that name the file that is missing, and that quote no part of a URL."""
    try:
        yield
    except asyncpg.TargetServerAttributeNotMatched as error:
        raise StoreUnavailable(f"PostgreSQL at {place} is not what target_session_attrs asks for") from error
    except (FileNotFoundError, PermissionError) as error:
        raise StoreUnavailable(f"PostgreSQL at {place}: {error.strerror}{_unread_file(url)}") from error
    except ValueError as error:
        if isinstance(error, asyncpg.InterfaceError | OSError):  # a bad option or certificate
            raise
        raise StoreError(
            f"the URL of PostgreSQL at {place} cannot be read; what is odd in a password must be percent-encoded"
        ) from None


def _unread_file(url: str) -> str:
    """Return the first file that cannot be read, of those in the URL and in libpq's variables."""
    given = _parameters(url)
    files = [given.get(name) or os.environ.get(f"PG{name.upper()}") for name in _FILES]
    if unread := [file for file in files if file and not os.access(file, os.R_OK)]:
        return f": {unread[0]}"
    host, _, port = unquote(hosts_of(url)[0] or ":".join(_host_in_query(url))).partition(":")
    if not host.startswith("/"):
        return ""
    return f": {host}" if ".s.PGSQL." in host else f": {host}/.s.PGSQL.{port or 5432}"


def _refuse_unfit(connection: Connection, place: str) -> None:
    if connection.get_server_version().major < OLDEST_SERVER:
        raise StoreError(f"{version_of(connection)} is at {place}; {OLDEST_SERVER} or newer is needed")
    encoding = connection.get_settings().server_encoding
    if encoding != "UTF8":
        raise StoreError(
            f"the database at {place} is encoded in {encoding}, which cannot hold every text: "
            "make one with ENCODING 'UTF8'"
        )
