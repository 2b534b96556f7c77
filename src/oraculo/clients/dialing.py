"""Reaching a server by a name that has several addresses, of which one may say nothing, as where IPv6 leads nowhere.

Tried in their order, that one would take all the time that there is, at every attempt. So the next has its turn a
moment later, beside it, and the first that answers is taken. asyncio offers the same; uvloop does not.

A lookup that a name server leaves unanswered holds its thread, though nobody waits any more, and of the event loop's
own there are few: names of one server that is away would keep all others from being found, even by their address. So
each lookup has a thread of its own.
"""

import asyncio
import socket
from asyncio.staggered import staggered_race
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from threading import Thread
from typing import Any

_HEAD_START = 0.25  # seconds that each has before the next; RFC 8305 recommends as many

_Found = Sequence[tuple[Any, ...]]  # as socket.getaddrinfo has it


async def dialed(host: str, port: int) -> socket.socket:
    """Connected. It waits for ever: the caller sets the limit. Raises OSError."""
    found = await looked_up(host, port)
    with ExitStack() as given_up:
        attempts = [partial(_connected, kind, address, given_up) for *kind, _, address in found]
        winner, _, troubles = await staggered_race(attempts, _HEAD_START)
        given_up.pop_all()  # else it was cancelled, perhaps when there was a winner
    if isinstance(winner, socket.socket):
        return winner
    raise next(filter(None, troubles))  # the resolver puts those first that are most likely to work


async def looked_up(host: str, port: int) -> _Found:
    """Raises OSError."""
    with suppress(socket.gaierror):  # what is an address already needs no name server
        return _addresses(host, port, socket.AI_NUMERICHOST)
    answer: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()
    # A daemon: one that hangs must not keep the process from ending.
    thread = Thread(target=_look_up, args=(host, port, answer), name="oraculo-dialing", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the system has no room for another
        raise OSError(str(error)) from None
    return await answer


def _look_up(host: str, port: int, answer: "asyncio.Future[_Found]") -> None:
    found: _Found | Exception
    try:
        found = _addresses(host, port, 0)
    except Exception as error:  # noqa: BLE001 - whatever it is, who waits must hear of it
        found = error
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        answer.get_loop().call_soon_threadsafe(_tell, answer, found)


def _addresses(host: str, port: int, flags: int) -> _Found:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)


def _tell(answer: "asyncio.Future[_Found]", found: _Found | Exception) -> None:
    if answer.done():  # cancelled: it took too long
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)


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
