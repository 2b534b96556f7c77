"""Addresses of the hosts of webhooks.

A lookup blocks its thread for as long as a name server is silent, and cannot be cut off. So each lookup has a thread of
its own, never one of the event loop's. There is one lookup for a host, shared by all who wait for it, and a limit for
all. Results are remembered for a while, so that silent name servers do not delay hosts that were found before.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from threading import Thread
from typing import NamedTuple

_AT_ONCE = 128  # more than the attempts under way by default
_MOST_TRIED = 16  # of the addresses of one host
_FRESH = 60.0  # s
_MOST_REMEMBERED = 1_000  # hosts


class _Found(NamedTuple):
    addresses: Sequence[str]
    fresh_until: float  # of the event loop's time


class Addresses:
    """The lookups under way, and the addresses that were found."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_AT_ONCE)
        self._lookups: dict[str, asyncio.Future[Sequence[str]]] = {}
        self._remembered: dict[str, _Found] = {}  # the latest last

    async def of(self, host: str) -> Sequence[str]:
        """Return the addresses of a host. Raise OSError when it has none.

        A caller may be cancelled, and its lookup goes on for the next. When all lookups are busy, an old result is
        better than a wait.
        """
        found = self._remembered.get(host)
        if found and (asyncio.get_running_loop().time() < found.fresh_until or self._free.locked()):
            return found.addresses
        if host not in self._lookups:
            await self._free.acquire()
            if host in self._lookups:  # another caller began it meanwhile
                self._free.release()
            else:
                self._begin(host)
        return await asyncio.shield(self._lookups[host])

    def forget(self, host: str) -> None:
        """Forget the addresses of a host that was not reached, because it may have moved."""
        self._remembered.pop(host, None)

    def _begin(self, host: str) -> None:
        lookup: asyncio.Future[Sequence[str]] = asyncio.get_running_loop().create_future()
        # A daemon thread, because one that hangs must not keep the process from ending.
        thread = Thread(target=_look_up, args=(host, lookup), name="oraculo-addresses", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no more threads
            self._free.release()
            raise OSError(str(error)) from None
        self._lookups[host] = lookup
        lookup.add_done_callback(lambda _: self._ended(host))

    def _ended(self, host: str) -> None:
        lookup = self._lookups.pop(host)
        self._free.release()
        if lookup.exception() is None:  # this also retrieves the error when nobody waits any more
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
    except Exception as error:  # noqa: BLE001 - the callers who wait must get it
        found = error
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        lookup.get_loop().call_soon_threadsafe(_set_outcome, lookup, found)


def _addresses(host: str) -> Sequence[str]:
    """Return the addresses with the families in turn, because often only one of the two can be reached."""
    families: dict[int, dict[str, None]] = {}
    for family, *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
        families.setdefault(family, {})[str(place[0])] = None
    in_turn = chain.from_iterable(zip_longest(*families.values()))
    return [address for address in in_turn if address is not None][:_MOST_TRIED]


def _set_outcome(lookup: "asyncio.Future[Sequence[str]]", found: Sequence[str] | Exception) -> None:
    if isinstance(found, Exception):
        lookup.set_exception(found)
    else:
        lookup.set_result(found)
