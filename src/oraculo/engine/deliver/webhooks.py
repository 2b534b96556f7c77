"""Posts aggregates to webhooks, signed as Standard Webhooks says."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from http.cookiejar import CookieJar, DefaultCookiePolicy
from ipaddress import ip_address
from string import punctuation
from typing import Any, NamedTuple
from urllib.parse import quote
from urllib.request import getproxies, proxy_bypass

import httpx2
from standardwebhooks import Webhook

from oraculo import __version__
from oraculo.core.webhook_rules import WebhookRules
from oraculo.engine.deliver.addresses import Addresses
from oraculo.ports.clock import Clock
from oraculo.settings import WebhookSettings
from oraculo.wire.timestamps import in_words

ID_HEADER = "webhook-id"
_AGENT = {"user-agent": f"oraculo/{__version__}"}
_LEAST_TO_CONNECT = 1.0  # seconds for each address of a host, however many there are
_MOST_INFORMED = 16  # informational answers before the final one
_MOST_READ = 128 * 1024  # bytes of an answer: its status and headers
_PIECE = 4 * 1024  # bytes of one read
_INFORMATIONAL = re.compile(rb"^HTTP/\d\.\d 1\d\d", re.MULTILINE)
_FINAL = re.compile(rb"^HTTP/\d\.\d [2-9]\d\d", re.MULTILINE)
_PLAIN = punctuation.replace("%", "")  # allowed unencoded, besides the letters and digits that quote() keeps
_NEEDS_SOCKS = "a SOCKS proxy needs pip install socksio"
_UNREADABLE_PROXY = (  # the error itself may quote a part of the password
    "its URL cannot be read; it begins with http://, https:// or socks5://, "
    "and '/', '#' and '?' in a password are written %2F, %23 and %3F"
)

Post = Callable[[str, bytes, dict[str, str]], Awaitable[int]]


class NotPosted(Exception):
    """An attempt that failed, in words for people."""


class NotReached(NotPosted):
    """A receiver that cannot be reached, which holds for all its webhooks."""


class TargetRefused(NotPosted):
    """A target that no connection may be made to, so that another attempt would be refused too."""


def is_away(error: Exception) -> bool:
    """Return whether an error shows that the receiver is away.

    A receiver that is silent or hangs up is there. One path alone may do that, and takes only its own time.
    """
    return isinstance(error, (NotReached, httpx2.ConnectError, httpx2.ProxyError))


class Webhooks:
    """The sender of aggregates to webhooks."""

    def __init__(self, post: Post, secret: str, clock: Clock) -> None:
        self._post = post
        self._signer = Webhook(secret) if secret else None
        self._clock = clock

    async def send(self, run_id: str, url: str, edition: int, aggregate: bytes) -> None:
        status = await self._post(url, aggregate, self._headers(run_id, edition, aggregate))
        if not 200 <= status < 300:
            raise NotPosted(f"answered {status}; a 2xx is awaited")

    def _headers(self, run_id: str, edition: int, aggregate: bytes) -> dict[str, str]:
        """Return the headers. All attempts of one edition have the same id, so that the receiver can tell a repeat."""
        message_id = _header_value(f"{run_id}.{edition}")
        moment = datetime.fromtimestamp(self._clock.now(), UTC)
        headers = {
            "content-type": "application/json",
            ID_HEADER: message_id,
            "webhook-timestamp": str(int(moment.timestamp())),
        }
        if self._signer is not None:
            headers["webhook-signature"] = self._signer.sign(message_id, moment, aggregate.decode())
        return headers


def _header_value(text: str) -> str:
    """Return a text percent-encoded, except for visible ASCII characters.

    HTTP allows no control characters and no spaces at the ends. Proxies may change other spaces, which would break the
    signature.
    """
    return quote(text, safe=_PLAIN)


class _Place(NamedTuple):
    """The URL of a request, and what the request must say when an address replaces the name of the host."""

    url: httpx2.URL
    headers: dict[str, str]
    extensions: dict[str, Any]


class HttpPost:
    """The HTTP client for webhooks: posts, and returns the status.

    It does not read the body of the answer. A receiver that drips it would hold the attempt for ever.
    """

    def __init__(self, settings: WebhookSettings) -> None:
        self._seconds = settings.timeout
        self._concurrency = settings.concurrency
        self._addresses = Addresses()
        self._targets = WebhookRules(settings.allow)
        self._opening = asyncio.Lock()
        self._clients: dict[bool, httpx2.AsyncClient] = {}  # by whether a proxy is used

    async def __call__(self, url: str, body: bytes, headers: dict[str, str]) -> int:
        late, target = "its name was not resolved", httpx2.URL(url)
        try:
            async with asyncio.timeout(self._seconds):
                self._expect_allowed_host(target)
                is_proxied = self._is_proxied(target)
                places = [_Place(target, {}, {})] if is_proxied else await self._places(target)
                late = "no answer"
                return await self._post(await self._client(is_proxied=is_proxied), places, body, headers)
        except httpx2.ConnectError:
            self._addresses.forget(target.raw_host.decode())
            raise
        except (TimeoutError, httpx2.TimeoutException):
            self._addresses.forget(target.raw_host.decode())
            raise NotPosted(f"{late} in {in_words(self._seconds)}") from None

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    @cached_property
    def _proxies(self) -> frozenset[str]:
        """The schemes that have a proxy.

        They are read once, because reading the environment is slow, and a client keeps its proxies anyway.
        """
        return frozenset(getproxies())

    def _is_proxied(self, url: httpx2.URL) -> bool:
        is_named = url.scheme in self._proxies or "all" in self._proxies
        return is_named and not _is_this_machine(url.host) and not proxy_bypass(url.host)

    def _expect_allowed_host(self, url: httpx2.URL) -> None:
        """Raise TargetRefused for a forbidden address in the URL itself, also where a proxy would connect.

        A name that a proxy looks up is the proxy's to refuse.
        """
        if fault := self._targets.host_fault(url.raw_host.decode()):
            raise TargetRefused(fault)

    async def _places(self, url: httpx2.URL) -> Sequence[_Place]:
        """Return the addresses to connect to. An address in the URL needs no lookup.

        The connection goes to the address that was checked, so that a name that changes its address in between gains
        nothing.
        """
        host = url.raw_host.decode()
        if _is_address(host):
            return [_Place(url, {}, {})]
        try:
            addresses = await self._addresses.of(host)
        except OSError as error:
            raise NotReached(f"its name was not resolved: {error.strerror or error}") from None
        faults = [self._targets.address_fault(host, address) for address in addresses]
        if all(faults):
            raise TargetRefused(faults[0])
        named = {"host": url.netloc.decode()}
        return [
            _Place(url.copy_with(host=address), named, {"sni_hostname": host})
            for address, fault in zip(addresses, faults, strict=True)
            if fault is None
        ]

    async def _post(
        self, client: httpx2.AsyncClient, places: Sequence[_Place], body: bytes, headers: dict[str, str]
    ) -> int:
        """Post to the first address that can be reached."""
        timeout = httpx2.Timeout(self._seconds, connect=max(self._seconds / len(places), _LEAST_TO_CONNECT))
        for place in places:
            try:
                async with client.stream(
                    "POST",
                    place.url,
                    content=body,
                    headers=headers | place.headers,
                    extensions=place.extensions | {"trace": _bound_answers},
                    timeout=timeout,
                ) as response:
                    return response.status_code
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                if place is places[-1]:
                    raise
        raise AssertionError("a host that was found has an address")

    async def _client(self, *, is_proxied: bool) -> httpx2.AsyncClient:
        """Return the client, made when it is first needed.

        An unusable proxy thus harms nobody without webhooks. It is made in a thread, because reading all certificates
        takes a while. It keeps no connection open, because a certificate was checked for a name, not for an address.
        """
        async with self._opening:
            if is_proxied not in self._clients:
                make = _proxied_client if is_proxied else _direct_client
                limits = httpx2.Limits(max_connections=self._concurrency, max_keepalive_connections=0)
                try:
                    self._clients[is_proxied] = await asyncio.to_thread(make, limits)
                except (ImportError, ValueError, httpx2.InvalidURL) as error:
                    needs = _NEEDS_SOCKS if isinstance(error, ImportError) else _UNREADABLE_PROXY
                    raise NotReached(f"the proxy that the environment names cannot be used: {needs}") from None
        return self._clients[is_proxied]


class _Answer:
    """The limited reader of one connection.

    The HTTP library skips informational answers such as `103` without a pause. A stream of them would block the event
    loop.
    """

    def __init__(self, read: Callable[..., Awaitable[bytes]]) -> None:
        self._read = read
        self._bytes = 0
        self._informed = 0
        self._has_come = False  # the final answer, whose body nobody reads

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._read(min(max_bytes, _PIECE), timeout)
        self._bytes += len(data)
        if not self._has_come:
            final = _FINAL.search(data)
            self._has_come = final is not None
            self._informed += len(_INFORMATIONAL.findall(data, 0, final.start() if final else len(data)))
        if self._informed > _MOST_INFORMED:
            raise NotPosted(f"sent more than {_MOST_INFORMED} informational answers (1xx) before any other")
        if self._bytes > _MOST_READ:
            raise NotPosted(f"sent more than {_MOST_READ // 1024} kB without a status and its headers")
        return data


async def _bound_answers(event: str, info: Mapping[str, Any]) -> None:
    """Limit the reader of each connection that a traced request opens, with and without TLS."""
    if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
        stream = info["return_value"]
        stream.read = _Answer(stream.read).read


def _proxied_client(limits: httpx2.Limits) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(headers=_AGENT, cookies=_no_cookies(), limits=limits)


def _direct_client(limits: httpx2.Limits) -> httpx2.AsyncClient:
    """Return a client with a transport of its own, which takes no proxy from the environment.

    NO_PROXY has names of hosts, and would not know their addresses.
    """
    transport = httpx2.AsyncHTTPTransport(limits=limits)
    return httpx2.AsyncClient(headers=_AGENT, cookies=_no_cookies(), transport=transport)


def _no_cookies() -> CookieJar:
    """Return a jar that keeps nothing, because a cookie would go from one run to another."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=()))


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_this_machine(host: str) -> bool:
    """Return whether a host is this machine, which a proxy would look for on its own side."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)
