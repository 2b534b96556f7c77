"""Reaching a server by a name that has several addresses, of which one may say nothing, as where IPv6 leads nowhere.

Tried in their order, that one would take all the time that there is, at every attempt. So the next has its turn a
moment later, beside it, and the first that answers is taken. asyncio offers the same; uvloop does not.
"""

import asyncio
import socket
from asyncio.staggered import staggered_race
from contextlib import ExitStack
from functools import partial
from typing import Any

_HEAD_START = 0.25  # seconds that each has before the next; RFC 8305 recommends as many


async def dialed(host: str, port: int) -> socket.socket:
    """Connected. It waits for ever: the caller sets the limit. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    with ExitStack() as given_up:
        attempts = [partial(_connected, kind, address, given_up) for *kind, _, address in found]
        winner, _, troubles = await staggered_race(attempts, _HEAD_START)
        given_up.pop_all()  # else it was cancelled, perhaps when there was a winner
    if isinstance(winner, socket.socket):
        return winner
    raise next(filter(None, troubles))  # the resolver puts those first that are most likely to work


async def _connected(kind: list[int], address: Any, given_up: ExitStack) -> socket.socket:
    """`kind`: family, type and protocol; asyncio sends without delay on what is known to be TCP."""
    sock = socket.socket(*kind)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return given_up.enter_context(sock)
