"""Room for answers: a part of the server's memory that commands may not use.

Handling an answer frees memory, because its command is acked and leaves. A server that is full of commands takes no
answer, so no command is ever acked, and nothing moves until the deadlines. So commands leave a part of the memory free,
where the server has a limit (`maxmemory`), evicts nothing, and reports its use.
"""

import re
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

from oraculo.clients.redis import Command, ReplyError, error_code, read_info
from oraculo.ports.broker import Outgoing

KEPT_SHARE = 8  # one part in so many of the server's memory is kept for answers, up to
MOST_KEPT = 16 * 1024 * 1024  # bytes: enough for the answers on their way, and for their consumer
CLOSE = 2  # below so many times the kept part, there is a look before each call
LOOKED_EVERY = 0.25  # seconds
_DATABASE = re.compile(rb"db\d+$")
_OVERHEAD = 128  # bytes that a message costs beside its own

LOOKS: Sequence[Command] = (("INFO", "memory"), ("INFO", "keyspace"))  # Redis 6 answers one section at a time


class Room:
    """The memory that the last look found."""

    def __init__(self) -> None:
        self._left, self._kept = 0.0, 0  # bytes; not known before the first look
        self._next_look = 0.0
        self._is_permitted = True  # until the server refuses: then nothing is kept

    @property
    def is_known(self) -> bool:
        return self._left < inf

    def is_close(self, messages: Sequence[Outgoing]) -> bool:
        """Return True when these messages bring the server close to its limit.

        Messages that may use all of it never do.
        """
        if not self.is_known or not any(message.leaves_room for message in messages):
            return False
        return self._left - sum(size_of(message) for message in messages if message.leaves_room) <= CLOSE * self._kept

    def looks_due(self, messages: Sequence[Outgoing], now: float, *, was_short: bool) -> list[Command]:
        """Return the commands that look at the memory now, to be sent with the messages.

        After it `was_short` any message takes them along, because the command that found no room may never come again.
        """
        is_due = now >= self._next_look and self._is_permitted
        if not is_due or not (was_short or any(message.leaves_room for message in messages)):
            return []
        self._next_look = now + LOOKED_EVERY
        return list(LOOKS)

    def absorb(self, replies: Sequence[Any]) -> None:
        """Store the replies to LOOKS."""
        about: dict[bytes, bytes] = {}
        for reply in replies:
            self._is_permitted = not (isinstance(reply, ReplyError) and error_code(reply) == "NOPERM")
            about |= read_info(reply)
        self._left, self._kept = room_of(about)

    def note_sent(self, messages: Sequence[Outgoing]) -> None:
        if self.is_known:
            self._left -= sum(map(size_of, messages))

    def note_full(self) -> None:
        """Record that the server refused something for want of memory: there is less than was thought."""
        if self.is_known:
            self._left = min(self._left, 0)

    def proven_by(self, taken: Sequence[Outgoing]) -> float:
        """Return how large a command finds room: as large as one that was taken, or as what the last look found."""
        return max([0, self._left, *(size_of(message) for message in taken if message.leaves_room)])

    def due_for(self, refused: Iterable[Outgoing]) -> int:
        """Return the room that must be there before the server counts as usable again.

        It is at most the part that is kept, or a message larger than all that is ever free would be an endless outage.
        """
        return min(min(map(size_of, refused)), self._kept)

    def without_room(self, messages: Sequence[Outgoing]) -> set[int]:
        """Return the places of the messages that have to wait. The smallest find room first."""
        sizes = {place: size_of(message) for place, message in enumerate(messages) if message.leaves_room}
        waiting, spent = set[int](), 0
        for place in sorted(sizes, key=sizes.__getitem__):
            if spent + sizes[place] <= self._left:
                spent += sizes[place]
            else:
                waiting.add(place)
        return waiting


def size_of(message: Outgoing) -> int:
    return len(message.body) + len(message.reason or "") + _OVERHEAD


def room_of(about: dict[bytes, bytes]) -> tuple[float, int]:
    """Return the free bytes beside the kept ones, and the kept ones. Infinite without a limit or with eviction."""
    most = int(about.get(b"maxmemory", b"0"))
    if most == 0 or evicts(about):
        return inf, 0
    used = int(about.get(b"used_memory", b"0")) - int(about.get(b"mem_not_counted_for_evict", b"0"))
    kept = min(most // KEPT_SHARE, MOST_KEPT)
    return most - used - kept, kept


def evicts(about: dict[bytes, bytes]) -> bool:
    """Return True when the server evicts keys of queues. The volatile policies evict only keys that expire."""
    policy = about.get(b"maxmemory_policy", b"")
    if not policy.startswith(b"volatile-"):
        return policy != b"noeviction"
    return any(_DATABASE.match(name) and b"expires=0" not in held.split(b",") for name, held in about.items())


def eviction_of(about: dict[bytes, bytes]) -> str | None:
    """Return the policy by which the server evicts queues, or None. The volatile policies evict no queue."""
    policy = about.get(b"maxmemory_policy", b"").decode()
    if about.get(b"maxmemory", b"0") == b"0" or not policy.startswith("allkeys"):
        return None
    return f"its maxmemory-policy is {policy}: it may evict queues, with all that is in them; set it to noeviction"
