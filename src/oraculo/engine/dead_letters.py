"""Dead letters: looking at them, trying them again, throwing them away.

A dead letter that is the command of a failed task is not just moved back: its task and run are reopened first, and
the engine sends the command again under the next attempt, so that the answer counts.
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
from oraculo.ports.broker_admin import DEAD_LETTER_ID_SEPARATOR, DeadLetter, FullBroker
from oraculo.ports.readable import readable
from oraculo.ports.store import Store
from oraculo.ports.threads import handed_over_if_wide
from oraculo.wire.message import decode_message
from oraculo.wire.naming import QueueNames, is_dlq, source_name

_PAGE = 200  # letters whose runs are looked at, and whose tasks are opened, together; those of one run always are
_PAGE_BYTES = 16 * 1024 * 1024  # of these letters: their runs are about as large


@dataclass(frozen=True, slots=True)
class Redrive:
    moved: int  # put back on their queue
    reopened: int  # tasks that were opened again
    obsolete: int  # deleted: their task has succeeded or was tried again since


class _Command(NamedTuple):
    """Which task a dead letter is the command of."""

    run_id: str
    task: str
    attempt: int | None


class _Letter(NamedTuple):
    """What is kept of a dead letter: there may be many, and large ones."""

    id: str
    command: _Command | None
    size: int


@dataclass(slots=True)
class _Sorted:
    move: list[str]
    reopen: list[tuple[str, Run, int]]
    obsolete: list[str]
    unreadable: WrittenByNewer | None = None  # why some of them stay where they are


class DeadLetters:
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
        """The tasks of a run whose last commands are among them, and why."""
        found: dict[int, str] = {}

        def see(letter: DeadLetter) -> None:
            command = _command(letter)
            task = _task_of(run, command) if command and command.run_id == run.id else None
            if command and task and _is_last(task, command):
                found[task.number] = letter.reason

        await self._broker.look_through(self._names.physical(queue), see)
        return found

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> Redrive:
        """Raises NotFound when an id is not there, or BrokerUnavailable when its broker is away; then nothing is
        moved. QueueUnavailable: the queue has no room for some; what it took was moved. Letters of a run that a newer
        version wrote are left; raises WrittenByNewer when one of them was named or there are no others, which are done
        first.

        The broker is asked as seldom as can be: on RabbitMQ each time all letters are read. Should it end before the
        letters of opened tasks are gone, the next redrive deletes these as obsolete."""
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
        """Raises NotFound, also when somebody else was faster."""
        letter, *_ = await self._named(queue, [letter_id])
        if not await self._broker.discard(self._names.physical(queue), [letter_id]):
            raise _no_letter(queue, [letter_id])
        if letter.command is not None:
            await self._note_discarded(letter.command)

    async def _note_discarded(self, command: _Command) -> None:
        task = await self._task(command)
        if task is not None and _is_last(task, command):
            await self._wish(command.run_id, DeadLetterDiscarded(task.number))

    async def _task(self, command: _Command) -> Task | None:
        """Of a wide run many letters may be discarded, one after the other: the other tasks are read only where it is
        not known which number it has. None: there is no such, or it cannot be read."""
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
        """The letters whose task was opened; one that someone else opened meanwhile stays where it is. A command may
        lie there twice, for dead letters are sent at least once: the second is obsolete once the first opened its
        task."""
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
        """Those that are there, and those that cannot be read."""
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
            raise _no_letter(queue, missing)
        return letters

    def _expect_brokers_of(self, ids: Sequence[str]) -> None:
        """One that is away cannot be asked whether it has the letter, nor the queue."""
        for link in self._broker.statuses():
            if link.trouble is not None and any(one.startswith(link.name + DEAD_LETTER_ID_SEPARATOR) for one in ids):
                raise BrokerUnavailable(f"broker {link.name}, whose dead letter it is, is away: {link.trouble}")

    async def _expect_queue(self, queue: str) -> None:
        if not await self._broker.queues([self._names.physical(queue)]):
            hint = f"; name the queue itself, '{source_name(queue)}'" if is_dlq(queue) else ""
            raise NotFound(f"there is no queue '{queue}'{hint}")


def _by_run(letters: Iterable[_Letter]) -> Iterable[list[_Letter]]:
    """Wherever they lie: a wide run takes long to read, and has a letter for each of its tasks."""
    found: dict[str | None, list[_Letter]] = {}
    for letter in letters:
        found.setdefault(letter.command and letter.command.run_id, []).append(letter)
    return found.values()


def _weight(letters: Iterable[_Letter]) -> int:
    return sum(letter.size + _PAGE_BYTES // _PAGE for letter in letters)


def _no_letter(queue: str, ids: Iterable[str]) -> NotFound:
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
