"""Lists of URLs, URLs with several hosts, and URLs without their secrets.

`amqp://u:p@a:5672,b:5672/v,redis://c` names a cluster of two nodes, and a Redis after it.
"""

import re
from urllib.parse import parse_qsl, unquote

EMPTY = "has an empty URL or host in its list; they are separated by single commas"

_NEXT_URL = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_PARTS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^/?#]*)(.*)", re.DOTALL)
_SECRET_OPTION = re.compile("secret|pass|token|key|cred|sas|auth|signature", re.IGNORECASE)  # of a query
_TOKENS = ("nats://", "tls://")  # schemes where a user without a password is a secret token


def redacted(url: str) -> str:
    """Return the URL without password and query. A second `@` means an unencoded password: then only the scheme."""
    if not (parts := _PARTS.match(url)):
        return _path(url)
    scheme, authority, rest = parts.groups()
    who, at, hosts = authority.rpartition("@")
    if "@" in who or (authority and "@" in rest):
        return f"{scheme}***"
    user, colon, _ = who.partition(":")
    if user and not colon and scheme in _TOKENS:
        user = "***"
    return f"{scheme}{user}{colon and ':***'}{at}{hosts}{_path(rest)}"


def without_secrets(text: str, url: str) -> str:
    """Return a text that may quote the URL, without its password and the secret options of its query."""
    parts = _PARTS.match(url)
    if parts is None:
        return text
    who = parts[2].rpartition("@")[0] or parts[3].rpartition("@")[0]
    query = parse_qsl(url.partition("?")[2])
    secrets = [who.partition(":")[2], *(value for key, value in query if _SECRET_OPTION.search(key))]
    for secret in sorted({*secrets, *map(unquote, secrets)}, key=len, reverse=True):
        text = text.replace(secret, "***") if secret else text
    return text


def split_urls(text: str) -> tuple[str, ...]:
    """Split a list of URLs. A comma without a scheme after it separates the hosts of one URL."""
    return tuple(url for piece in _NEXT_URL.split(text) if (url := piece.strip()))


def list_fault(url: str) -> str | None:
    """Return the fault in the list of a URL's hosts, or None."""
    if not (parts := _PARTS.match(url)):
        return None
    who = parts[2].rpartition("@")[0]
    if "@" in who and "," in who:
        return (
            "has a user or password for each host, or an '@' or ',' in a password: write one login, before the first "
            "host (amqp://user:password@a,b), and %40, %2C in a password"
        )
    if "," in _path(parts[3]):
        return (
            "has a comma behind the path, where hosts stand together before it (amqp://a,b/vhost) and one in a vhost "
            "or a password is written %2C"
        )
    hosts = hosts_of(url)
    return None if len(hosts) == 1 or all(hosts) else EMPTY


def hosts_of(url: str) -> list[str]:
    """Return the hosts with their ports, as written; one empty host when the URL names none."""
    parts = _PARTS.match(url)
    return [host.strip() for host in parts[2].rpartition("@")[2].split(",")] if parts else [""]


def node_urls(url: str) -> tuple[str, ...]:
    """Return the same URL for each of its hosts."""
    if not (parts := _PARTS.match(url)):
        return (url,)
    who, at, _ = parts[2].rpartition("@")
    return tuple(f"{parts[1]}{who}{at}{host}{parts[3]}" for host in hosts_of(url))


def _path(rest: str) -> str:
    return re.split("[?#]", rest, maxsplit=1)[0]
