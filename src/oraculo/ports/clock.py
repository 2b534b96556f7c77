"""Time and chance as parameters, so that a simulation can control both."""

import random
import time
import uuid
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return the seconds since the epoch."""
        ...


class Entropy(Protocol):
    def new_id(self) -> str:
        """Return an id that was never returned before."""
        ...

    def jitter(self) -> float:
        """Return a number in [0, 1)."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.time()


class SystemEntropy:
    def new_id(self) -> str:
        return str(uuid.uuid4())

    def jitter(self) -> float:
        return random.random()
