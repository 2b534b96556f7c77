"""Looks up the addresses of webhooks' hosts.

A lookup blocks its thread for as long as a name server says nothing, and cannot be cut off. So each has a thread of its
own, never one of the event loop's, which others need: one for a host, shared by all who wait for it, and not many.
What was found is remembered for a while, so that names of which nothing is said hold up no host that was found before.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from threading import Thread
from typing import NamedTuple

_AT_ONCE = 128  # more than the attempts that are under way at a time, unless set otherwise
_MOST_TRIED = 16  # of the addresses of one host
_FRESH = 60.0  # s
_MOST_REMEMBERED = 1_000  # hosts


class _Found(NamedTuple):
    addresses: Sequence[str]
    fresh_until: float  # of the event loop's time


class Addresses:
    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_AT_ONCE)
        self._lookups: dict[str, asyncio.Future[Sequence[str]]] = {}
        self._remembered: dict[str, _Found] = {}  # the latest last

    async def of(self, host: str) -> Sequence[str]:
        """Raises OSError when it has none. Whoever waits may be cancelled: the lookup goes on, for the next. When there
        is no place for a lookup, what was found last is better than to wait."""
        found = self._remembered.get(host)
        if found and (asyncio.get_running_loop().time() < found.fresh_until or self._free.locked()):
            return found.addresses
        if host not in self._lookups:
            await self._free.acquire()
            if host in self._lookups:  # another began it meanwhile
                self._free.release()
            else:
                self._begin(host)
        return await asyncio.shield(self._lookups[host])

    def forget(self, host: str) -> None:
        """It was not reached there: it may have moved."""
        self._remembered.pop(host, None)

    def _begin(self, host: str) -> None:
        lookup: asyncio.Future[Sequence[str]] = asyncio.get_running_loop().create_future()
        # A daemon: one that hangs must not keep the process from ending.
        thread = Thread(target=_look_up, args=(host, lookup), name="oraculo-addresses", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no room for another
            self._free.release()
            raise OSError(str(error)) from None
        self._lookups[host] = lookup
        lookup.add_done_callback(lambda _: self._ended(host))

    def _ended(self, host: str) -> None:
        lookup = self._lookups.pop(host)
        self._free.release()
        if lookup.exception() is None:  # to ask for it also takes it: nobody may be left who would
            self._remember(host, lookup.result())

    def _remember(self, host: str, addresses: Sequence[str]) -> None:
        self._remembered.pop(host, None)
        self._remembered[host] = _Found(addresses, asyncio.get_running_loop().time() + _FRESH)
        if len(self._remembered) > _MOST_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]


def _look_up(host: str, lookup: "asyncio.Future[Sequence[str]]") -> None:
    found: Sequence[str] | Exception
    try:
        found = _addresses(host)
    except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
        found = error
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        lookup.get_loop().call_soon_threadsafe(_tell, lookup, found)


def _addresses(host: str) -> Sequence[str]:
    """Of each family in turn, that of the first before: often only one of the two can be reached."""
    families: dict[int, dict[str, None]] = {}
    for family, *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        families.setdefault(family, {})[str(place[0])] = None
    in_turn = chain.from_iterable(zip_longest(*families.values()))
    return [address for address in in_turn if address is not None][:_MOST_TRIED]


def _tell(lookup: "asyncio.Future[Sequence[str]]", found: Sequence[str] | Exception) -> None:
    if isinstance(found, Exception):
        lookup.set_exception(found)
    else:
        lookup.set_result(found)
