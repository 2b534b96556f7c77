"""The tasks, queues and jobs of Celery and BullMQ that runs may reach, as the settings name them.

A pattern is a name in which `*` stands for any text and `?` for one character. No pattern reaches the names that
Celery's transport keeps for itself, because a message there breaks the workers behind it.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

import msgspec

from oraculo.pipeline.bridges import Bridge, is_bridge
from oraculo.wire.naming import is_transports_own, shown

# Celery's own tasks run any task that their arguments name, as `celery.map` does.
_CELERY_OWN_TASKS = ("celery.*",)
BULL_DEFAULT_JOB = "__default__"  # old Bull's name of a job without one


class BridgeAllow(Protocol):
    """The part of a system behind a bridge that may be reached."""

    def fault(self, bridge: Bridge, task_id: str) -> str | None:
        """Return why the step of that id may not go there, or None when it may."""
        ...


class CeleryAllow(msgspec.Struct, frozen=True):
    """The patterns for Celery. The default queue needs none: its setting names it."""

    tasks: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    default_queue: str = "celery"

    def fault(self, bridge: Bridge, _task_id: str) -> str | None:
        task, queue = bridge.target, bridge.queue or self.default_queue
        if _matches(task, _CELERY_OWN_TASKS):
            return f"the task {shown(task)} is Celery's own; name a task of your app"
        if is_transports_own(queue):
            return f"the queue {shown(queue)} is one that Celery's transport keeps for itself; name another"
        if not _matches(task, self.tasks):
            return _outside(f"the task {shown(task)}", "ORACULO_CELERY_TASKS_ALLOW", self.tasks)
        if queue != self.default_queue and not _matches(queue, self.queues):
            return _outside(f"the queue {shown(queue)}", "ORACULO_CELERY_QUEUES_ALLOW", self.queues)
        return None


class BullmqAllow(msgspec.Struct, frozen=True):
    """The patterns for BullMQ: `queue` stands for all of its jobs, `queue:job` for the jobs of that name.

    With `legacy` the system is old Bull, where a job named like its step has no name.
    """

    queues: tuple[str, ...] = ()
    legacy: bool = False

    def fault(self, bridge: Bridge, task_id: str) -> str | None:
        queue = bridge.target
        allowed = [job for pattern, _, job in map(_parted, self.queues) if fnmatchcase(queue, pattern)]
        if ":" in queue or not allowed:  # BullMQ's own keys are a queue's name, a colon and a part
            return _outside(f"the queue {shown(queue)}", "ORACULO_BULLMQ_QUEUES_ALLOW", self.queues)
        # A job is named by its step's id, unless that is the URL itself, which names none.
        job = bridge.name or ("" if is_bridge(task_id) else task_id)
        if self.legacy and job in ("", task_id):
            job = BULL_DEFAULT_JOB
        if not any(not pattern or fnmatchcase(job, pattern) for pattern in allowed):
            named = f"the job {shown(job)} of the queue {shown(queue)}"
            return _outside(named, "ORACULO_BULLMQ_QUEUES_ALLOW", self.queues)
        return None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _outside(what: str, setting: str, patterns: Sequence[str]) -> str:
    return f"{what} is outside {setting} ({', '.join(patterns) or 'which names none'})"


def _parted(pattern: str) -> tuple[str, str, str]:
    return pattern.partition(":")
