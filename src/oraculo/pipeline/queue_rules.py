"""The queues that requests, pipelines and calls may name: those that `ORACULO_QUEUES_ALLOW` matches.

A system queue is never one of them, because others may share the broker. Names come without the prefix.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import translate

from oraculo.errors import Fault
from oraculo.pipeline.bridge_rules import BridgeAllow
from oraculo.pipeline.definition import Definition, Step
from oraculo.wire import naming

_SETTING = "ORACULO_QUEUES_ALLOW"
_PATTERN = re.compile(r"[A-Za-z0-9_.*?\[\]!-]{1,200}")


class QueueRules:
    """The queues that may be named. Without patterns these are all but system queues.

    `bridges` holds the rules for each kind of bridge.
    """

    def __init__(self, patterns: Sequence[str] = (), bridges: Mapping[str, BridgeAllow] | None = None) -> None:
        self._bridges = bridges
        self._allowed = re.compile("|".join(map(translate, patterns))) if patterns else None
        self._patterns = ", ".join(patterns)

    def fault(self, queue: str) -> str | None:
        """Return why no run may send to this queue, nor reply there, or None when it may."""
        if naming.is_system_queue(queue):
            return naming.system_queue_fault(queue)
        if self._allowed is None or self._allowed.match(queue):
            return None
        return f"'{queue}' is outside {_SETTING} ({self._patterns})"

    def call_fault(self, queue: str) -> str | None:
        """Return why no call may look at this queue or its dead letters. The engine's own queues are always allowed."""
        return None if naming.is_own_queue(naming.source_name(queue)) else self.fault(naming.source_name(queue))

    def step_faults(self, definition: Definition) -> Iterator[tuple[int, Fault]]:
        """Yield each step whose queue no run may send to, by its number."""
        for number, step in enumerate(definition.steps):
            if fault := self.step_fault(step):
                yield number, Fault(f"steps[{number}] ({step.id}).queue", fault)

    def step_fault(self, step: Step) -> str | None:
        """Return why this step may not send to its queue, or None when it may."""
        if step.bridge is None:
            return self.fault(step.queue)
        return None if self._bridges is None else self._bridges[step.bridge.kind].fault(step.bridge, step.id)


def patterns_fault(patterns: Sequence[str]) -> str | None:
    """Return the fault of the first pattern that no queue's name can match."""
    bad = next((pattern for pattern in patterns if not _PATTERN.fullmatch(pattern)), None)
    if bad is None:
        return None
    return f"has {naming.shown(bad)}; a pattern has the characters of a queue's name, '*', '?' and [abc]"
