"""Names that have several addresses, and an address that says nothing."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from oraculo.clients import dialing

NAME = "several.test"


@contextmanager
def silent_address(host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[str, int]]:
    """Whoever connects is not even refused: as many wait to be accepted as may."""
    with socket.create_server((host, port), backlog=0) as server, socket.create_connection(server.getsockname()):
        yield server.getsockname()


def give_addresses(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[str, int]) -> None:
    """To the name, in this order, while the loop that runs now does."""
    loop = asyncio.get_running_loop()
    resolve = loop.getaddrinfo

    async def resolved(host: Any, port: Any, **wanted: Any) -> Any:
        if host != NAME:
            return await resolve(host, port, **wanted)
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address) for address in addresses]

    monkeypatch.setattr(loop, "getaddrinfo", resolved)  # for clients that ask the event loop

    look_up = dialing.looked_up

    async def looked_up(host: str, port: int) -> Any:
        return await (resolved(host, port) if host == NAME else look_up(host, port))

    monkeypatch.setattr(dialing, "looked_up", looked_up)
