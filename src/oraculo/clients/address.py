"""The URL of a server: where the server is, who logs in, and how TLS is done.

Every adapter reads its URL here, so that a URL means the same for each. In `user:password@`, odd characters are
percent-encoded. The TLS parameters are `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` and `ssl_check_hostname`.
"""

import re
import ssl
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from oraculo.errors import Fault, InvalidSettings
from oraculo.settings.urls import node_urls

_TLS_SCHEMES = frozenset({"amqps", "rediss", "tls"})
_TLS_PARAMETERS = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"})
_HOST = re.compile(r"(?:[\w.:%~-]|[^\x00-\x7f\s])*")  # a name in any script, or an IP address, perhaps with a zone
_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Host(NamedTuple):
    """One host and port of a URL."""

    name: str
    port: int


class Address(NamedTuple):
    """A URL that was read and found valid."""

    scheme: str
    host: str  # the host to connect to
    port: int
    user: str | None
    password: str | None
    path: str  # still percent-encoded, without the leading slash
    parameters: dict[str, str]  # of the query, except those for TLS
    tls: ssl.SSLContext | None
    setting: str  # the setting that holds the URL, for errors
    hosts: tuple[Host, ...]  # every host in the URL: the nodes of one cluster

    def __str__(self) -> str:
        """Return the URL without its password, for logs."""
        return f"{self.scheme}://{','.join(map(_place, self.hosts))}"

    @property
    def place(self) -> str:
        """Return host and port, as they stand in a URL."""
        return _place(Host(self.host, self.port))

    def turned(self, number: int) -> "Address":
        """Return the same address with another of its hosts, counted in a circle."""
        name, port = self.hosts[number % len(self.hosts)]
        return self._replace(host=name, port=port)


def _place(host: Host) -> str:
    return f"[{host.name}]:{host.port}" if ":" in host.name else f"{host.name}:{host.port}"


def read_address(
    url: str, setting: str, *, port: int, known: frozenset[str] = frozenset(), is_cluster: bool = False
) -> Address:
    """Read a URL. Raises InvalidSettings, which names the `setting` that holds the URL.

    `port` is the default. `known` are the parameters that the adapter understands. `is_cluster` allows several hosts.
    """
    each = [_split(node, setting) for node in node_urls(url)]
    hosts = tuple(Host(parts.hostname or "localhost", number or port) for parts, number in each)
    parts = each[0][0]
    if len(hosts) > 1 and not is_cluster:
        raise _fault(parts, setting, "is followed by other hosts, and takes one")
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    tls = {name: parameters.pop(name) for name in _TLS_PARAMETERS if name in parameters}
    unknown = sorted(parameters.keys() - known)
    if "@" not in parts.netloc and ("@" in parts.path + parts.fragment or (unknown and "@" in parts.query)):
        raise _unreadable(url, setting)  # an unencoded password looks like a host, a path or a parameter
    if unknown:
        right = ", ".join(sorted(known | _TLS_PARAMETERS))
        raise _fault(parts, setting, f"has the unknown parameter '{unknown[0]}'; known: {right}")
    if tls and parts.scheme not in _TLS_SCHEMES:
        problem = f"has {sorted(tls)[0]} but no TLS; write {', '.join(sorted(_TLS_SCHEMES))}:// for that"
        raise _fault(parts, setting, problem)
    return Address(
        parts.scheme,
        *hosts[0],
        unquote(parts.username) if parts.username is not None else None,
        unquote(parts.password) if parts.password is not None else None,
        parts.path.removeprefix("/"),
        parameters,
        _context(parts, setting, tls) if parts.scheme in _TLS_SCHEMES else None,
        setting,
        hosts,
    )


def _split(url: str, setting: str) -> tuple[SplitResult, int | None]:
    """Return the parts of a URL and its port. Python's own errors are replaced: they may quote half a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _unreadable(url, setting) from None
    if port == 0:
        raise _unreadable(url, setting)
    if not _HOST.fullmatch(parts.hostname or ""):
        odd = "has a host with a ';', a blank or another character that no host has; several URLs have commas between"
        raise InvalidSettings(Fault(setting, f"the {parts.scheme}:// URL {odd}"))
    return parts, port


def _unreadable(url: str, setting: str) -> InvalidSettings:
    """Return an error that quotes only the scheme of the URL, because the rest may hold a password."""
    scheme = url.partition("://")[0] if "://" in url else ""
    odd = "the user or the password has a '/', '?', '#' or '[' that is not percent-encoded"
    problem = f"the {scheme}:// URL cannot be read: its port is not a number from 1 to 65535, or {odd}"
    return InvalidSettings(Fault(setting, problem))


def _context(parts: SplitResult, setting: str, tls: dict[str, str]) -> ssl.SSLContext:
    """Return the TLS settings. Certificates are always verified; only the check of their name can be turned off."""
    check = _TRUTHS.get(tls.get("ssl_check_hostname", "true").lower())
    if check is None:
        raise _fault(parts, setting, "ssl_check_hostname must be true or false")
    if "ssl_keyfile" in tls and "ssl_certfile" not in tls:
        raise _fault(parts, setting, "has ssl_keyfile, which is the key of an ssl_certfile, and has none")
    try:
        context = ssl.create_default_context(cafile=tls.get("ssl_ca_certs"))
        if "ssl_certfile" in tls:
            context.load_cert_chain(tls["ssl_certfile"], tls.get("ssl_keyfile"))
    except (OSError, ssl.SSLError) as error:
        raise _fault(parts, setting, f"names a certificate that cannot be read: {error}") from error
    context.check_hostname = check
    return context


def _fault(parts: SplitResult, setting: str, what: str) -> InvalidSettings:
    return InvalidSettings(Fault(setting, f"{parts.scheme}://{parts.hostname or ''} {what}"))
