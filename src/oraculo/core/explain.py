"""The explanation of a run: a sentence that says what it waits for, until when, and what happens then."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from oraculo.core.aggregate import end_status, summary
from oraculo.core.masking import masked
from oraculo.core.run import Channel, DeliveryStatus, Run, RunDelivery, Task, TaskStatus
from oraculo.pipeline.bridges import BULLMQ, Bridge, ForeignQueue
from oraculo.pipeline.definition import Kind, Step
from oraculo.wire.naming import ANSWERS, dlq_of
from oraculo.wire.timestamps import in_words, to_iso

NAMED = 3  # tasks in a sentence
_NONE: Mapping[str, str] = MappingProxyType({})
_CONTROLS = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if not chr(code).isspace())
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")  # the user and password in a URL


class Audience(NamedTuple):
    """The state of a queue and its consumers, as its broker reports it."""

    consumers: int | None  # None when the broker does not say
    held: int | None  # messages that somebody took and has not settled; None when not known
    ready: int = 0  # messages that nobody has taken
    dead_letters: int = 0
    own_dead_letters: Mapping[int, str] | None = None  # by task, why its command is a dead letter; None when not known
    at: Mapping[str, "Audience"] = MappingProxyType({})  # by broker, when there are several
    delayed: int = 0  # those of `ready` that are not due yet
    is_bridged: bool = False  # a bridge reads it and passes the commands on to another system
    foreign: Mapping[str, ForeignQueue] = MappingProxyType({})  # by URL, the known state of the queue in that system
    paused: str | None = None  # why the broker delivers none of its messages
    meant: str | None = None  # a queue with a similar name that has consumers, when this one has none
    is_to_blame: bool = True  # False when the engine itself hears nothing, so that a silent worker proves nothing


_UNKNOWN = Audience(None, 0)
_SLOW = 10.0  # seconds without progress after which the sentence says where the command may be


def explain(
    run: Run,
    now: float,
    audiences: Mapping[str, Audience],
    troubles: Mapping[str, str] = _NONE,
    refusals: Mapping[str, str] = _NONE,
    refused_answers: Sequence[str] = (),
    missing: Sequence[str] = (),
    standstill: str | None = None,
) -> str:
    """Return the sentence that explains the state of a run.

    `audiences`: the known states of its queues.
    `troubles`: why a broker or queue cannot be used now.
    `refusals`: why a queue did not take the run's commands. The command itself may be wrong.
    `refused_answers`: why the run's latest answers went to the dead letters.
    `missing`: what the run may need and this installation lacks, in words.
    `standstill`: why the engine decides nothing now, not even that a deadline has passed.
    """
    refused = _what_was_refused(refused_answers)
    if not run.is_open:
        return _why_ended(run, now, audiences, refused)
    return _why_open(run, now, audiences, _what_is_away(troubles, refusals, missing, standstill) + refused)


def _why_open(run: Run, now: float, audiences: Mapping[str, Audience], away: str) -> str:
    open_tasks = [task for task in run.tasks if task.is_open]
    active = [task for task in open_tasks if not task.missing]
    states = [_task_state(run, task, now, audiences) for task in active[:NAMED]]
    if len(active) > NAMED:
        states.append(f"{len(active) - NAMED} more")
    blocked = len(open_tasks) - len(active)
    behind = (
        f"; {_count(blocked, 'task')} behind {'it' if len(active) == 1 else 'them'} cannot start before"
        if blocked
        else ""
    )
    return (
        f"Run {run.id} has {len(open_tasks)} of {_count(run.head.total, 'task')} open and waits for "
        f"{_join(states)}{behind}{away}; {_what_then(run, now, active)}."
    )


def _what_is_away(
    troubles: Mapping[str, str], refusals: Mapping[str, str], missing: Sequence[str], standstill: str | None
) -> str:
    away = "".join(f"; {name} cannot be used ({_line(why)})" for name, why in troubles.items())
    away += "".join(f"; queue {name} does not take the command ({_line(why)})" for name, why in refusals.items())
    away += "".join(f"; {what}" for what in missing)
    return away if standstill is None else f"{away}; nothing is decided now ({_line(standstill)})"


def _what_was_refused(answers: Sequence[str]) -> str:
    if not answers:
        return ""
    some = "an answer was refused" if len(answers) == 1 else "answers were refused, the last of them"
    return f"; {some} ({_line(answers[-1])}; see {dlq_of(ANSWERS)})"


def _task_state(run: Run, task: Task, now: float, audiences: Mapping[str, Audience]) -> str:
    step = run.plan.steps[task.number]
    attempt = f"attempt {task.attempt} of {task.last_attempt}"
    if task.awaits_retry:
        due = in_words(max(0.0, (task.due_at or now) - now))
        failed = f"attempt {task.attempt} of {task.last_attempt} failed: {_line(task.reason)}"
        return f"'{step.id}' ({failed}; the next is due in {due})"
    if task.unsent:
        return f"'{step.id}' ({attempt}, not yet confirmed by the broker on queue {step.queue})"
    waited = max(0.0, now - (task.sent_at or now))
    progress = "" if task.percent is None else f", {task.percent:g} % done"
    own = f", its own deadline in {in_words(max(0.0, task.deadline - now))}" if task.deadline is not None else ""
    audience = audiences.get(step.queue, _UNKNOWN)
    why = _whereabouts(step.queue, audience, task, waited) + _in_foreign_queue(step, task, audience, waited)
    to = "" if step.bridge is None else f" to {step.bridge.url}"
    return f"'{step.id}' ({attempt}, sent {in_words(waited)} ago{to}{progress}{own}{why})"


def _whereabouts(queue: str, audience: Audience, task: Task, waited: float) -> str:
    """Return where a sent command may be. Nothing is suspected while a worker may just be busy with it."""
    deaf = _deafness(queue, audience, task.via)
    if resting := _dead_letter(queue, audience, task):
        return deaf + resting
    if waited < _SLOW:
        return deaf
    if task.percent is not None or task.note is not None:  # its worker may have ended since, if nobody listens
        return deaf + (_suspicion(queue, audience) if deaf else "")
    waiting = _backlog(queue, audience, task.via) or _absence(queue, audience, task.via)
    return deaf + waiting + _suspicion(queue, audience)


def _deafness(queue: str, audience: Audience, via: str | None) -> str:
    """Return that nobody listens on the queue, at the broker that has the command.

    A plain worker of Redis is unknown to the broker while it works, so a message that somebody took is mentioned.
    """
    there = _at(audience, via)
    if there.paused:
        return f", and nobody is given what is in queue {queue} ({there.paused})"
    if there.consumers != 0:
        return ""
    place = f"{queue} at broker {via}" if any(one.consumers != 0 for one in audience.at.values()) else queue
    if not there.held:
        return f", and nobody listens on queue {place}{_meant(audience)}"
    held = _count(there.held, "message")
    fate = " and is at work, or gone" if audience.is_to_blame else ""
    return f", and nobody listens on queue {place} now, but somebody took {held} of it{fate}"


def _at(audience: Audience, via: str | None) -> Audience:
    """Return the state of the queue at the broker that has the command."""
    return audience.at.get(via or "", _UNKNOWN) if audience.at else audience


def _backlog(queue: str, audience: Audience, via: str | None) -> str:
    """Return how many messages wait in the queue. When nobody listens, `_deafness` says enough."""
    there = _at(audience, via)
    if not there.ready or (there.consumers == 0 and not there.held):
        return ""
    waiting = f"{_count(there.ready, 'message')} {'waits' if there.ready == 1 else 'wait'}"
    place = f"{queue} at broker {via}" if len(audience.at) > 1 else queue
    listening = ""
    if there.consumers:
        listening = f", where {there.consumers} {'listens' if there.consumers == 1 else 'listen'}"
    elif there.consumers is None and there.held == 0 and there.ready > there.delayed:
        listening = f", and nobody seems to take {'it' if there.ready == 1 else 'them'}{_meant(audience)}"
    return f", and {waiting} in queue {place}{listening}"


def _meant(audience: Audience) -> str:
    return "" if audience.meant is None else f": did you mean '{audience.meant}'?"


def _absence(queue: str, audience: Audience, via: str | None) -> str:
    """Return that the command is no longer in its queue.

    It may have been lost with a deleted queue, which no broker reports. A worker that starts then waits in vain.
    """
    there = _at(audience, via)
    if there is _UNKNOWN or there.ready or audience.is_bridged or (there.consumers == 0 and there.held):
        return ""
    gone = "it is no longer there" if there.consumers == 0 else f"no longer in queue {queue}"
    fate = ": whoever took it is at work, or gone, or the queue was emptied" if audience.is_to_blame else ""
    return f", and {gone}{fate}"


def passed_on_to(step: Step) -> Bridge:
    """Return the bridge of a step. A bridge that reads a queue of ours passes commands on to its namesake in BullMQ."""
    return step.bridge or Bridge(BULLMQ, step.queue)


def _in_foreign_queue(step: Step, task: Task, audience: Audience, waited: float) -> str:
    there = audience.foreign.get(passed_on_to(step).url)
    if there is None:
        return ""
    if there.listening == 0:
        return f", and nobody listens on {there.place}"
    is_in_work = there.held != 0 and (task.percent is not None or task.note is not None)
    if is_in_work:  # a progress report is outdated when the system says that nobody holds a message
        return ""
    if there.is_paused:
        return f", and {there.place} is paused"
    if waited < _SLOW or not there.waiting:
        return ""
    waiting = f", and {_count(there.waiting, 'message')} {'waits' if there.waiting == 1 else 'wait'} in {there.place}"
    if there.listening:
        return f"{waiting}, where {there.listening} {'listens' if there.listening == 1 else 'listen'}"
    if there.held == 0:
        return f"{waiting}, and nobody seems to take {'it' if there.waiting == 1 else 'them'}"
    return waiting


def _dead_letter(queue: str, audience: Audience, task: Task) -> str:
    """Return that the command is in the dead letters, perhaps because its worker ended each time that it had it."""
    if (why := (audience.own_dead_letters or {}).get(task.number)) is None:
        return ""
    look = f"look at it with {_listing(queue)}, and redrive or discard it"
    return f", and its command is in {dlq_of(queue)}: {_line(why)}; {look}"


def _suspicion(queue: str, audience: Audience) -> str:
    """Return that the command may be one of the dead letters, when nobody looked whose they are.

    Nothing is suspected while the command may be in the queue or in work. The steps behind a bridge share one
    dead-letter queue, which proves nothing about a single step.
    """
    is_unlikely = audience.ready or audience.held or audience.is_bridged
    if audience.own_dead_letters is not None or not audience.dead_letters or is_unlikely:
        return ""
    letters = _count(audience.dead_letters, "dead letter")
    return (
        f"; if nobody is at work on it, it may be in {dlq_of(queue)}, which has {letters}: {_listing(queue)} shows it"
    )


def _listing(queue: str) -> str:
    return f"`oraculo dlq list {queue}`"


def _what_then(run: Run, now: float, active: Sequence[Task]) -> str:
    """Return what happens if nobody answers: the run ends when the last of the active tasks expires."""
    moments = [_expiry(run, task) for task in active]
    end, deadline = max(moments, default=run.head.deadline), run.head.deadline
    is_overdue, has_blocked = end < now, run.open_tasks > len(active)
    sooner = ""
    if moments and min(moments) < end and not is_overdue:
        sooner = (
            f"what does not answer by its own deadline, the nearest {_moment(min(moments), now)}, is marked timeout; "
        )
    when = f"it waits until {_moment(end, now)}, when"
    if is_overdue:  # the engine that decides may be late or away, so no moment is promised
        when = f"it was to wait until {_moment(end, now)}, and as soon as an engine takes that up"
    marked = (
        f"what has not answered is marked timeout and the run ends as {end_status(run)}{_end_with(run, has_blocked)}"
    )
    later = ""
    if has_blocked and end < deadline:
        later = f"; should an answer let more be sent, it ends at {_moment(deadline, now)} at the latest"
    return f"{sooner}{_quorum_ahead(run)}{when} {marked}{later}"


def _expiry(run: Run, task: Task) -> float:
    return run.head.deadline if task.deadline is None else min(task.deadline, run.head.deadline)


def _end_with(run: Run, has_blocked: bool) -> str:
    if run.plan.kind is Kind.PIPELINE:
        return ", and what depends on them is ignorada" if has_blocked else ""
    return " with what it has" if run.head.succeeded else " unless an answer comes"


def _quorum_ahead(run: Run) -> str:
    """Return how many successes end the run, unless the quorum was met before or can no longer be met."""
    if run.plan.needed is None:
        return ""
    missing = run.plan.needed - run.head.succeeded
    possible = run.open_tasks + (run.head.timed_out if run.plan.amends else 0)
    if not 0 < missing <= possible:
        return ""
    return f"it ends at once with {_count(missing, 'more success', 'more successes')} (quorum {run.plan.needed}), else "


def _moment(at: float, now: float) -> str:
    return f"{to_iso(at)} ({in_words(now - at)} ago)" if at < now else f"{to_iso(at)} ({in_words(at - now)} from now)"


def not_succeeded(run: Run) -> list[Task]:
    """Return the tasks that may have kept a run from success. A skipped task is never the cause."""
    return [task for task in run.tasks if task.status not in (TaskStatus.SUCCEEDED, TaskStatus.SKIPPED)]


_TALLY = {
    "concluidas": ("success", "successes"),
    "erros": ("error", "errors"),
    "timeouts": ("timeout", "timeouts"),
    "ignoradas": ("skipped", "skipped"),
    "canceladas": ("cancelled", "cancelled"),
}


def _why_ended(run: Run, now: float, audiences: Mapping[str, Audience], refused: str) -> str:
    counts = summary(run.head)
    tally = ", ".join(_count(counts[field], *words) for field, words in _TALLY.items() if counts[field])
    lost = not_succeeded(run)
    why = "; ".join(_end_state(run, task, audiences) for task in lost[:NAMED])
    more = f"; {len(lost) - NAMED} more" if len(lost) > NAMED else ""
    when = to_iso(run.head.ended_at if run.head.ended_at is not None else run.head.deadline)
    deliveries = "".join(f"; {_delivery_state(delivery, now)}" for delivery in run.head.deliveries)
    is_delivering = any(delivery.status is DeliveryStatus.PENDING for delivery in run.head.deliveries)
    return (
        f"Run {run.id} ended as {run.head.status} at {when} with {tally} of {_count(run.head.total, 'task')}"
        f"{' (' + why + more + ')' if why else ''}{refused}{deliveries}"
        f"; it waits for nothing{' else' if is_delivering else ''}."
    )


def _end_state(run: Run, task: Task, audiences: Mapping[str, Audience]) -> str:
    step, resting = run.plan.steps[task.number], ""
    if task.status is TaskStatus.TIMED_OUT and task.sent_at is not None:
        audience = audiences.get(step.queue, _UNKNOWN)
        resting = _dead_letter(step.queue, audience, task) or _suspicion(step.queue, audience)
    return f"'{step.id}' {task.status}: {_line(task.reason)}{resting}"


def _delivery_state(delivery: RunDelivery, now: float) -> str:
    what = f"its aggregate for {delivery.channel} {_line(masked(delivery.target))}"
    if delivery.status is DeliveryStatus.DELIVERED:
        return f"{what} was delivered"
    why = f" ({_line(masked(delivery.error))})" if delivery.error else ""
    tried = f"after {_count(delivery.attempts, 'attempt')}{why}"
    if delivery.status is DeliveryStatus.UNDELIVERED:
        return f"{what} is given up {tried}"
    if not delivery.attempts:
        under_way = "the first attempt is under way, or waits for its turn behind others for the same receiver"
        return f"{what} is not delivered yet: {under_way}"
    left = in_words(max(0.0, (delivery.due_at or now) - now))
    if delivery.channel is Channel.QUEUE:  # only the first attempt is counted while its broker is away
        return f"{what} is not delivered yet{why}, and is tried again now or within {left}"
    return f"{what} is not delivered yet {tried}, and the next is under way or due within {left}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _line(text: str | None) -> str:
    """Return a foreign text in one line, without control characters and passwords of URLs."""
    return _LOGIN.sub("***@", " ".join(str(text).translate(_CONTROLS).split()))


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1] if parts else "nothing"
