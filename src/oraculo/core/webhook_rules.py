"""The hosts and addresses that a webhook may reach: global ones, and those that `ORACULO_WEBHOOK_ALLOW` names.

A request brings the URL of its webhook. Without this rule, anybody who may start a run could post to services inside
this machine or its network. `WebhookRules.host_fault` judges a host by its spelling, when the request comes.
`WebhookRules.address_fault` judges the address before a connection is made, and has the last word.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import unquote

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

LOOPBACK = ("localhost", "127.0.0.0/8", "::1")  # what `oraculo dev` allows
_SETTING = "ORACULO_WEBHOOK_ALLOW"

_GLOBAL_IPV6 = IPv6Network("2000::/3")
# Not global by IANA's registries, and global to some or all versions of Python. A cloud has its metadata in the first.
_NOT_GLOBAL = tuple(map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
# IPv6 networks whose addresses hold an IPv4 address that is connected to in the end, and the bits behind it.
_HOLD_IPV4 = (
    (IPv6Network("::ffff:0:0/96"), 0),  # IPv4-mapped
    (IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (IPv6Network("2002::/16"), 80),  # 6to4
)
_THIS_MACHINE = (IPv4Address("127.0.0.1"), IPv6Address("::1"))
_LOCALHOSTS = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_NUMBER = re.compile(r"(?P<hex>0x[0-9a-f]*)|(?P<octal>0[0-7]*)|(?P<decimal>[1-9][0-9]*)")


class WebhookRules:
    """The hosts and addresses that webhooks may reach, with those that the setting allows besides."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        entries = [_normal(entry) for entry in allowed]
        self._networks = [network for entry in entries if (network := _network_of(entry)) is not None]
        self._hosts = {entry for entry in entries if _network_of(entry) is None}

    def host_fault(self, host: str) -> str | None:
        """Return why the host of a URL is refused, or None where only its addresses can decide."""
        name = _normal(host)
        if (address := _address_of(name)) is not None:
            return self.address_fault(name, str(address))
        if name in self._hosts or not (name in _LOCALHOSTS or name.endswith(".localhost")):
            return None
        if any(address in network for address in _THIS_MACHINE for network in self._networks):
            return None
        return f"reaches this machine itself; webhooks may not, unless {_SETTING} names {name}"

    def address_fault(self, host: str, address: str) -> str | None:
        """Return why no connection is made to this address of the host, or None where it may be made."""
        written = ip_address(address.partition("%")[0])
        reached = _unwrapped(written)
        if _normal(host) in self._hosts or any(written in net or reached in net for net in self._networks):
            return None
        if _is_global(reached):
            return None
        return f"reaches the address {written}, which is not global; webhooks may not, unless {_SETTING} names it"


def allow_fault(entries: Sequence[str]) -> str | None:
    """Return the fault of the first entry that is not a host, address or network."""
    for entry in entries:
        name = _normal(entry)
        if _network_of(name) is None and (not _NAME.fullmatch(name) or _address_of(name) is not None):
            return f"has {entry!r}, which is no host, address or network, as hooks.example, 10.0.0.7 or 10.1.0.0/16"
    return None


def _normal(host: str) -> str:
    """Return the host as a resolver reads it: `LOCALHOST.` is localhost, and so is one with full-width letters."""
    plain = unicodedata.normalize("NFKC", unquote(host)).replace("\u3002", ".")
    return plain.strip("[]").rstrip(".").lower()


def _network_of(entry: str) -> Network | None:
    try:
        return ip_network(entry, strict=False)
    except ValueError:
        return None


def _address_of(host: str) -> Address | None:
    """Return the address that a host spells, also as 127.1, 0x7f000001, 017700000001 or 2130706433."""
    try:
        return ip_address(host.partition("%")[0])
    except ValueError:
        return _ipv4_in_parts(host)


def _ipv4_in_parts(host: str) -> IPv4Address | None:
    """Read one to four numbers as the C library does: decimal, octal or hexadecimal, the last one filling the rest."""
    numbers = [_number(part) for part in host.split(".")]
    if len(numbers) > 4 or None in numbers:
        return None
    *first, last = [number for number in numbers if number is not None]
    if any(number > 255 for number in first) or last >= 256 ** (4 - len(first)):
        return None
    return IPv4Address(sum(number << (24 - 8 * place) for place, number in enumerate(first)) + last)


def _number(part: str) -> int | None:
    found = _NUMBER.fullmatch(part)
    if found is None or len(part) > 20:
        return None
    if found["hex"]:
        return int(part[2:] or "0", 16)
    return int(part, 8 if found["octal"] else 10)


def _unwrapped(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, or the address itself."""
    for network, behind in _HOLD_IPV4:
        if address in network:
            return IPv4Address(int(address) >> behind & 0xFFFFFFFF)
    return address


def _is_global(address: Address) -> bool:
    if any(address in network for network in _NOT_GLOBAL):
        return False
    if isinstance(address, IPv6Address):
        return address in _GLOBAL_IPV6 and address.is_global
    return address.is_global and not address.is_multicast and not address.is_reserved
