"""Checks of values that a type cannot express: URLs, secrets, routes. Each returns the fault, or None."""

import base64
import binascii
import difflib
import re
from collections.abc import Sequence
from ipaddress import ip_network
from urllib.parse import urlsplit

from oraculo.pipeline.bridges import destination_fault
from oraculo.settings.urls import EMPTY, hosts_of, list_fault, node_urls, split_urls
from oraculo.wire.naming import queue_fault, shown

BROKER_SCHEMES = ("memory", "amqp", "amqps", "redis", "rediss", "nats", "tls")
CLUSTER_SCHEMES = ("amqp", "amqps", "nats", "tls")  # those whose URL may name several hosts
STORE_SCHEMES = ("sqlite", "postgresql", "postgres", "redis", "rediss", "mongodb", "mongodb+srv")

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ENCODED = "a ':', '@', '/', '?' or '#' in a password is written %3A, %40, %2F, %3F, %23"


def broker_url_fault(urls: str) -> str | None:
    if not (found := split_urls(urls)) or urls.lstrip().startswith(","):
        return EMPTY
    return next((fault for url in found if (fault := _one_broker_fault(url))), None)


def _one_broker_fault(url: str) -> str | None:
    if fault := _scheme_fault(url, BROKER_SCHEMES) or list_fault(url):
        return fault
    scheme = url.partition("://")[0]
    if len(hosts_of(url)) > 1 and scheme not in CLUSTER_SCHEMES:
        return f"names several hosts for {scheme}://; only those of {_listed(CLUSTER_SCHEMES)} may be one cluster"
    return next((fault for node in node_urls(url) if (fault := _port_fault(node))), None)


def store_url_fault(url: str) -> str | None:
    if fault := _scheme_fault(url, STORE_SCHEMES):
        return fault
    if url.startswith("sqlite:") and not url.removeprefix("sqlite:///").strip("/").removeprefix("sqlite:"):
        return "names no file; as sqlite:///oraculo.db, or sqlite:////var/lib/oraculo.db for an absolute path"
    if url.startswith("sqlite:") and not url.startswith("sqlite:///"):
        return "needs three slashes before the path; as sqlite:///oraculo.db"
    return None if url.startswith("sqlite:") else _server_fault(url)


def objects_url_fault(url: str) -> str | None:
    """Return the fault of a folder or fsspec URL. Installed packages decide which schemes exist."""
    if url.startswith("file:") and not url.startswith("file:///"):
        return "needs three slashes before an absolute path, as file:///var/lib/oraculo/objects; or write ./objects"
    scheme, mark, rest = url.partition("://")
    if mark and (not scheme or not rest.strip("/")) and not url.startswith("memory:"):
        return "names no place; as ./objects, file:///var/lib/oraculo/objects or s3://bucket/prefix"
    return None


def _scheme_fault(url: str, allowed: Sequence[str]) -> str | None:
    right = f" Use one of {_listed(allowed)}"
    if not (found := _SCHEME.match(url)):
        return f"has a URL without a scheme.{right}"
    if found[1] in allowed:
        return None
    close = difflib.get_close_matches(found[1].lower(), allowed, n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]}://?" if close else "."
    return f"has the unknown scheme {found[1]}://{hint}{right}"


def _listed(schemes: Sequence[str]) -> str:
    return ", ".join(f"{scheme}://" for scheme in schemes)


def _server_fault(url: str) -> str | None:
    """Return the fault of a URL that a client would quote in an error, perhaps with half a password.

    MongoDB's client accepts a '#' in a password, that of Redis an '@'.
    """
    if url.startswith("mongodb"):
        url = url.replace("#", "")
    nodes = node_urls(url)
    if fault := next((fault for node in nodes if (fault := _port_fault(node))), None):
        return fault
    parts = urlsplit(nodes[0])
    who, login, _ = parts.netloc.rpartition("@")
    no_options = [word for word in parts.query.split("&") if "=" not in word]
    is_behind = not login and "@" in "".join([parts.path, parts.fragment, *no_options])
    if is_behind or (url.startswith("postgres") and "@" in who):
        return f"has an '@' where none can be; {_ENCODED}"
    return None


def _port_fault(url: str) -> str | None:
    try:
        urlsplit(url).port  # noqa: B018 - reading it is the check
    except ValueError:
        return f"has a port that is not a number from 0 to 65535, or an IPv6 address without its ']'; {_ENCODED}"
    return None


def secret_fault(secret: str) -> str | None:
    """Return the fault of a webhook secret. An empty one is none: webhooks go out unsigned."""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if secret and not key:
        return "must be base64 behind `whsec_`; make one with: echo whsec_$(openssl rand -base64 24)"
    return None


def proxies_fault(entries: Sequence[str]) -> str | None:
    """Return the fault of the first entry that is no address or network."""
    for entry in entries:
        try:
            ip_network(entry, strict=False)
        except ValueError:
            return f"has {entry!r}, which is no address or network, as 10.0.0.7 or 10.1.0.0/16"
    return None


def bullmq_queues_fault(queues: Sequence[str]) -> str | None:
    faults = ((queue, queue_fault(queue)) for queue in queues)
    return next((f"queue {shown(queue)}: {fault}" for queue, fault in faults if fault), None)


def bullmq_name_fault(name: str) -> str | None:
    """Return the fault of a name with a colon, which separates the parts of BullMQ's keys."""
    return f"must have no ':', which BullMQ allows in no queue's name; got {shown(name)}" if ":" in name else None


def route_fault(destinations: Sequence[str]) -> str | None:
    if not destinations:
        return "must name at least one destination"
    if len(set(destinations)) < len(destinations):
        return f"names '{next(one for one in destinations if destinations.count(one) > 1)}' more than once"
    faults = ((one, destination_fault(one)) for one in destinations)
    return next((f"destination {shown(one)}: {fault}" for one, fault in faults if fault), None)
