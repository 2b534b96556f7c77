"""Connecting to a host name that has several addresses, one of which may never answer.

Trying the addresses one after the other would spend the whole timeout on a dead one, for example where IPv6 leads
nowhere. So the next address is tried a moment later, in parallel, and the first that answers wins. asyncio can do this;
uvloop cannot.

A lookup that a name server leaves unanswered blocks its thread. The event loop has few threads, so lookups of one dead
name would block all others. So each lookup gets a thread of its own.
"""

import asyncio
import socket
from asyncio.staggered import staggered_race
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from threading import Thread
from typing import Any

_HEAD_START = 0.25  # seconds between two attempts, as RFC 8305 recommends

_Found = Sequence[tuple[Any, ...]]  # the result of socket.getaddrinfo


async def dialed(host: str, port: int) -> socket.socket:
    """Return a connected socket. Waits forever: the caller sets the limit. Raises OSError."""
    found = await looked_up(host, port)
    with ExitStack() as given_up:
        attempts = [partial(_connected, kind, address, given_up) for *kind, _, address in found]
        winner, _, troubles = await staggered_race(attempts, _HEAD_START)
        given_up.pop_all()  # not reached on cancellation, even when one had connected
    if isinstance(winner, socket.socket):
        return winner
    raise next(filter(None, troubles))  # the resolver puts the most promising address first


async def looked_up(host: str, port: int) -> _Found:
    """Return the addresses of a host. Raises OSError."""
    with suppress(socket.gaierror):  # an IP address needs no name server
        return _addresses(host, port, socket.AI_NUMERICHOST)
    answer: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()
    # A daemon thread: a lookup that hangs must not keep the process alive.
    thread = Thread(target=_look_up, args=(host, port, answer), name="oraculo-dialing", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the system has no room for another thread
        raise OSError(str(error)) from None
    return await answer


def _look_up(host: str, port: int, answer: "asyncio.Future[_Found]") -> None:
    found: _Found | Exception
    try:
        found = _addresses(host, port, 0)
    except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
        found = error
    with suppress(RuntimeError):  # the loop is closed, and nobody waits
        answer.get_loop().call_soon_threadsafe(_set, answer, found)


def _addresses(host: str, port: int, flags: int) -> _Found:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)


def _set(answer: "asyncio.Future[_Found]", found: _Found | Exception) -> None:
    if answer.done():  # it was cancelled
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)


async def _connected(kind: list[int], address: Any, given_up: ExitStack) -> socket.socket:
    """Connect to one address. `kind` is family, type and protocol: asyncio sets TCP_NODELAY only for TCP."""
    sock = socket.socket(*kind)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return given_up.enter_context(sock)
