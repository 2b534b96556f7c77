"""What this process gave back to JetStream, so that it is not counted as somebody's."""

from collections.abc import Iterable
from typing import Any

from oraculo.brokers.nats.connection import MOST_KNOWN
from oraculo.ports.clock import Clock

MOST_GIVEN_BACK = 10_000  # for each queue; more are counted as unacked
MOST_GIVEN_BACK_TOGETHER = 100_000  # then those of the queue that was first given something back count as unacked


class GivenBack:
    """What this process gave back and nobody took yet. JetStream counts it as delivered and not settled."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due: dict[str, dict[int, float]] = {}  # when each is due, by queue and sequence; no queue has none
        self._together = 0

    def note(self, queue: str, sequence: int, delay: float) -> None:
        waiting = self._due.setdefault(queue, {})
        before = len(waiting)
        if before < MOST_GIVEN_BACK:
            waiting[sequence] = self._clock.now() + delay
            self._together += len(waiting) - before
        while len(self._due) > MOST_KNOWN or self._together > MOST_GIVEN_BACK_TOGETHER:
            self.forget_all(next(iter(self._due)))

    def forget(self, queue: str, sequences: Iterable[int]) -> None:
        waiting = self._due.get(queue)
        if waiting is None:
            return
        before = len(waiting)
        for sequence in sequences:
            waiting.pop(sequence, None)
        self._together -= before - len(waiting)
        if not waiting:
            del self._due[queue]

    def forget_all(self, queue: str) -> None:
        self._together -= len(self._due.pop(queue, {}))

    def count(self, queue: str, consumer: dict[str, Any]) -> int:
        """One that is due is thought to be taken as soon as anybody pulls."""
        waiting = self._due.get(queue, {})
        now, floor, anybody = self._clock.now(), consumer["ack_floor"]["stream_seq"], consumer.get("num_waiting", 0)
        gone = [sequence for sequence, due in waiting.items() if sequence <= floor or (anybody and due <= now)]
        self.forget(queue, gone)
        return min(len(waiting), int(consumer["num_ack_pending"]))

    def delayed(self, queue: str) -> int:
        """Those of them that nobody is to have yet, however many pull."""
        now = self._clock.now()
        return sum(due > now for due in self._due.get(queue, {}).values())
