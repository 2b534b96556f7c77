"""The transitions of tasks and runs, as two tables. docs/explanation/state-machine.md is drawn from them."""

from enum import StrEnum

from oraculo.core.run import Run, RunStatus, Task, TaskStatus
from oraculo.errors import InvariantBroken


class Trigger(StrEnum):
    """The triggers that move a task from one status to another."""

    SEND = "command confirmed by the broker"
    SUCCEED = "answer: success"
    RETRY = "answer: failure, attempts left"
    FAIL = "answer: failure, no attempt left"
    GIVE_UP = "command too large for the broker"
    EXPIRE = "deadline"
    SKIP = "a dependency did not succeed"
    CANCEL = "cancelled, or the quorum is met"
    REOPEN = "repetir or redrive"
    AMEND = "late answer with onLate: amend"


TASK_TRANSITIONS: dict[TaskStatus, dict[Trigger, TaskStatus]] = {
    TaskStatus.PENDING: {
        Trigger.SEND: TaskStatus.RUNNING,
        Trigger.SUCCEED: TaskStatus.SUCCEEDED,
        Trigger.RETRY: TaskStatus.PENDING,
        Trigger.FAIL: TaskStatus.FAILED,
        Trigger.GIVE_UP: TaskStatus.FAILED,
        Trigger.EXPIRE: TaskStatus.TIMED_OUT,
        Trigger.SKIP: TaskStatus.SKIPPED,
        Trigger.CANCEL: TaskStatus.CANCELLED,
    },
    TaskStatus.RUNNING: {
        Trigger.SUCCEED: TaskStatus.SUCCEEDED,
        Trigger.RETRY: TaskStatus.PENDING,
        Trigger.FAIL: TaskStatus.FAILED,
        Trigger.EXPIRE: TaskStatus.TIMED_OUT,
        Trigger.CANCEL: TaskStatus.CANCELLED,
    },
    TaskStatus.SUCCEEDED: {},
    TaskStatus.FAILED: {Trigger.REOPEN: TaskStatus.PENDING},
    TaskStatus.TIMED_OUT: {Trigger.REOPEN: TaskStatus.PENDING, Trigger.AMEND: TaskStatus.SUCCEEDED},
    TaskStatus.SKIPPED: {Trigger.REOPEN: TaskStatus.PENDING},
    TaskStatus.CANCELLED: {Trigger.REOPEN: TaskStatus.PENDING, Trigger.AMEND: TaskStatus.SUCCEEDED},
}


class RunTrigger(StrEnum):
    """The triggers that move a run from one status to another."""

    END = "no task open, quorum met, deadline or cancel"
    REOPEN = "repetir or redrive"
    AMEND = "late answer with onLate: amend"


_ENDED = tuple(status for status in RunStatus if status is not RunStatus.RUNNING)
RUN_TRANSITIONS: dict[RunStatus, dict[RunTrigger, tuple[RunStatus, ...]]] = {
    RunStatus.RUNNING: {RunTrigger.END: _ENDED},
    RunStatus.SUCCEEDED: {},
    **{
        status: {
            RunTrigger.REOPEN: (RunStatus.RUNNING,),
            RunTrigger.AMEND: (RunStatus.SUCCEEDED, RunStatus.PARTIAL, RunStatus.FAILED, RunStatus.TIMED_OUT),
        }
        for status in (RunStatus.PARTIAL, RunStatus.FAILED, RunStatus.TIMED_OUT)
    },
    RunStatus.CANCELLED: {RunTrigger.REOPEN: (RunStatus.RUNNING,)},
}


_COUNTER = {
    TaskStatus.SUCCEEDED: "succeeded",
    TaskStatus.FAILED: "failed",
    TaskStatus.TIMED_OUT: "timed_out",
    TaskStatus.SKIPPED: "skipped",
    TaskStatus.CANCELLED: "task_cancelled",
}
_SUCCEEDED = TaskStatus.SUCCEEDED


def move(run: Run, task: Task, trigger: Trigger) -> None:
    """Move a task and count it. Its cause must be set before, because unsuccessful tasks are counted by cause."""
    before = task.status
    after = TASK_TRANSITIONS[before].get(trigger)
    if after is None:
        raise InvariantBroken(f"run {run.id}, task {task.number}: {trigger.name} is not allowed in {before}")
    task.status = after
    for status, step in ((before, -1), (after, 1)):
        if counter := _COUNTER.get(status):
            setattr(run.head, counter, getattr(run.head, counter) + step)
            if status is not _SUCCEEDED:
                run.count_unsuccessful(task, status, step)
        else:
            run.open_tasks += step


def move_run(run: Run, trigger: RunTrigger, status: RunStatus) -> None:
    """Move a run to `status`, which the trigger must allow."""
    if status not in RUN_TRANSITIONS[run.head.status].get(trigger, ()):
        raise InvariantBroken(f"run {run.id}: {trigger.name} from {run.head.status} to {status} is not allowed")
    run.head.status = status
