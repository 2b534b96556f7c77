"""Looks up the addresses of webhooks' hosts.

A lookup blocks its thread for as long as a name server says nothing, and cannot be cut off. So each has a thread of its
own, never one of the event loop's, which others need: one for a host, shared by all who wait for it, and not many.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

_AT_ONCE = 32
_MOST_TRIED = 3  # of the addresses of one host


class Addresses:
    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_AT_ONCE)
        self._lookups: dict[str, asyncio.Future[Sequence[str]]] = {}

    async def of(self, host: str) -> Sequence[str]:
        """Raises OSError when it has none. Whoever waits may be cancelled: the lookup goes on, for the next."""
        if host not in self._lookups:
            await self._free.acquire()
            if host in self._lookups:  # another began it meanwhile
                self._free.release()
            else:
                self._begin(host)
        return await asyncio.shield(self._lookups[host])

    def _begin(self, host: str) -> None:
        lookup: asyncio.Future[Sequence[str]] = asyncio.get_running_loop().create_future()
        self._lookups[host] = lookup
        lookup.add_done_callback(lambda _: self._ended(host))
        # A daemon: one that hangs must not keep the process from ending.
        Thread(target=_look_up, args=(host, lookup), name="oraculo-addresses", daemon=True).start()

    def _ended(self, host: str) -> None:
        self._lookups.pop(host).exception()  # nobody may be left who would take it
        self._free.release()


def _look_up(host: str, lookup: "asyncio.Future[Sequence[str]]") -> None:
    found: Sequence[str] | Exception
    try:
        found = _addresses(host)
    except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
        found = error
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        lookup.get_loop().call_soon_threadsafe(_tell, lookup, found)


def _addresses(host: str) -> Sequence[str]:
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))[:_MOST_TRIED]


def _tell(lookup: "asyncio.Future[Sequence[str]]", found: Sequence[str] | Exception) -> None:
    if isinstance(found, Exception):
        lookup.set_exception(found)
    else:
        lookup.set_result(found)
