"""What the machine is worth just now.

Many are virtual, and give a process twice as much at one moment as at the next, often with no word in any counter. A
piece of work that is always the same tells that: numbers of two hours do not compare if it did not take as long in
both.
"""

import time

_STEPS = 12_000


def work_ms() -> float:
    """About 2 ms on a core of 2.5 GHz that nobody else uses. Processor time: what waits for a core is not counted."""
    started = time.process_time()
    kept: dict[int, tuple[int, str]] = {}
    for step in range(_STEPS):
        kept[step & 255] = (step, str(step))
    return (time.process_time() - started) * 1000
