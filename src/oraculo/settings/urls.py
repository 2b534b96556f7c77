"""Lists of URLs, and URLs with several hosts: `amqp://u:p@a:5672,b:5672/v,redis://c` is a cluster of two nodes, and a
Redis after it."""

import re

_NEXT_URL = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_PARTS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^/?#]*)(.*)", re.DOTALL)


def split_urls(text: str) -> tuple[str, ...]:
    """A comma that no scheme follows parts the hosts of one URL."""
    return tuple(url for piece in _NEXT_URL.split(text) if (url := piece.strip()))


def hosts_of(url: str) -> list[str]:
    """With their ports, as they are written; one that is empty when the URL names none."""
    parts = _PARTS.match(url)
    return [host.strip() for host in parts[2].rpartition("@")[2].split(",")] if parts else [""]


def node_urls(url: str) -> tuple[str, ...]:
    """The same URL for each of its hosts."""
    if not (parts := _PARTS.match(url)):
        return (url,)
    who, at, _ = parts[2].rpartition("@")
    return tuple(f"{parts[1]}{who}{at}{host}{parts[3]}" for host in hosts_of(url))
