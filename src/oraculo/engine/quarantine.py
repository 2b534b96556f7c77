"""Dead letters: looking at them, trying them again, throwing them away.

A dead letter that is the command of a failed task is not just moved back: its task and run are reopened first, and
the engine sends the command again under the next attempt, so that the answer counts.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from oraculo.core.events import DeadLetterDiscarded, Event, Redriven
from oraculo.core.machine import Verdict
from oraculo.core.message import Message, decode_message
from oraculo.core.naming import QueueNames
from oraculo.core.run import Run, Task, TaskStatus
from oraculo.engine.cache import Plans
from oraculo.engine.inputs import Inbox, Wish, patiently
from oraculo.errors import BrokerUnavailable, InvalidInput, NotFound
from oraculo.ports.broker import LETTER_SEPARATOR, Broker, DeadLetter
from oraculo.ports.store import Store

_PAGE = 200


@dataclass(frozen=True, slots=True)
class Redrive:
    moved: int  # put back on their queue
    reopened: int  # tasks that were opened again
    obsolete: int  # deleted: their task has succeeded or was tried again since


@dataclass(slots=True)
class _Sorted:
    move: list[str]
    reopen: list[tuple[str, Run, int]]
    obsolete: list[str]


class Quarantine:
    def __init__(self, broker: Broker, store: Store, inbox: Inbox, plans: Plans, names: QueueNames) -> None:
        self._broker = broker
        self._store = store
        self._inbox = inbox
        self._plans = plans
        self._names = names

    async def letters(self, queue: str, limit: int, after: str | None = None) -> Sequence[DeadLetter]:
        await self._expect_queue(queue)
        return await self._broker.dead_letters(self._names.physical(queue), limit=limit, after=after)

    async def redrive(self, queue: str, ids: Sequence[str] | None = None) -> Redrive:
        """Raises NotFound when an id is not there, or BrokerUnavailable when its broker is away; then nothing is
        moved."""
        letters = await self._named(queue, ids)
        totals = Redrive(0, 0, 0)
        for start in range(0, len(letters), _PAGE):
            done = await self._redrive_page(self._names.physical(queue), letters[start : start + _PAGE])
            totals = Redrive(
                totals.moved + done.moved, totals.reopened + done.reopened, totals.obsolete + done.obsolete
            )
        return totals

    async def discard(self, queue: str, letter_id: str) -> None:
        (letter,) = await self._named(queue, [letter_id])
        await self._broker.discard(self._names.physical(queue), [letter_id])
        message = _command(letter)
        if message is None:
            return
        runs = await self._runs([message])
        if (run := runs.get(message.correlation_id)) and (task := _task_of(run, message)) and _is_last(task, message):
            await self._wish(run.id, DeadLetterDiscarded(task.number))

    async def _redrive_page(self, queue: str, letters: Sequence[DeadLetter]) -> Redrive:
        sorted_letters = await self._sort(letters)
        reopened = await self._reopen(sorted_letters)
        moved = await self._broker.redrive(queue, sorted_letters.move) if sorted_letters.move else 0
        await self._broker.discard(queue, [*reopened, *sorted_letters.obsolete])
        return Redrive(moved, len(reopened), len(sorted_letters.obsolete))

    async def _sort(self, letters: Sequence[DeadLetter]) -> _Sorted:
        found = _Sorted([], [], [])
        commands = {letter.id: message for letter in letters if (message := _command(letter))}
        runs = await self._runs(commands.values())
        for letter in letters:
            message = commands.get(letter.id)
            run = runs.get(message.correlation_id) if message else None
            task = _task_of(run, message) if run and message else None
            if run is None or message is None or task is None:
                found.move.append(letter.id)
            elif task.status is TaskStatus.SUCCEEDED or not _is_last(task, message):
                found.obsolete.append(letter.id)
            elif task.is_open:
                found.move.append(letter.id)
            else:
                found.reopen.append((letter.id, run, task.number))
        return found

    async def _reopen(self, found: _Sorted) -> list[str]:
        """The letters whose task was opened; one that someone else opened meanwhile stays where it is."""
        verdicts = await asyncio.gather(*(self._wish(run.id, Redriven(task)) for _, run, task in found.reopen))
        pairs = zip(found.reopen, verdicts, strict=True)
        return [letter_id for (letter_id, _, _), verdict in pairs if verdict is Verdict.APPLIED]

    async def _wish(self, run_id: str, event: Event) -> Verdict | None:
        wish = Wish(run_id, event, asyncio.get_running_loop().create_future())
        self._inbox.put([wish])
        return await patiently(wish.done)

    async def _runs(self, messages: Iterable[Message]) -> dict[str, Run]:
        snapshots = await self._store.load(list({message.correlation_id for message in messages}))
        return {run_id: self._plans.restore(snapshot) for run_id, snapshot in snapshots.items()}

    async def _named(self, queue: str, ids: Sequence[str] | None) -> list[DeadLetter]:
        self._expect_brokers_of(ids or ())
        await self._expect_queue(queue)
        wanted = None if ids is None else set(ids)
        letters = [letter async for letter in self._all(queue) if wanted is None or letter.id in wanted]
        if wanted is not None and (missing := wanted - {letter.id for letter in letters}):
            raise NotFound(f"queue '{queue}' has no dead letter with the id {', '.join(sorted(missing))}")
        return letters

    async def _all(self, queue: str) -> AsyncIterator[DeadLetter]:
        after: str | None = None
        physical = self._names.physical(queue)
        while page := await self._broker.dead_letters(physical, limit=_PAGE, after=after):
            after = page[-1].id
            for letter in page:
                yield letter

    def _expect_brokers_of(self, ids: Sequence[str]) -> None:
        """One that is away cannot be asked whether it has the letter, nor the queue."""
        for link in self._broker.links():
            if link.trouble is not None and any(one.startswith(link.name + LETTER_SEPARATOR) for one in ids):
                raise BrokerUnavailable(f"broker {link.name}, whose dead letter it is, is away: {link.trouble}")

    async def _expect_queue(self, queue: str) -> None:
        if not await self._broker.queues([self._names.physical(queue)]):
            raise NotFound(f"there is no queue '{queue}'")


def _command(letter: DeadLetter) -> Message | None:
    try:
        message = decode_message(letter.body)
    except InvalidInput:
        return None
    return message if message.tarefa and message.tipo_evento.startswith("iniciar_") else None


def _task_of(run: Run, message: Message) -> Task | None:
    number = run.plan.by_id.get(message.tarefa or "")
    return None if number is None else run.tasks[number]


def _is_last(task: Task, message: Message) -> bool:
    return message.tentativa is None or message.tentativa >= task.attempt
