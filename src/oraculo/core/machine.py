"""The state machine of a run.

The laws it keeps:
- An ended task is final. A duplicate, late or unknown answer changes no status; it is counted and told.
- A task is sent only when all that it depends on has succeeded.
- Every run has a deadline; when it comes, what is open is closed and the run ends.
- The run ends when no task is open, when its quorum is met, when its deadline comes, or when it is cancelled.
- Only `repetir`, a redrive and an amendment open or change what has ended.

What may follow what is in `transitions`.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from oraculo.core.aggregate import end_status
from oraculo.core.broker_loss import commands_lost, letters_lost
from oraculo.core.events import (
    Answered,
    BrokerLost,
    Cancelled,
    DeadLetterDiscarded,
    Delivered,
    DeliveryFailed,
    DeliveryMoved,
    Event,
    Progressed,
    Redriven,
    Repeated,
    RunDue,
    Sent,
    TaskDue,
    Unsendable,
)
from oraculo.core.history import Happened
from oraculo.core.run import Cause, Changes, DeliveryStatus, Run, RunStatus, Task, TaskStatus
from oraculo.core.skipped import blame_others, skipped_after, why_skipped
from oraculo.core.timeout_reason import why_unanswered
from oraculo.core.transitions import RunTrigger, Trigger, move, move_run
from oraculo.wire.timestamps import in_words
from oraculo.wire.tracebacks import with_traceback


class Verdict(StrEnum):
    """What became of an event."""

    APPLIED = "applied"
    LATE = "late"  # its task, its run or, of progress, its attempt had ended without it
    DUPLICATE = "duplicate"  # it was said before
    UNKNOWN = "unknown"  # its task was never sent
    REFUSED = "refused"  # an operator's request that this state does not allow
    NOTHING = "nothing"  # a timer or a note that no longer matters


# By names of their own, as in `run`: every run asks for them.
_APPLIED, _SEND, _SUCCEED = Verdict.APPLIED, Trigger.SEND, Trigger.SUCCEED
_PENDING, _TASK_SENT, _TASK_SUCCEEDED = TaskStatus.PENDING, Happened.SENT, Happened.SUCCEEDED

# How many late and repeated answers a run's history tells, and how long it may grow by reports of progress, of which
# refused answers have half; past that they are only counted, or replace the last one, or are in the dead letters alone,
# so that a worker gone mad cannot fill the store.
TOLD_STRAYS = 100
TOLD_ENTRIES = 1_000
TOLD_ENTRIES_PER_TASK = 100
# Past as many entries as its tasks and these, a run's history keeps no traceback: each may have 16 kB.
TRACED_ENTRIES = 1_000

# An engine that ends a run delivers its aggregate at once; whoever finds it undelivered after this does it instead,
# unless it was moved: by an engine that needs longer, or where it waits for its turn.
DELIVERY_LEASE = 15.0


def start(run: Run, now: float) -> Changes:
    """The first changes of a new run: everything that depends on nothing is sent."""
    changes = Changes(run)
    changes.tell(now, Happened.STARTED, detail=run.head.name or None)
    run.head.due_at = run.head.deadline
    for task in run.tasks:
        changes.touch(task)
        task.last_attempt = run.plan.steps[task.number].retry.max_attempts
        if not task.missing:
            _dispatch(run, task, now, changes)
    return changes


def apply(run: Run, event: Event, now: float, changes: Changes) -> Verdict:
    """Applies one event to the run and adds what it changed to `changes`. Deterministic; never raises on the
    world's faults: an event that does not fit returns a verdict and changes no status."""
    return _HANDLERS[type(event)](run, event, now, changes)


# -- what a worker and the broker say ---------------------------------------------------------------------------


def _sent(run: Run, event: Sent, now: float, changes: Changes) -> Verdict:
    task = run.tasks[event.task]
    if not task.unsent or task.attempt != event.attempt or task.is_open is event.dead_letter:
        return Verdict.NOTHING
    task.unsent = False
    task.via = event.via
    changes.touch(task)
    at = now if event.at is None else event.at
    if event.dead_letter:
        task.sent_at = task.sent_at or at
        return _APPLIED
    task.sent_at = at
    if task.status is _PENDING:
        move(run, task, _SEND)
    changes.tell(now, _TASK_SENT, task.number, task.attempt)
    return _APPLIED


def _unsendable(run: Run, event: Unsendable, now: float, changes: Changes) -> Verdict:
    """There is no dead letter of it, which would be as large. What a broker took once, and is sent again because that
    one was lost, may be answered all the same."""
    task = run.tasks[event.task]
    is_as_told = task.unsent and task.attempt == event.attempt and task.status is TaskStatus.PENDING
    if not is_as_told or _deadline_passed(run, task, now) is not None:  # then its timer is a moment behind
        return Verdict.NOTHING
    task.cause, task.reason = Cause.UNSENDABLE, event.reason
    _close(run, task, Trigger.GIVE_UP, now, changes)
    changes.tell(now, Happened.FAILED, task.number, task.attempt, event.reason)
    _skip_dependents(run, task, now, changes)
    _end_if_over(run, now, changes)
    return Verdict.APPLIED


def _broker_lost(run: Run, event: BrokerLost, now: float, changes: Changes) -> Verdict:
    """What it had is sent again, under the same identity: a worker that has such a command already knows it for a
    repeat. A dead letter that is sent again is dated anew, so that whoever hears of the same loss leaves it alone."""
    lost = letters_lost(run, event, now) if event.dead_letters else commands_lost(run, event, now)
    if not lost:
        return Verdict.NOTHING
    for task in lost:
        task.unsent = True
        if event.dead_letters:
            task.sent_at = None
        changes.touch(task)
    outgoing = changes.dead_letters if event.dead_letters else changes.commands
    outgoing += [(task.number, task.attempt) for task in lost]
    told = f"{event.via or 'unknown'}: {len(lost)} of its messages {'is' if len(lost) == 1 else 'are'} sent again"
    changes.tell(now, Happened.BROKER_LOST, detail=told)
    return Verdict.APPLIED


def _answered(run: Run, event: Answered, now: float, changes: Changes) -> Verdict:
    task = run.tasks[event.task]
    if not task.attempt:
        return Verdict.UNKNOWN
    if not task.is_open:
        return _answered_after_end(run, task, event, now, changes)
    if not event.failed:
        task.mark = event.mark
        _succeed(run, task, event.payload, now, changes)
        _end_by_quorum(run, now, changes)
    elif _is_repeated_failure(task, event):
        return _stray(run, task, Verdict.DUPLICATE, event.attempt, now, changes)
    else:
        _attempt_failed(run, task, event, now, changes)
    _end_if_over(run, now, changes)
    return _APPLIED


def _is_repeated_failure(task: Task, event: Answered) -> bool:
    """Whether this failure was counted before. A success needs no such care: it closes the task at once."""
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
    """Only what time or the quorum closed: an answer or an operator had the last word on the rest."""
    if run.head.status is RunStatus.CANCELLED:
        return False
    return task.status is TaskStatus.TIMED_OUT or task.cause is Cause.QUORUM


def _stray(run: Run, task: Task, verdict: Verdict, attempt: int | None, now: float, changes: Changes) -> Verdict:
    head = run.head
    if verdict is Verdict.LATE:
        head.late += 1
    else:
        head.duplicates += 1
    changes.dirty = True
    if head.late + head.duplicates <= TOLD_STRAYS:
        changes.tell(now, Happened.LATE if verdict is Verdict.LATE else Happened.DUPLICATE, task.number, attempt)
    return verdict


def _progressed(run: Run, event: Progressed, now: float, changes: Changes) -> Verdict:
    task = run.tasks[event.task]
    if not task.is_open or not task.attempt or task.missing:
        return Verdict.LATE if task.attempt else Verdict.UNKNOWN
    if event.attempt is not None and (event.attempt < task.attempt or task.awaits_retry):
        return Verdict.LATE  # that attempt has failed: it would be taken for how far the next one is
    if event.percent is not None:
        task.percent = event.percent
    # A report that says nothing shows that somebody is at work all the same.
    task.note = event.note if event.note is not None or task.percent is not None else ""
    changes.touch(task)
    if run.head.entries < _told_entries(run):
        percent = "" if event.percent is None else f"{event.percent:g} %"
        detail = f"{percent} {event.note or ''}".strip() or None
        changes.tell(now, Happened.PROGRESS, task.number, task.attempt, detail)
    return Verdict.APPLIED


def tell_refused(run: Run, task_id: str | None, why: str, now: float, changes: Changes) -> None:
    """Of an answer that is put aside: whoever looks why the run waits looks here. `task_id`: what it names."""
    if run.head.entries < _told_entries(run) // 2:
        task = None if task_id is None else run.plan.by_id.get(task_id)
        changes.tell(now, Happened.ANSWER_REFUSED, task, detail=why)


def _told_entries(run: Run) -> int:
    return TOLD_ENTRIES + TOLD_ENTRIES_PER_TASK * run.head.total


def _succeed(run: Run, task: Task, payload: bytes, now: float, changes: Changes) -> None:
    task.result, task.reason = payload, None
    task.percent = None if task.percent is None else 100.0
    _close(run, task, _SUCCEED, now, changes)
    changes.tell(now, _TASK_SUCCEEDED, task.number, task.attempt)
    for number in run.plan.dependents[task.number]:
        dependent = run.tasks[number]
        dependent.missing -= 1
        if not dependent.missing and dependent.is_open:
            _dispatch(run, dependent, now, changes)


def _attempt_failed(run: Run, task: Task, event: Answered, now: float, changes: Changes) -> None:
    task.mark = event.mark
    task.reason = event.reason
    reason = event.reason
    if (passed := _deadline_passed(run, task, now)) is not None:  # its timer is a moment behind
        changes.tell(now, Happened.ATTEMPT_FAILED, task.number, task.attempt, _traced(run, reason, event))
        _expire(run, task, passed, _why_expired(run, task, passed), now, changes)
        return
    if event.retryable and task.attempt < task.last_attempt:
        delay = run.plan.steps[task.number].retry.delay(task.attempt, event.jitter)
        if now + delay < min(run.head.deadline, task.deadline or run.head.deadline):
            _schedule_retry(run, task, now, delay, changes, event)
            return
        reason = f"{reason} (no time left for another attempt before the deadline)"
    task.cause, task.reason = Cause.ANSWER, reason
    _close(run, task, Trigger.FAIL, now, changes)
    changes.tell(now, Happened.FAILED, task.number, task.attempt, _traced(run, reason, event))
    task.dead_letter = task.unsent = True
    changes.dead_letters.append((task.number, task.attempt))
    _skip_dependents(run, task, now, changes)


def _traced(run: Run, reason: str, event: Answered) -> str:
    has_room = run.head.entries < run.head.total + TRACED_ENTRIES
    return with_traceback(reason, event.traceback if has_room else None)


def _schedule_retry(run: Run, task: Task, now: float, delay: float, changes: Changes, event: Answered) -> None:
    move(run, task, Trigger.RETRY)
    task.unsent = False
    task.due_at = now + delay
    task.percent = task.note = None
    changes.touch(task)
    detail = f"{task.reason}; next attempt in {in_words(delay)}"
    changes.tell(now, Happened.ATTEMPT_FAILED, task.number, task.attempt, _traced(run, detail, event))


def _amend(run: Run, task: Task, payload: bytes, now: float, changes: Changes) -> None:
    """A late success replaces the timeout. What depended on it stays skipped: its moment has passed."""
    move(run, task, Trigger.AMEND)
    task.result, task.cause, task.reason = payload, None, None
    task.ended_at = now
    changes.touch(task)
    changes.tell(now, Happened.AMENDED, task.number, task.attempt)
    for number in run.plan.dependents[task.number]:
        run.tasks[number].missing -= 1
    if run.is_open:
        _end_by_quorum(run, now, changes)
        _end_if_over(run, now, changes)
    else:
        _set_end(run, RunTrigger.AMEND, now, changes)
    blame_others(run, [task], changes)  # at last: what a quorum ended just now stands in the way, too


# -- timers -----------------------------------------------------------------------------------------------------


def _task_due(run: Run, event: TaskDue, now: float, changes: Changes) -> Verdict:
    task = run.tasks[event.task]
    if not task.is_open or task.due_at is None or task.due_at > now:
        return Verdict.NOTHING
    passed = _deadline_passed(run, task, now)
    if passed is None:
        _dispatch(run, task, now, changes, retry=True)
    else:
        _expire(run, task, passed, _why_expired(run, task, passed, event), now, changes)
        _end_if_over(run, now, changes)
    return Verdict.APPLIED


def _run_due(run: Run, event: RunDue, now: float, changes: Changes) -> Verdict:
    head = run.head
    if head.due_at is None or head.due_at > now:
        return Verdict.NOTHING
    if not run.is_open:
        return _lease_delivery(run, now, changes)
    for task in run.tasks:
        if task.is_open and not task.missing:
            passed = _deadline_passed(run, task, now) or Cause.RUN_DEADLINE
            _expire(run, task, passed, _why_expired(run, task, passed, event), now, changes)
    _end_if_over(run, now, changes)
    return Verdict.APPLIED


def _deadline_passed(run: Run, task: Task, now: float) -> Cause | None:
    """The earlier of the two, and of two at one moment the task's: whichever timer rings first, it is the same."""
    if task.deadline is not None and task.deadline <= min(now, run.head.deadline):
        return Cause.TASK_DEADLINE
    return Cause.RUN_DEADLINE if run.head.deadline <= now else None


def _expire(run: Run, task: Task, cause: Cause, why: str, now: float, changes: Changes) -> None:
    task.cause = cause
    task.reason = why
    _close(run, task, Trigger.EXPIRE, now, changes)
    changes.tell(now, Happened.TIMED_OUT, task.number, task.attempt, task.reason)
    _skip_dependents(run, task, now, changes)


def _why_expired(run: Run, task: Task, cause: Cause, timer: TaskDue | RunDue | None = None) -> str:
    """Return the reason of a timeout. Without `timer`: a failure came after the deadline and before its timer."""
    step = run.plan.steps[task.number]
    limit = step.timeout if cause is Cause.TASK_DEADLINE else run.head.timeout
    waited = in_words(limit or run.head.timeout)
    if timer is None or task.awaits_retry:
        return f"no success in {waited}; attempt {task.attempt} failed: {task.reason}"
    # The reason of the attempt before is all that a worker ever told.
    before = f"; attempt {task.attempt - 1} failed: {task.reason}" if task.reason else ""
    again = f" to attempt {task.attempt}" if before else ""
    why = timer.untaken.get(step.queue) or timer.untaken.get(None)
    if task.unsent and task.status is TaskStatus.PENDING:
        blame = f": the broker did not take the command ({why})" if why else ""
        return f"{f'attempt {task.attempt} ' if before else ''}not sent in {waited}{blame}{before}"
    if task.unsent:
        blame = f" ({why})" if why else ""
        cause_known = f"; the broker that had the command was lost, and it was not sent again{blame}"
    else:
        cause_known = why_unanswered(task, step.queue, timer.looks, timer.unheard)
    return f"no answer{again} in {waited}{cause_known}{before}"


# -- what operators ask -----------------------------------------------------------------------------------------


def _cancelled(run: Run, event: Cancelled, now: float, changes: Changes) -> Verdict:
    if not run.is_open:
        return Verdict.REFUSED
    run.head.cancelled = True
    _cancel_open(run, Cause.REQUEST, event.reason, now, changes)
    _set_end(run, RunTrigger.END, now, changes)
    return Verdict.APPLIED


def _repeated(run: Run, event: Repeated, now: float, changes: Changes) -> Verdict:
    again = [task for task in run.tasks if task.status is not TaskStatus.SUCCEEDED]
    quorum_met = run.plan.needed is not None and run.head.succeeded >= run.plan.needed
    if run.is_open or not again or quorum_met:
        return Verdict.REFUSED
    _reopen(run, again, "repeated", now, changes)
    return Verdict.APPLIED


def _redriven(run: Run, event: Redriven, now: float, changes: Changes) -> Verdict:
    task = run.tasks[event.task]
    if not task.attempt or task.is_open or task.status is TaskStatus.SUCCEEDED:
        return Verdict.REFUSED
    again = [task, *skipped_after(run, task)]
    _reopen(run, again, "redriven", now, changes)
    blame_others(run, again, changes)
    return Verdict.APPLIED


def _reopen(run: Run, tasks: list[Task], how: str, now: float, changes: Changes) -> None:
    head = run.head
    if not run.is_open:  # else it keeps its deadline, which workers have as the `prazo` of their commands
        move_run(run, RunTrigger.REOPEN, RunStatus.RUNNING)
        changes.tell(now, Happened.RUN_REOPENED, detail=how)
        head.ended_at, head.cancelled = None, False
        changes.ended, changes.deliver = False, ()
        head.deadline = head.due_at = now + head.timeout
    for task in tasks:
        move(run, task, Trigger.REOPEN)
        # The attempts go on counting, so that a worker never takes a repeat for a command it has answered.
        task.last_attempt = task.attempt + run.plan.steps[task.number].retry.max_attempts
        task.cause = task.reason = task.deadline = task.due_at = task.ended_at = None
        task.percent = task.note = None
        task.dead_letter = task.unsent = False
        changes.touch(task)
        changes.tell(now, Happened.REOPENED, task.number, task.attempt or None, how)
    for task in tasks:
        if not task.missing:
            _dispatch(run, task, now, changes)


def _dead_letter_discarded(run: Run, event: DeadLetterDiscarded, now: float, changes: Changes) -> Verdict:
    task = run.tasks[event.task]
    if not task.dead_letter:
        return Verdict.NOTHING
    task.dead_letter = task.unsent = False
    changes.touch(task)
    changes.tell(now, Happened.DEAD_LETTER_DISCARDED, task.number, task.attempt)
    return Verdict.APPLIED


# -- delivery of the aggregate ----------------------------------------------------------------------------------


def _delivered(run: Run, event: Delivered, now: float, changes: Changes) -> Verdict:
    delivery = run.head.deliveries[event.channel]
    if event.edition != run.head.edition or delivery.status is not DeliveryStatus.PENDING:
        return Verdict.NOTHING
    delivery.status, delivery.error, delivery.due_at = DeliveryStatus.DELIVERED, None, None
    delivery.attempts += 1
    detail = f"{delivery.channel} {delivery.target}, versao {event.edition}"
    changes.tell(now, Happened.DELIVERED, detail=detail)
    _next_delivery(run)
    return Verdict.APPLIED


def _delivery_failed(run: Run, event: DeliveryFailed, now: float, changes: Changes) -> Verdict:
    delivery = run.head.deliveries[event.channel]
    if event.edition != run.head.edition or delivery.status is not DeliveryStatus.PENDING:
        return Verdict.NOTHING
    delivery.attempts += 1
    delivery.error, delivery.due_at = event.reason, event.retry_at
    what = Happened.DELIVERY_FAILED
    if event.retry_at is None:
        delivery.status, what = DeliveryStatus.UNDELIVERED, Happened.UNDELIVERED
    changes.tell(now, what, attempt=delivery.attempts, detail=f"{delivery.channel} {delivery.target}: {event.reason}")
    _next_delivery(run)
    return Verdict.APPLIED


def _lease_delivery(run: Run, now: float, changes: Changes) -> Verdict:
    """A delivery is due: whoever commits this change makes the attempt."""
    for number, delivery in enumerate(run.head.deliveries):
        if delivery.status is DeliveryStatus.PENDING and delivery.due_at is not None and delivery.due_at <= now:
            delivery.due_at = now + DELIVERY_LEASE
            changes.deliver = (*changes.deliver, number)
            changes.dirty = True
    _next_delivery(run)
    return Verdict.APPLIED


def _delivery_moved(run: Run, event: DeliveryMoved, now: float, changes: Changes) -> Verdict:
    """Not when another has taken it over since, or it is done."""
    delivery = run.head.deliveries[event.channel]
    is_pending = event.edition == run.head.edition and delivery.status is DeliveryStatus.PENDING
    if not is_pending or delivery.due_at != event.due_at:
        return Verdict.NOTHING
    delivery.due_at = event.until
    changes.dirty = True
    _next_delivery(run)
    return Verdict.APPLIED


def _next_delivery(run: Run) -> None:
    due = [d.due_at for d in run.head.deliveries if d.status is DeliveryStatus.PENDING and d.due_at is not None]
    if not run.is_open:
        run.head.due_at = min(due, default=None)


# -- moves ------------------------------------------------------------------------------------------------------


def _dispatch(run: Run, task: Task, now: float, changes: Changes, *, retry: bool = False) -> None:
    """Decides that the next attempt of the task is sent. The commit of this decision is what makes it so."""
    if not retry:
        run.expect_answer(task.number)
    task.attempt += 1
    task.unsent = True
    if task.deadline is None:
        timeout = run.plan.steps[task.number].timeout
        task.deadline = None if timeout is None else now + timeout
    task.due_at = task.deadline
    changes.touch(task)
    changes.commands.append((task.number, task.attempt))


def _close(run: Run, task: Task, trigger: Trigger, now: float, changes: Changes) -> None:
    if task.attempt and not task.missing:
        run.expect_no_answer(task.number)
    move(run, task, trigger)
    task.unsent = False
    task.due_at = None
    task.ended_at = now
    changes.touch(task)


def _skip_dependents(run: Run, failed: Task, now: float, changes: Changes) -> None:
    causes = [failed.number]
    while causes:
        cause = causes.pop()
        for number in run.plan.dependents[cause]:
            task = run.tasks[number]
            if task.status is not TaskStatus.PENDING:
                continue
            task.cause = Cause.DEPENDENCY
            task.reason = why_skipped(run, run.tasks[cause])
            _close(run, task, Trigger.SKIP, now, changes)
            changes.tell(now, Happened.SKIPPED, number, detail=task.reason)
            causes.append(number)


def _cancel_open(run: Run, cause: Cause, reason: str, now: float, changes: Changes) -> None:
    for task in run.tasks:
        if task.is_open:
            task.cause, task.reason = cause, reason
            _close(run, task, Trigger.CANCEL, now, changes)
            changes.tell(now, Happened.CANCELLED, task.number, task.attempt or None, reason)


def _end_by_quorum(run: Run, now: float, changes: Changes) -> None:
    """By the very success that meets it: what is redriven afterwards is wanted although it was met before."""
    needed = run.plan.needed
    if run.open_tasks and run.head.succeeded == needed:
        _cancel_open(run, Cause.QUORUM, f"the quorum of {needed} was met without it", now, changes)


def _end_if_over(run: Run, now: float, changes: Changes) -> None:
    if not run.open_tasks and run.is_open:
        _set_end(run, RunTrigger.END, now, changes)


def _set_end(run: Run, trigger: RunTrigger, now: float, changes: Changes) -> None:
    head = run.head
    move_run(run, trigger, end_status(run))
    if trigger is RunTrigger.END:
        head.ended_at = now
    head.edition += 1
    for delivery in head.deliveries:
        delivery.status, delivery.edition, delivery.attempts = DeliveryStatus.PENDING, head.edition, 0
        delivery.due_at, delivery.error = now + DELIVERY_LEASE, None
    _next_delivery(run)
    changes.ended = True
    changes.deliver = range(len(head.deliveries))
    changes.tell(now, Happened.RUN_ENDED, detail=f"{head.status}, versao {head.edition}")


_HANDLERS: dict[type[Event], Callable[[Run, Any, float, Changes], Verdict]] = {
    Sent: _sent,
    Unsendable: _unsendable,
    BrokerLost: _broker_lost,
    Answered: _answered,
    Progressed: _progressed,
    TaskDue: _task_due,
    RunDue: _run_due,
    Cancelled: _cancelled,
    Repeated: _repeated,
    Redriven: _redriven,
    DeadLetterDiscarded: _dead_letter_discarded,
    Delivered: _delivered,
    DeliveryFailed: _delivery_failed,
    DeliveryMoved: _delivery_moved,
}
