"""The store's own clock, by which those that share it agree on who lives, and how far this machine's is from it."""

from typing import NamedTuple

from oraculo.ports.clock import Clock
from oraculo.ports.registry import Registry

FAR = 5.0  # seconds: less is not worth an alarm, though it makes deadlines as wrong


class Reading(NamedTuple):
    now: float  # by the store's clock, or by this machine's where it has none
    fault: str | None  # what is to be said of the difference


async def surely_past(store: Registry, clock: Clock, seconds: float) -> float:
    """A moment so long ago by both clocks: what is deleted by one that is ahead is gone for all who share the store."""
    return min(clock.now(), (await read_clock(store, clock)).now) - seconds


async def read_clock(store: Registry, clock: Clock) -> Reading:
    asked = clock.now()
    told = await store.clock()
    heard = clock.now()
    if told is None:
        return Reading(heard, None)
    ahead = (asked + heard) / 2 - told
    doubt = abs(heard - asked) / 2  # it said so at some moment between
    if abs(ahead) - doubt <= FAR:
        return Reading(told, None)
    direction, here, elsewhere = ("ahead of", "early", "late") if ahead > 0 else ("behind", "late", "early")
    return Reading(
        told,
        f"this machine's clock is {abs(ahead):.0f} s {direction} that of the store: deadlines ring {here} here, and "
        f"those of runs that start here {elsewhere} elsewhere; let both clocks be set by NTP",
    )
