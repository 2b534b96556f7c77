"""Time and chance, handed in so that a simulation can hold both."""

import random
import time
import uuid
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch."""
        ...


class Entropy(Protocol):
    def new_id(self) -> str:
        """An id that was never given before."""
        ...

    def jitter(self) -> float:
        """A number in [0, 1)."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.time()


class SystemEntropy:
    def new_id(self) -> str:
        return str(uuid.uuid4())

    def jitter(self) -> float:
        return random.random()
