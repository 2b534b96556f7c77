"""The store's clock, by which its users agree on who lives, and its difference from this machine's clock."""

from typing import NamedTuple

from oraculo.ports.clock import Clock
from oraculo.ports.registry import Registry

FAR = 5.0  # seconds; a smaller difference is not worth an alarm


class Reading(NamedTuple):
    """One reading of the store's clock."""

    now: float  # by the store's clock, or by this machine's where it has none
    fault: str | None  # what is to be said of the difference


async def surely_past(store: Registry, clock: Clock, seconds: float) -> float:
    """Return a time that lies so many seconds back by both clocks.

    What is deleted by a clock that is ahead would be gone for all who share the store.
    """
    return min(clock.now(), (await read_clock(store, clock)).now) - seconds


async def read_clock(store: Registry, clock: Clock) -> Reading:
    """Read the store's clock, and compare it with this machine's."""
    asked = clock.now()
    answer = await store.clock()
    heard = clock.now()
    if answer is None:
        return Reading(heard, None)
    ahead = (asked + heard) / 2 - answer
    doubt = abs(heard - asked) / 2  # the store read it at some moment between
    if abs(ahead) - doubt <= FAR:
        return Reading(answer, None)
    direction, here, elsewhere = ("ahead of", "early", "late") if ahead > 0 else ("behind", "late", "early")
    return Reading(
        answer,
        f"this machine's clock is {abs(ahead):.0f} s {direction} that of the store: deadlines ring {here} here, and "
        f"those of runs that start here {elsewhere} elsewhere; let both clocks be set by NTP",
    )
