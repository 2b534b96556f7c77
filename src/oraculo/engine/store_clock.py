"""The store's own clock, by which those that share it agree on who lives, and how far this machine's is from it."""

from typing import NamedTuple

from oraculo.ports.clock import Clock
from oraculo.ports.store import Store

FAR = 5.0  # seconds: less is not worth an alarm, though it makes deadlines as wrong


class Reading(NamedTuple):
    now: float  # by the store's clock, or by this machine's where it has none
    fault: str | None  # what is to be said of the difference


async def read_clock(store: Store, clock: Clock) -> Reading:
    asked = clock.now()
    told = await store.clock()
    heard = clock.now()
    if told is None:
        return Reading(heard, None)
    ahead = (asked + heard) / 2 - told
    doubt = abs(heard - asked) / 2  # it said so at some moment between
    if abs(ahead) - doubt <= FAR:
        return Reading(told, None)
    direction = "ahead of" if ahead > 0 else "behind"
    return Reading(
        told,
        f"this machine's clock is {abs(ahead):.0f} s {direction} that of the store, and deadlines ring "
        f"{'early' if ahead > 0 else 'late'} here: let both be set by NTP",
    )
