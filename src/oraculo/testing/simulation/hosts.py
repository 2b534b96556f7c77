"""Processes that can die: what belongs to one ends with it, at once, wherever it is."""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from typing import Any

OWNER: ContextVar["SimulatedHost | None"] = ContextVar("owner", default=None)


class SimulatedHost:
    """One process. Every task that is started inside it is its own, and dies with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        context = copy_context()
        context.run(OWNER.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)

    def die(self) -> None:
        """kill -9: nothing it still does can reach the world (its ports see to that), and its tasks are ended."""
        self.alive = False
        for task in sorted(self.tasks, key=lambda task: task.get_name()):
            task.cancel()


def own_tasks(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> "asyncio.Task[Any]":
    """A task factory that notes whose each task is."""
    context = options.get("context")
    host = OWNER.get() if context is None else context.get(OWNER)
    task = asyncio.Task(work, loop=loop, **options)
    if host is not None:
        if not host.alive:
            task.cancel()
        host.tasks.add(task)
        task.add_done_callback(host.tasks.discard)
    return task
