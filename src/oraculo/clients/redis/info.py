"""The reply to INFO: what a server says about itself."""

from typing import Any


def read_info(reply: Any) -> dict[bytes, bytes]:
    """Return the fields of an INFO reply. Empty when the user may not ask."""
    lines = reply.split(b"\r\n") if isinstance(reply, bytes) else ()
    return {name: value for name, colon, value in (line.partition(b":") for line in lines) if colon}


def version_of(about: dict[bytes, bytes]) -> str:
    """Return the server's product and version."""
    redis = about.get(b"redis_version", b"of an unknown version").decode()
    if b"valkey_version" not in about:
        return f"Redis {redis}"
    return f"Valkey {about[b'valkey_version'].decode()} (speaks Redis {redis.rpartition('.')[0]})"
