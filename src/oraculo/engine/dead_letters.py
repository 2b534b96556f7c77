"""Dead letters: writes those of failed tasks; lists, redrives and discards all.

A dead letter may be the command of a failed task. Then its task and run are reopened first, and the engine sends the
command again under the next attempt, so that the answer counts.
"""

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

from oraculo.core.chunks import pages, slices
from oraculo.core.events import DeadLetterDiscarded, Event, Redriven
from oraculo.core.machine import Verdict
from oraculo.core.run import Run, Task, TaskStatus
from oraculo.engine.decide.cache import Plans
from oraculo.engine.inbox import Inbox, Wish, patiently
from oraculo.errors import BrokerUnavailable, InvalidInput, NotFound, WrittenByNewer
from oraculo.ports.broker import Outgoing
from oraculo.ports.broker_admin import DEAD_LETTER_ID_SEPARATOR, DeadLetter, FullBroker
from oraculo.ports.readable import readable
from oraculo.ports.store import Store
from oraculo.ports.telemetry import DeadLettered
from oraculo.ports.threads import handed_over_if_wide
from oraculo.wire.message import decode_message
from oraculo.wire.naming import QueueNames, is_dlq, source_name

_PAGE = 200  # dead letters that are handled together; those of one run always are
_PAGE_BYTES = 16 * 1024 * 1024  # of these dead letters, whose runs are about as large


def dead_letter_of(run: Run, task: Task, queue: str, body: bytes, reason: str) -> tuple[Outgoing, DeadLettered]:
    """Return the dead letter of a task that failed for good, and its record. `body`: the task's command."""
    reason = f"failed for good at attempt {task.attempt}: {reason}"
    step = run.plan.steps[task.number]
    record = DeadLettered(step.queue, reason, run.id, step.id, task.attempt)
    return Outgoing(queue, body, run.head.priority, reason, leaves_room=True), record


@dataclass(frozen=True, slots=True)
class Redrive:
    """The counts of a redrive."""

    moved: int  # put back on their queue
    reopened: int  # tasks that were opened again
    obsolete: int  # deleted: their task has succeeded or was tried again since


class _Command(NamedTuple):
    """The task whose command a dead letter is."""

    run_id: str
    task: str
    attempt: int | None


class _Letter(NamedTuple):
    """The little that is kept of a dead letter, because there may be many large ones."""

    id: str
    command: _Command | None
    size: int


@dataclass(slots=True)
class _Sorted:
    """Dead letters by what a redrive does with them."""

    move: list[str]
    reopen: list[tuple[str, Run, int]]
    obsolete: list[str]
    unreadable: WrittenByNewer | None = None  # why some of them stay where they are


class DeadLetters:
    """The operators' access to dead letters."""

    def __init__(
        self, broker: FullBroker, store: Store, inbox: Inbox, plans: Plans, names: QueueNames, threads: Executor
    ) -> None:
        self._broker = broker
        self._store = store
        self._inbox = inbox
        self._plans = plans
        self._names = names
        self._threads = threads

    async def letters(self, queue: str, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        await self._expect_queue(queue)
        return await self._broker.dead_letters(self._names.physical(queue), limit=limit, after=after)

    async def commands_of(self, run: Run, queue: str) -> dict[int, str]:
        """Return the tasks of a run whose last command is a dead letter, with the reason."""
        found: dict[int, str] = {}

        def see(letter: DeadLetter) -> None:
            command = _command(letter)
            task = _task_of(run, command) if command and command.run_id == run.id else None
            if command and task and _is_last(task, command):
                found[task.number] = letter.reason

        await self._broker.look_through(self._names.physical(queue), see)
        return found

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> Redrive:
        """Redrive some dead letters, or all.

        Raise NotFound for an unknown id, and BrokerUnavailable when its broker is away; then nothing is moved. Raise
        QueueUnavailable when the queue has no room for some; what it took was moved. Dead letters of a run that a newer
        version wrote are left. Raise WrittenByNewer when one of them was named or there are no others, after all others
        are done.

        The broker is asked as seldom as possible, because RabbitMQ reads all dead letters each time. A redrive may end
        before the dead letters of reopened tasks are deleted. The next one deletes them as obsolete.
        """
        letters, physical = await self._named(queue, ids), self._names.physical(queue)
        wanted, reopened, obsolete = set[str](), list[str](), list[str]()
        unreadable: WrittenByNewer | None = None
        for some in slices(_by_run(letters), _weight, _PAGE_BYTES):
            found = await self._sort(list(chain.from_iterable(some)))
            reopened += await self._reopen(found)
            wanted.update(found.move)
            obsolete += found.obsolete
            unreadable = unreadable or found.unreadable
        await self._broker.discard(physical, [*reopened, *obsolete])
        move = [letter.id for letter in letters if letter.id in wanted]  # in their order
        moved = await self._broker.redrive(physical, move) if move else 0
        if unreadable is not None and (ids is not None or not (move or reopened or obsolete)):
            raise unreadable
        return Redrive(moved, len(reopened), len(obsolete))

    async def discard(self, queue: str, letter_id: str) -> None:
        """Delete a dead letter. Raise NotFound, also when somebody else was faster."""
        letter, *_ = await self._named(queue, [letter_id])
        if not await self._broker.discard(self._names.physical(queue), [letter_id]):
            raise _no_dead_letter(queue, [letter_id])
        if letter.command is not None:
            await self._note_discarded(letter.command)

    async def _note_discarded(self, command: _Command) -> None:
        task = await self._task(command)
        if task is not None and _is_last(task, command):
            await self._wish(command.run_id, DeadLetterDiscarded(task.number))

    async def _task(self, command: _Command) -> Task | None:
        """Return the task of a command; None when it does not exist or cannot be read.

        Many dead letters of a wide run may be discarded one by one. So the whole run is read only where the number of
        the task is not known.
        """
        heads, _ = await readable(self._store.heads, [command.run_id])
        head = heads.get(command.run_id)
        plan = None if head is None else self._plans.known(head.definition_hash)
        if plan is None:
            runs, _ = await self._runs([command])
            return _task_of(runs[command.run_id], command) if runs else None
        number = plan.by_id.get(command.task)
        return None if number is None else await self._store.task(command.run_id, number)

    async def _sort(self, letters: Sequence[_Letter]) -> _Sorted:
        found = _Sorted([], [], [])
        runs, unreadable = await self._runs([letter.command for letter in letters if letter.command])
        for letter in letters:
            command = letter.command
            if command and command.run_id in unreadable:
                found.unreadable = unreadable[command.run_id]
                continue
            run = runs.get(command.run_id) if command else None
            task = _task_of(run, command) if run and command else None
            if run is None or command is None or task is None:
                found.move.append(letter.id)
            elif task.status is TaskStatus.SUCCEEDED or not _is_last(task, command):
                found.obsolete.append(letter.id)
            elif task.is_open:
                found.move.append(letter.id)
            else:
                found.reopen.append((letter.id, run, task.number))
        return found

    async def _reopen(self, found: _Sorted) -> list[str]:
        """Reopen tasks, and return the dead letters whose tasks were opened.

        A dead letter whose task somebody else opened meanwhile stays. Dead letters are sent at least once, so a command
        may be there twice: the second is obsolete when the first opened its task.
        """
        verdicts: list[Verdict | None] = []
        for some in pages(found.reopen, _PAGE):
            verdicts += await asyncio.gather(*(self._wish(run.id, Redriven(task)) for _, run, task in some))
        judged = list(zip(found.reopen, verdicts, strict=True))
        opened = {(run.id, task) for (_, run, task), verdict in judged if verdict is Verdict.APPLIED}
        found.obsolete += [
            letter_id
            for (letter_id, run, task), verdict in judged
            if verdict is not Verdict.APPLIED and (run.id, task) in opened
        ]
        return [letter_id for (letter_id, _, _), verdict in judged if verdict is Verdict.APPLIED]

    async def _wish(self, run_id: str, event: Event) -> Verdict | None:
        wish = Wish(run_id, event, asyncio.get_running_loop().create_future())
        self._inbox.put([wish])
        return await patiently(wish.done)

    async def _runs(self, commands: Iterable[_Command]) -> tuple[dict[str, Run], dict[str, WrittenByNewer]]:
        """Return the runs that are there, and those that cannot be read."""
        return await readable(self._restored, list({command.run_id for command in commands}))

    async def _restored(self, run_ids: Sequence[str]) -> dict[str, Run]:
        snapshots = await self._store.load(run_ids)
        runs: dict[str, Run] = {}
        for run_id, snapshot in snapshots.items():
            restore = partial(self._plans.restore, snapshot)
            runs[run_id] = await handed_over_if_wide(self._threads, len(snapshot.tasks), restore)
        return runs

    async def _named(self, queue: str, ids: Sequence[str] | None) -> list[_Letter]:
        self._expect_brokers_of(ids or ())
        await self._expect_queue(queue)
        letters: list[_Letter] = []

        def see(letter: DeadLetter) -> None:
            letters.append(_Letter(letter.id, _command(letter), len(letter.body)))

        await self._broker.look_through(self._names.physical(queue), see, ids)
        if missing := set(ids or ()).difference(letter.id for letter in letters):
            raise _no_dead_letter(queue, missing)
        return letters

    def _expect_brokers_of(self, ids: Sequence[str]) -> None:
        """Raise BrokerUnavailable when a broker is away that may have one of the dead letters."""
        for broker in self._broker.statuses():
            prefix = broker.name + DEAD_LETTER_ID_SEPARATOR
            if broker.trouble is not None and any(one.startswith(prefix) for one in ids):
                raise BrokerUnavailable(f"broker {broker.name}, whose dead letter it is, is away: {broker.trouble}")

    async def _expect_queue(self, queue: str) -> None:
        if not await self._broker.queues([self._names.physical(queue)]):
            hint = f"; name the queue itself, '{source_name(queue)}'" if is_dlq(queue) else ""
            raise NotFound(f"there is no queue '{queue}'{hint}")


def _by_run(letters: Iterable[_Letter]) -> Iterable[list[_Letter]]:
    """Group dead letters by run: a wide run takes long to read, and may have one for each task."""
    found: dict[str | None, list[_Letter]] = {}
    for letter in letters:
        found.setdefault(letter.command and letter.command.run_id, []).append(letter)
    return found.values()


def _weight(letters: Iterable[_Letter]) -> int:
    return sum(letter.size + _PAGE_BYTES // _PAGE for letter in letters)


def _no_dead_letter(queue: str, ids: Iterable[str]) -> NotFound:
    return NotFound(f"queue '{queue}' has no dead letter with the id {', '.join(sorted(ids))}")


def _command(letter: DeadLetter) -> _Command | None:
    try:
        message = decode_message(letter.body)
    except InvalidInput:
        return None
    if not message.tarefa or not message.tipo_evento.startswith("iniciar_"):
        return None
    return _Command(message.correlation_id, message.tarefa, message.tentativa)


def _task_of(run: Run, command: _Command) -> Task | None:
    number = run.plan.by_id.get(command.task)
    return None if number is None else run.tasks[number]


def _is_last(task: Task, command: _Command) -> bool:
    return command.attempt is None or command.attempt >= task.attempt
