"""How much of the server's memory is left to messages by which it gets none back.

An answer makes room: once it is taken, its command is acked and leaves. A server that is full to the last byte with
commands takes no answer, so that no command is ever acked, and nothing moves until the deadlines. So a part of the
memory is kept from them, wherever the server has a limit (`maxmemory`), evicts nothing and tells how much it has; half
of that part is for answers alone, the other half also for queues that have little in them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from oraculo.clients.redis import Command, ReplyError, error_code, read_info
from oraculo.ports.broker import Outgoing

KEPT_SHARE = 8  # one part in so many of the server's memory is kept for answers, but no more than
MOST_KEPT = 16 * 1024 * 1024  # bytes: enough for those that are on their way, and for who reads them
CLOSE = 2  # times as much left as is kept: then it is asked before each call, else now and then together with one
LOOKED_EVERY = 0.25  # seconds
SHARE_OF_A_CALL = 2  # one part in so many of what is left, or one message: several engines may look at a time
SHARE_OF_A_QUEUE = 16  # one part in so many of what is kept: a queue that has more has no claim on any of it
_DATABASE = re.compile(rb"db\d+$")
_OVERHEAD = 128  # bytes that a message takes beside its own

LOOKS: Sequence[Command] = (("INFO", "memory"), ("INFO", "keyspace"))  # Redis 6 takes one section at a time


class Room:
    """What was seen of it last."""

    def __init__(self) -> None:
        self._left, self._kept = 0.0, 0  # bytes; none is known of before the first look
        self._next_look = 0.0
        self._is_permitted = True  # unless this server says no: then nothing is kept

    @property
    def is_known(self) -> bool:
        return self._left < inf

    def is_close(self, messages: Sequence[Outgoing]) -> bool:
        """With these; not where there is no limit, nor for what may take all that there is."""
        if not self.is_known or not any(message.leaves_room for message in messages):
            return False
        return self._left - sum(size_of(message) for message in messages if message.leaves_room) <= CLOSE * self._kept

    @property
    def is_none(self) -> bool:
        """Not even for queues that have little."""
        return self._left + self._kept / 2 <= 0

    def looks_due(self, messages: Sequence[Outgoing], now: float) -> list[Command]:
        """To be sent with them."""
        if now < self._next_look or not self._is_permitted or not any(message.leaves_room for message in messages):
            return []
        self._next_look = now + LOOKED_EVERY
        return list(LOOKS)

    def absorb(self, replies: Sequence[Any]) -> None:
        """Those to LOOKS."""
        about: dict[bytes, bytes] = {}
        for reply in replies:
            self._is_permitted = not (isinstance(reply, ReplyError) and error_code(reply) == "NOPERM")
            about |= read_info(reply)
        self._left, self._kept = room_of(about)

    def note_sent(self, messages: Sequence[Outgoing]) -> None:
        if self.is_known:
            self._left -= sum(map(size_of, messages))

    def note_full(self) -> None:
        """It refused something for want of memory, so that it is less than was thought."""
        if self.is_known:
            self._left = min(self._left, 0)

    def due_for(self, refused: Iterable[Outgoing]) -> int:
        """How much room must be seen for the server to count as one that takes messages. No more than is kept: what is
        larger than all that commands may ever have would else make it an outage that never ends."""
        return min(min(map(size_of, refused)), self._kept)

    def proved_by(self, taken: Sequence[Outgoing]) -> float:
        """For how large a message there is room. What was taken out of the part that is kept proves nothing."""
        return max(min(size_of(message), self._left) if message.leaves_room else size_of(message) for message in taken)

    def without_room(self, messages: Sequence[Outgoing], names: Sequence[str], lengths: Mapping[str, int]) -> set[int]:
        """The places of those that are to wait. `names`: where each is to be put; `lengths`: how many messages are
        there already.

        The smallest find room first, and those for a queue that has little may take some of what is kept: the many of
        one that nobody reads hold up no other."""
        sizes = {place: size_of(message) for place, message in enumerate(messages) if message.leaves_room}
        waiting, spent, there = set[int](), 0, Counter(lengths)
        for place in sorted(sizes, key=sizes.__getitem__):
            name, size = names[place], sizes[place]
            is_short = (there[name] + 1) * size <= self._kept / SHARE_OF_A_QUEUE
            left = self._left + (self._kept / 2 if is_short else 0)
            if spent + size <= (left / SHARE_OF_A_CALL if spent else left):
                spent += size
                there[name] += 1
            else:
                waiting.add(place)
        return waiting


def size_of(message: Outgoing) -> int:
    return len(message.body) + len(message.reason or "") + _OVERHEAD


def room_of(about: dict[bytes, bytes]) -> tuple[float, int]:
    """How many bytes are left beside those that are kept, and how many these are. Infinite where nothing is known of a
    limit, or where the server evicts what it may rather than refuse."""
    most = int(about.get(b"maxmemory", b"0"))
    if most == 0 or evicts(about):
        return inf, 0
    used = int(about.get(b"used_memory", b"0")) - int(about.get(b"mem_not_counted_for_evict", b"0"))
    kept = min(most // KEPT_SHARE, MOST_KEPT)
    return most - used - kept, kept


def evicts(about: dict[bytes, bytes]) -> bool:
    """The volatile policies, which many providers set, evict only keys that expire; where none does they refuse as
    `noeviction` does."""
    policy = about.get(b"maxmemory_policy", b"")
    if not policy.startswith(b"volatile-"):
        return policy != b"noeviction"
    return any(_DATABASE.match(name) and b"expires=0" not in held.split(b",") for name, held in about.items())


def eviction_of(about: dict[bytes, bytes]) -> str | None:
    """The volatile policies evict only keys that expire, and none of a queue does."""
    policy = about.get(b"maxmemory_policy", b"").decode()
    if about.get(b"maxmemory", b"0") == b"0" or not policy.startswith("allkeys"):
        return None
    return f"its maxmemory-policy is {policy}: it may evict queues, with all that is in them; set it to noeviction"
