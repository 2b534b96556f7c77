"""Answers of workers: success, failure, progress, and answers that come late or twice."""

from oraculo.core.events import Answered, Progressed, Verdict
from oraculo.core.history import Happened
from oraculo.core.machine import ending, moves, skipping, timeout_reason, timers
from oraculo.core.run import Cause, Changes, Run, RunStatus, Task, TaskStatus
from oraculo.core.transitions import RunTrigger, Trigger, move
from oraculo.wire.timestamps import in_words
from oraculo.wire.tracebacks import with_traceback

# Python 3.11 finds a global faster than a member of an enum, and every run asks for these.
_APPLIED, _SUCCEED, _TASK_SUCCEEDED = Verdict.APPLIED, Trigger.SUCCEED, Happened.SUCCEEDED

# These limits keep a worker that answers without end from filling the store. Past them, strays are only counted,
# progress only replaces the last report, and a refused answer is only in the dead letters.
MAX_STRAY_ENTRIES = 100
MAX_ENTRIES = 1_000
MAX_ENTRIES_PER_TASK = 100
# One traceback may take 16 kB, so a history longer than its tasks and this many entries gets no more of them.
TRACED_ENTRIES = 1_000


def answered(run: Run, event: Answered, now: float, changes: Changes) -> Verdict:
    """Apply the success or the failure of one attempt."""
    task = run.tasks[event.task]
    if not task.attempt:
        return Verdict.UNKNOWN
    if not task.is_open:
        return _answered_after_end(run, task, event, now, changes)
    if not event.failed:
        task.mark = event.mark
        _succeed(run, task, event.payload, now, changes)
        ending.end_by_quorum(run, now, changes)
    elif _is_repeated_failure(task, event):
        return _stray(run, task, Verdict.DUPLICATE, event.attempt, now, changes)
    else:
        _attempt_failed(run, task, event, now, changes)
    ending.end_if_over(run, now, changes)
    return _APPLIED


def progressed(run: Run, event: Progressed, now: float, changes: Changes) -> Verdict:
    """Keep the last progress that a worker reported."""
    task = run.tasks[event.task]
    if not task.is_open or not task.attempt or task.missing:
        return Verdict.LATE if task.attempt else Verdict.UNKNOWN
    if event.attempt is not None and (event.attempt < task.attempt or task.awaits_retry):
        return Verdict.LATE  # that attempt has failed, and its progress says nothing about the next one
    if event.percent is not None:
        task.percent = event.percent
    # An empty note shows that a worker is busy, even when its report says nothing.
    task.note = event.note if event.note is not None or task.percent is not None else ""
    changes.touch(task)
    if run.head.entries < _max_entries(run):
        percent = "" if event.percent is None else f"{event.percent:g} %"
        detail = f"{percent} {event.note or ''}".strip() or None
        changes.record(now, Happened.PROGRESS, task.number, task.attempt, detail)
    return Verdict.APPLIED


def record_refused(run: Run, task_id: str | None, why: str, now: float, changes: Changes) -> None:
    """Record an answer that went to the dead letters, because its run may wait for it. `task_id` may be unknown."""
    if run.head.entries < _max_entries(run) // 2:
        task = None if task_id is None else run.plan.by_id.get(task_id)
        changes.record(now, Happened.ANSWER_REFUSED, task, detail=why)


def _max_entries(run: Run) -> int:
    return MAX_ENTRIES + MAX_ENTRIES_PER_TASK * run.head.total


def _is_repeated_failure(task: Task, event: Answered) -> bool:
    """Return whether this failure was counted before."""
    if event.attempt is not None and event.attempt < task.attempt:
        return True
    return task.awaits_retry or (event.attempt is None and event.redelivered and event.mark == task.mark)


def _answered_after_end(run: Run, task: Task, event: Answered, now: float, changes: Changes) -> Verdict:
    if run.plan.amends and not event.failed and _may_be_amended(run, task):
        _amend(run, task, event.payload, now, changes)
        return Verdict.APPLIED
    counted = event.failed and event.redelivered and event.mark == task.mark  # as the failure that came too late
    answered = counted or task.status in (TaskStatus.SUCCEEDED, TaskStatus.FAILED)
    return _stray(run, task, Verdict.DUPLICATE if answered else Verdict.LATE, event.attempt, now, changes)


def _may_be_amended(run: Run, task: Task) -> bool:
    """Return whether time or the quorum closed the task. An answer or an operator has the last word otherwise."""
    if run.head.status is RunStatus.CANCELLED:
        return False
    return task.status is TaskStatus.TIMED_OUT or task.cause is Cause.QUORUM


def _amend(run: Run, task: Task, payload: bytes, now: float, changes: Changes) -> None:
    """Replace a timeout by a late success. The tasks that depended on it stay skipped."""
    move(run, task, Trigger.AMEND)
    task.result, task.cause, task.reason = payload, None, None
    task.ended_at = now
    changes.touch(task)
    changes.record(now, Happened.AMENDED, task.number, task.attempt)
    for number in run.plan.dependents[task.number]:
        run.tasks[number].missing -= 1
    if run.is_open:
        ending.end_by_quorum(run, now, changes)
        ending.end_if_over(run, now, changes)
    else:
        ending.set_end(run, RunTrigger.AMEND, now, changes)
    skipping.blame_others(run, [task], changes)  # last, because the quorum may have ended more tasks just now


def _stray(run: Run, task: Task, verdict: Verdict, attempt: int | None, now: float, changes: Changes) -> Verdict:
    """Count a late or duplicate answer."""
    head = run.head
    if verdict is Verdict.LATE:
        head.late += 1
    else:
        head.duplicates += 1
    changes.dirty = True
    if head.late + head.duplicates <= MAX_STRAY_ENTRIES:
        changes.record(now, Happened.LATE if verdict is Verdict.LATE else Happened.DUPLICATE, task.number, attempt)
    return verdict


def _succeed(run: Run, task: Task, payload: bytes, now: float, changes: Changes) -> None:
    task.result, task.reason = payload, None
    task.percent = None if task.percent is None else 100.0
    moves.close(run, task, _SUCCEED, now, changes)
    changes.record(now, _TASK_SUCCEEDED, task.number, task.attempt)
    for number in run.plan.dependents[task.number]:
        dependent = run.tasks[number]
        dependent.missing -= 1
        if not dependent.missing and dependent.is_open:
            moves.dispatch(run, dependent, now, changes)


def _attempt_failed(run: Run, task: Task, event: Answered, now: float, changes: Changes) -> None:
    """Schedule the next attempt, or close the task when no attempt or no time is left."""
    task.mark = event.mark
    task.reason = event.reason
    reason = event.reason
    if (passed := timers.deadline_passed(run, task, now)) is not None:  # its timer rings a moment later
        changes.record(now, Happened.ATTEMPT_FAILED, task.number, task.attempt, _traced(run, reason, event))
        timers.expire(run, task, passed, timeout_reason.why_timed_out(run, task, passed), now, changes)
        return
    if event.retryable and task.attempt < task.last_attempt:
        delay = run.plan.steps[task.number].retry.delay(task.attempt, event.jitter)
        if now + delay < min(run.head.deadline, task.deadline or run.head.deadline):
            _schedule_retry(run, task, now, delay, changes, event)
            return
        reason = f"{reason} (no time left for another attempt before the deadline)"
    task.cause, task.reason = Cause.ANSWER, reason
    moves.close(run, task, Trigger.FAIL, now, changes)
    changes.record(now, Happened.FAILED, task.number, task.attempt, _traced(run, reason, event))
    task.dead_letter = task.unsent = True
    changes.dead_letters.append((task.number, task.attempt))
    skipping.skip_dependents(run, task, now, changes)


def _schedule_retry(run: Run, task: Task, now: float, delay: float, changes: Changes, event: Answered) -> None:
    move(run, task, Trigger.RETRY)
    task.unsent = False
    task.due_at = now + delay
    task.percent = task.note = None
    changes.touch(task)
    detail = f"{task.reason}; next attempt in {in_words(delay)}"
    changes.record(now, Happened.ATTEMPT_FAILED, task.number, task.attempt, _traced(run, detail, event))


def _traced(run: Run, reason: str, event: Answered) -> str:
    has_room = run.head.entries < run.head.total + TRACED_ENTRIES
    return with_traceback(reason, event.traceback if has_room else None)
