"""Simulated processes that can die. All tasks of a process end with it."""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from typing import Any

OWNER: ContextVar["SimulatedHost | None"] = ContextVar("owner", default=None)


class SimulatedHost:
    """One process. It owns every task that is started inside it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        context = copy_context()
        context.run(OWNER.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)

    def die(self) -> None:
        """End the process like kill -9: its ports let nothing through any more, and its tasks are cancelled."""
        self.alive = False
        for task in sorted(self.tasks, key=lambda task: task.get_name()):
            task.cancel()


def own_tasks(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> "asyncio.Task[Any]":
    """Create tasks as a task factory, and record which host owns each."""
    context = options.get("context")
    host = OWNER.get() if context is None else context.get(OWNER)
    task = asyncio.Task(work, loop=loop, **options)
    if host is not None:
        if not host.alive:
            task.cancel()
        host.tasks.add(task)
        task.add_done_callback(host.tasks.discard)
    return task
