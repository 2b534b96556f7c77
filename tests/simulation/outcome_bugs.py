"""Bugs that break the contract and, for the most part, no law: each is a small change of the product's own code.

The oracle is to see them. `make planted-bugs` counts the seeds that it takes to catch each.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from oraculo.brokers.failover.broker import FailoverBroker
from oraculo.brokers.failover.routing import Routing
from oraculo.core import aggregate, command, machine, plan, request
from oraculo.core.aggregate import end_status
from oraculo.core.answers import read_answer
from oraculo.core.events import Event
from oraculo.core.machine import Verdict, ending, moves, operators, timeout_reason
from oraculo.core.machine import answers as machine_answers
from oraculo.core.run import Cause, Changes, Run, RunHead, RunStatus, Task, TaskStatus
from oraculo.engine import after_commit
from oraculo.engine.decide import decider
from oraculo.engine.send import outbox
from oraculo.errors import QueueUnavailable
from oraculo.pipeline.definition import Kind, quorum_needed
from oraculo.pipeline.retry import RetryPolicy
from oraculo.ports.broker import Outgoing, Receipt
from oraculo.ports.store import Created, Creation, CreationOutcome
from oraculo.stores import records
from oraculo.stores.commit_queue import Taken, Write
from oraculo.stores.records import Record
from oraculo.stores.sqlite import rows, store
from oraculo.stores.sqlite.bulk import NULL
from oraculo.worker import answers, dispatch
from oraculo.worker.dispatch import Dispatcher
from oraculo.worker.outbox import AnswerOutbox

Plant = Callable[[pytest.MonkeyPatch], None]


# -- the engine: deadlines and attempts -----------------------------------------------------------------------------


def the_timer_of_a_run_rings_30_s_late(patch: pytest.MonkeyPatch) -> None:
    real = machine.start

    def start(run: Run, now: float) -> Changes:
        changes = real(run, now)
        run.head.due_at = run.head.deadline + 30.0
        return changes

    patch.setattr(machine, "start", start)


def a_retry_begins_the_timeout_of_its_step_anew(patch: pytest.MonkeyPatch) -> None:
    real = moves.dispatch

    def dispatch(run: Run, task: Task, now: float, changes: Changes, *, retry: bool = False) -> None:
        task.deadline = None
        real(run, task, now, changes, retry=retry)

    patch.setattr(moves, "dispatch", dispatch)


def the_timeout_of_a_step_begins_with_its_run(patch: pytest.MonkeyPatch) -> None:
    real = moves.dispatch

    def dispatch(run: Run, task: Task, now: float, changes: Changes, *, retry: bool = False) -> None:
        real(run, task, run.head.created_at, changes, retry=retry)

    patch.setattr(moves, "dispatch", dispatch)


def a_step_has_one_attempt_too_many(patch: pytest.MonkeyPatch) -> None:
    real = machine.start

    def start(run: Run, now: float) -> Changes:
        changes = real(run, now)
        for task in run.tasks:
            task.last_attempt += 1
        return changes

    patch.setattr(machine, "start", start)


def the_first_pause_is_doubled_already(patch: pytest.MonkeyPatch) -> None:
    def delay(self: RetryPolicy, attempt: int, jitter: float) -> float:
        return min(self.max_backoff, self.backoff * 2.0**attempt) * jitter

    patch.setattr(RetryPolicy, "delay", delay)


def a_failure_that_asks_for_no_other_attempt_is_retried(patch: pytest.MonkeyPatch) -> None:
    real = read_answer

    def read(*args: Any, **options: Any) -> Event | str:
        event = real(*args, **options)
        return msgspec.structs.replace(event, retryable=True) if getattr(event, "failed", False) else event

    patch.setattr(decider, "read_answer", read)


def a_step_of_a_repeated_run_has_one_attempt(patch: pytest.MonkeyPatch) -> None:
    real = operators._reopen

    def reopen(run: Run, tasks: list[Task], how: str, now: float, changes: Changes) -> None:
        real(run, tasks, how, now, changes)
        for task in tasks:
            task.last_attempt = task.attempt + (0 if task.unsent else 1)

    patch.setattr(operators, "_reopen", reopen)


# -- the engine: how runs and tasks end -----------------------------------------------------------------------------


def a_quorum_is_met_with_one_too_few(patch: pytest.MonkeyPatch) -> None:
    def needed(quorum: int | str | None, total: int) -> int | None:
        count = quorum_needed(quorum, total)
        return None if count is None else max(1, count - 1)

    patch.setattr(plan, "quorum_needed", needed)


def a_quorum_that_is_met_ends_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ending, "end_by_quorum", lambda run, now, changes: None)


def a_late_answer_amends_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine_answers, "_may_be_amended", lambda run, task: False)


def a_late_answer_counts_as_a_repeat(patch: pytest.MonkeyPatch) -> None:
    real = machine_answers._stray

    def stray(run: Run, task: Task, verdict: Verdict, *rest: Any) -> Verdict:
        return real(run, task, Verdict.DUPLICATE, *rest)

    patch.setattr(machine_answers, "_stray", stray)


def an_optional_step_fails_its_run(patch: pytest.MonkeyPatch) -> None:
    real = Run.count_unsuccessful

    def count(self: Run, task: Task, status: TaskStatus, by: int) -> None:
        real(self, task, status, by)
        if self.plan.steps[task.number].optional and status is TaskStatus.FAILED:
            self.required_failed += by

    patch.setattr(Run, "count_unsuccessful", count)


def a_fan_out_without_a_success_is_partial(patch: pytest.MonkeyPatch) -> None:
    def status(run: Run) -> RunStatus:
        is_empty = run.plan.kind is Kind.FAN_OUT and not run.head.succeeded and not run.head.cancelled
        return RunStatus.PARTIAL if is_empty else end_status(run)

    _end_as(patch, status)


def a_cancelled_run_is_partial(patch: pytest.MonkeyPatch) -> None:
    def status(run: Run) -> RunStatus:
        ended = end_status(run)
        return RunStatus.PARTIAL if ended is RunStatus.CANCELLED and run.head.succeeded else ended

    _end_as(patch, status)


def _end_as(patch: pytest.MonkeyPatch, status: Callable[[Run], RunStatus]) -> None:
    """Change the machine and the law that looks at it: both take the status from one function."""
    from oraculo.testing import checkers

    patch.setattr(ending, "end_status", status)
    patch.setattr(checkers, "end_status", status)


def a_repeat_leaves_what_was_skipped(patch: pytest.MonkeyPatch) -> None:
    real = operators._reopen

    def reopen(run: Run, tasks: list[Task], *rest: Any) -> None:
        real(run, [task for task in tasks if task.status is not TaskStatus.SKIPPED], *rest)

    patch.setattr(operators, "_reopen", reopen)


def a_repeated_run_keeps_its_old_deadline(patch: pytest.MonkeyPatch) -> None:
    real = operators._reopen

    def reopen(run: Run, tasks: list[Task], how: str, now: float, changes: Changes) -> None:
        before = run.head.deadline
        real(run, tasks, how, now, changes)
        run.head.deadline = run.head.due_at = before

    patch.setattr(operators, "_reopen", reopen)


def a_timeout_of_a_step_is_told_with_the_limit_of_its_run(patch: pytest.MonkeyPatch) -> None:
    real = timeout_reason.why_timed_out

    def why(run: Run, task: Task, cause: Cause, *timer: Any) -> str:
        return real(run, task, Cause.RUN_DEADLINE, *timer)

    patch.setattr(timeout_reason, "why_timed_out", why)


def the_first_failure_of_a_step_is_told_as_its_last(patch: pytest.MonkeyPatch) -> None:
    real = machine_answers._attempt_failed

    def failed(run: Run, task: Task, event: Any, now: float, changes: Changes) -> None:
        real(run, task, msgspec.structs.replace(event, reason=task.reason or event.reason), now, changes)

    patch.setattr(machine_answers, "_attempt_failed", failed)


# -- the engine: results, commands and aggregates -------------------------------------------------------------------


def a_result_is_kept_as_an_empty_object(patch: pytest.MonkeyPatch) -> None:
    _keep_results(patch, lambda payload: b"{}")


def a_result_is_written_anew(patch: pytest.MonkeyPatch) -> None:
    """It is the same JSON, and not the bytes that came."""
    _keep_results(patch, lambda payload: msgspec.json.encode(msgspec.json.decode(payload)))


def _keep_results(patch: pytest.MonkeyPatch, kept: Callable[[bytes], bytes]) -> None:
    real = machine_answers._succeed

    def succeed(run: Run, task: Task, payload: bytes, now: float, changes: Changes) -> None:
        real(run, task, kept(payload), now, changes)

    patch.setattr(machine_answers, "_succeed", succeed)


def only_the_first_dependency_hands_its_result_on(patch: pytest.MonkeyPatch) -> None:
    real = command._results_of
    patch.setattr(command, "_results_of", lambda run, sources, results: real(run, sources[:1], results))


def the_deadline_of_a_command_is_that_of_its_run(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(command, "deadline_of", lambda run, task: run.head.deadline)


def a_destination_gets_the_payload_of_the_request_for_its_own(patch: pytest.MonkeyPatch) -> None:
    real = command._payload

    def payload(run: Run, task: Task, *rest: Any) -> msgspec.Raw:
        return msgspec.Raw(run.payload) if run.plan.kind is Kind.FAN_OUT else real(run, task, *rest)

    patch.setattr(command, "_payload", payload)


def what_a_request_gives_a_collector_goes_before_its_config(patch: pytest.MonkeyPatch) -> None:
    def parameters(entry: bytes, config: msgspec.Raw) -> dict[str, msgspec.Raw]:
        given = command._parameters.decode(entry).parametros
        return {**(command._object.decode(config) if config else {}), **command._object.decode(given)}

    patch.setattr(command, "_collector_parameters", parameters)


def the_timeout_of_a_request_does_not_hold_for_its_pipeline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request, "_overrides", lambda request: {"timeout": None, "quorum": request.quorum})


def commands_have_no_priority(patch: pytest.MonkeyPatch) -> None:
    def outgoing(queue: str, body: bytes, priority: int, *rest: Any, **options: Any) -> Outgoing:
        return Outgoing(queue, body, 0, *rest, **options)

    patch.setattr(outbox, "Outgoing", outgoing)


def a_dead_letter_says_only_that_its_task_failed(patch: pytest.MonkeyPatch) -> None:
    real = outbox.Outbox._line_up

    def line_up(self: outbox.Outbox, key: Any, run: Run, dead: str | None, *rest: Any) -> None:
        real(self, key, run, None if dead is None else "see its run", *rest)

    patch.setattr(outbox.Outbox, "_line_up", line_up)


def an_aggregate_counts_its_duration_in_seconds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(aggregate, "duration_ms", lambda since, until: max(0, round(until - since)))


# -- the worker -----------------------------------------------------------------------------------------------------


def a_worker_acks_before_its_answer_is_confirmed(patch: pytest.MonkeyPatch) -> None:
    real = AnswerOutbox._send_batch

    async def send(self: AnswerOutbox, jobs: Any, batch: Any, messages: Any) -> None:
        await self._settle(batch)
        await real(self, jobs, batch, messages)

    patch.setattr(AnswerOutbox, "_send_batch", send)


def a_worker_takes_an_answer_that_had_no_room_for_confirmed(patch: pytest.MonkeyPatch) -> None:
    async def read(self: AnswerOutbox, batch: Any, receipts: Any, jobs: Any) -> None:
        await self._settle_soon(batch, jobs)

    patch.setattr(AnswerOutbox, "_read_receipts", read)


def a_worker_works_on_a_repeat_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "_is_repeat", lambda self, identity, receipt: False)


def a_worker_takes_another_attempt_for_a_repeat(patch: pytest.MonkeyPatch) -> None:
    real = dispatch.identity_of

    def identity_of(message: Any) -> Any:
        known = real(message)
        return None if known is None else (*known[:2], 1)

    patch.setattr(dispatch, "identity_of", identity_of)


def a_worker_wants_a_retry_whatever_its_handler_says(patch: pytest.MonkeyPatch) -> None:
    real = answers.failure_of
    patch.setattr(dispatch, "failure_of", lambda error: real(error)._replace(retry=True))


def a_worker_gives_its_handler_up_a_second_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dispatch, "DEADLINE_GRACE", -1.0)


def a_worker_begins_a_command_whose_deadline_has_passed(patch: pytest.MonkeyPatch) -> None:
    real = Dispatcher._answer

    async def begin(self: Dispatcher, job: Any) -> bytes:
        deadline, job.deadline = job.deadline, None
        try:
            return await real(self, job)
        finally:
            job.deadline = deadline

    patch.setattr(Dispatcher, "_answer", begin)


def a_worker_answers_a_collection_as_an_execution(patch: pytest.MonkeyPatch) -> None:
    from oraculo.wire import naming

    patch.setattr(naming, "answer_event", lambda queue: naming.EXECUTED)


# -- the router over several brokers --------------------------------------------------------------------------------


def the_last_broker_is_preferred(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FailoverBroker, "_up", lambda self: [member for member in reversed(self._members) if member.is_up])


def an_answer_goes_by_the_first_broker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Routing, "by_preference", lambda self: {None: list(range(len(self._messages)))})


def what_a_full_queue_did_not_take_counts_as_taken(patch: pytest.MonkeyPatch) -> None:
    real = Routing.receipts

    def receipts(self: Routing, *args: Any) -> list[Receipt]:
        found = real(self, *args)
        return [Receipt("simulated-1") if isinstance(one.error, QueueUnavailable) else one for one in found]

    patch.setattr(Routing, "receipts", receipts)


def priorities_are_lost_behind_several_brokers(patch: pytest.MonkeyPatch) -> None:
    real = Routing.__init__

    def begin(self: Routing, messages: Sequence[Outgoing]) -> None:
        real(self, [msgspec.structs.replace(one, priority=0) for one in messages])

    patch.setattr(Routing, "__init__", begin)


# -- the store ------------------------------------------------------------------------------------------------------


def a_key_gives_its_run_whatever_the_body(patch: pytest.MonkeyPatch) -> None:
    real = Taken.outcome_of

    def outcome_of(self: Taken, insert: Write) -> Created | None:
        found = real(self, insert)
        return found and Created(CreationOutcome.SAME, found.run_id)

    patch.setattr(Taken, "outcome_of", outcome_of)


def a_run_that_is_read_again_has_one_attempt_left(patch: pytest.MonkeyPatch) -> None:
    def task_of(row: Sequence[Any]) -> Task:
        task = records.task_of(row)
        task.last_attempt = min(task.last_attempt, task.attempt + 1)
        return task

    patch.setattr(store, "task_of", task_of)


def the_deadline_of_a_reopened_run_is_not_written(patch: pytest.MonkeyPatch) -> None:
    def wrong(head: RunHead, *rest: Any) -> Record:
        return _written(head, *rest, deadline=head.created_at + head.timeout)

    patch.setattr(rows, "head_record", wrong)


def the_priority_of_a_run_is_not_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rows, "head_record", lambda head, *rest: _written(head, *rest, priority=0))


def _written(head: RunHead, *rest: Any, **wrong: Any) -> Record:
    return records.head_record(msgspec.structs.replace(head, **wrong), *rest)


def an_idempotency_key_is_not_written(patch: pytest.MonkeyPatch) -> None:
    real = rows.SqliteWrite.__init__

    def make(self: rows.SqliteWrite, changes: Changes, creation: Creation | None = None) -> None:
        real(self, changes, creation)
        if creation is not None:
            self.head[-1] = NULL

    patch.setattr(rows.SqliteWrite, "__init__", make)


def a_failure_that_comes_again_counts_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine_answers, "_is_repeated_failure", lambda task, event: False)


def every_run_is_told_to_have_succeeded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        after_commit,
        "encode_aggregate",
        lambda run: msgspec.json.encode({**aggregate.aggregate(run), "status": "concluida"}),
    )


def the_results_are_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        after_commit,
        "encode_aggregate",
        lambda run: msgspec.json.encode({**aggregate.aggregate(run), "resultados": {}}),
    )


BUGS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        the_timer_of_a_run_rings_30_s_late,
        a_retry_begins_the_timeout_of_its_step_anew,
        the_timeout_of_a_step_begins_with_its_run,
        a_step_has_one_attempt_too_many,
        the_first_pause_is_doubled_already,
        a_failure_that_asks_for_no_other_attempt_is_retried,
        a_step_of_a_repeated_run_has_one_attempt,
        a_quorum_is_met_with_one_too_few,
        a_quorum_that_is_met_ends_nothing,
        a_late_answer_amends_nothing,
        a_late_answer_counts_as_a_repeat,
        an_optional_step_fails_its_run,
        a_fan_out_without_a_success_is_partial,
        a_cancelled_run_is_partial,
        a_repeat_leaves_what_was_skipped,
        a_repeated_run_keeps_its_old_deadline,
        a_timeout_of_a_step_is_told_with_the_limit_of_its_run,
        the_first_failure_of_a_step_is_told_as_its_last,
        a_result_is_kept_as_an_empty_object,
        a_result_is_written_anew,
        only_the_first_dependency_hands_its_result_on,
        the_deadline_of_a_command_is_that_of_its_run,
        a_destination_gets_the_payload_of_the_request_for_its_own,
        what_a_request_gives_a_collector_goes_before_its_config,
        the_timeout_of_a_request_does_not_hold_for_its_pipeline,
        commands_have_no_priority,
        a_dead_letter_says_only_that_its_task_failed,
        an_aggregate_counts_its_duration_in_seconds,
        a_worker_acks_before_its_answer_is_confirmed,
        a_worker_takes_an_answer_that_had_no_room_for_confirmed,
        a_worker_works_on_a_repeat_again,
        a_worker_takes_another_attempt_for_a_repeat,
        a_worker_wants_a_retry_whatever_its_handler_says,
        a_worker_gives_its_handler_up_a_second_early,
        a_worker_begins_a_command_whose_deadline_has_passed,
        a_worker_answers_a_collection_as_an_execution,
        the_last_broker_is_preferred,
        an_answer_goes_by_the_first_broker,
        what_a_full_queue_did_not_take_counts_as_taken,
        priorities_are_lost_behind_several_brokers,
        a_key_gives_its_run_whatever_the_body,
        a_run_that_is_read_again_has_one_attempt_left,
        the_deadline_of_a_reopened_run_is_not_written,
        the_priority_of_a_run_is_not_written,
        an_idempotency_key_is_not_written,
        a_failure_that_comes_again_counts_again,
        every_run_is_told_to_have_succeeded,
        the_results_are_left_out,
    )
}
