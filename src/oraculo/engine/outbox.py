"""Sends what was committed: commands and dead letters. The outbox is the state itself: a task whose command is not
noted as sent is sent again by whoever finds it, under the same identity."""

import asyncio
from collections import deque
from collections.abc import Sequence

from oraculo.core.command import encode_command
from oraculo.core.events import Sent
from oraculo.core.naming import QueueNames
from oraculo.core.run import Changes, Run
from oraculo.core.timestamps import to_iso
from oraculo.engine.inputs import Inbox, Note, Resend
from oraculo.errors import BrokerError
from oraculo.ports.broker import Broker, Outgoing
from oraculo.ports.clock import Clock
from oraculo.ports.store import Store, Unsent
from oraculo.ports.telemetry import CommandsPublished, DeadLettered, PublishFailed, Telemetry

PUBLISHED_TOGETHER = 500
MAX_WAITING = 50_000
MAX_WAITING_BYTES = 64 * 1024 * 1024
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_PAGE = 1000

Key = tuple[str, int, int, bool]  # run id, task, attempt, whether it is the dead letter


class Outbox:
    def __init__(
        self,
        broker: Broker,
        store: Store,
        inbox: Inbox,
        *,
        names: QueueNames,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._broker = broker
        self._store = store
        self._inbox = inbox
        self._names = names
        self._clock = clock
        self._telemetry = telemetry
        self._waiting: deque[tuple[Key, Outgoing]] = deque()
        self._waiting_bytes = 0
        self._in_flight: set[Key] = set()  # from the decision until the note of it is committed
        self._spilled = False  # there was no room: the sweep finds what was left out
        self._seen_unsent: set[Unsent] = set()
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    # -- what the intake hands over -----------------------------------------------------------------------------

    def send(self, changes: Changes) -> None:
        """Takes the commands of a committed change. Never blocks; what it has no room for is left to the sweep."""
        if not changes.commands and not changes.dead_letters:
            return
        run, now_iso = changes.run, to_iso(self._clock.now())
        for number, attempt in changes.commands:
            self._add(run, number, attempt, now_iso, None)
        for number, attempt in changes.dead_letters:
            self._add(run, number, attempt, now_iso, run.tasks[number].reason or "failed")
        self._empty.clear()
        self._wake.set()

    def _add(self, run: Run, number: int, attempt: int, now_iso: str, dead: str | None) -> None:
        key = (run.id, number, attempt, dead is not None)
        task = run.tasks[number]
        if key in self._in_flight:
            return
        if len(self._waiting) >= MAX_WAITING or self._waiting_bytes >= MAX_WAITING_BYTES:
            self._spilled = True
            return
        if task.attempt != attempt or not task.unsent:  # overtaken within the same batch
            return
        body = encode_command(run, task, now_iso, self._names.answers)
        queue = self._names.physical(run.plan.steps[number].queue)
        if dead is not None:
            dead = f"failed for good at attempt {attempt}: {dead}"
            self._telemetry.emit(DeadLettered(run.plan.steps[number].queue, dead, run.id))
        self._in_flight.add(key)
        self._waiting.append((key, Outgoing(queue, body, run.head.priority, dead)))
        self._waiting_bytes += len(body)

    def noted(self, run_id: str, event: Sent) -> None:
        """The note of this sending is committed, or no longer matters."""
        self._in_flight.discard((run_id, event.task, event.attempt, event.dead_letter))

    # -- publishing -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            if not self._waiting:
                self._empty.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            batch = [self._waiting[n] for n in range(min(PUBLISHED_TOGETHER, len(self._waiting)))]
            await self._publish([outgoing for _, outgoing in batch])
            for _ in batch:
                _, outgoing = self._waiting.popleft()
                self._waiting_bytes -= len(outgoing.body)
            self._inbox.note(Note(key[0], Sent(key[1], key[2], key[3])) for key, _ in batch)

    async def _publish(self, messages: Sequence[Outgoing]) -> None:
        """Until the broker has confirmed. Meanwhile runs time out by their own deadlines, and say why."""
        pause = _FIRST_PAUSE
        while True:
            started = self._clock.now()
            try:
                await self._broker.publish(messages)
            except BrokerError as error:
                self._telemetry.emit(PublishFailed(len(messages), str(error)))
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                self._telemetry.emit(CommandsPublished(len(messages), self._clock.now() - started))
                return

    async def flushed(self) -> None:
        """Returns when everything that was handed over is confirmed."""
        await self._empty.wait()

    # -- the sweep ------------------------------------------------------------------------------------------------

    async def sweep(self, *, at_once: bool = False) -> None:
        """Finds commands that were committed and are not noted as sent: a crash's, another engine's, the spilled.

        What is seen for the first time may be another engine's, on its way now; it is sent when the next sweep still
        finds it. `at_once` skips that courtesy: at start, and for what this engine had no room for.
        """
        at_once = at_once or self._spilled
        self._spilled = False
        seen: set[Unsent] = set()
        after: tuple[str, int] | None = None
        while page := await self._store.unsent(_PAGE, after):
            after = (page[-1].run_id, page[-1].task)
            await self._resend(page, seen, at_once)
            if self._is_full():
                self._spilled = True
                break
        self._seen_unsent = seen

    async def _resend(self, page: Sequence[Unsent], seen: set[Unsent], at_once: bool) -> None:
        """Waits until they are decided, so that a page does not pile up on the one before."""
        loop = asyncio.get_running_loop()
        lost = [one for one in page if not self._is_in_flight(one) and (at_once or one in self._seen_unsent)]
        if len(seen) < MAX_WAITING:
            seen.update(page)
        resends = [Resend(one.run_id, one.task, one.attempt, loop.create_future()) for one in lost]
        self._inbox.put(resends)
        await asyncio.gather(*(resend.done for resend in resends), return_exceptions=True)

    def _is_in_flight(self, one: Unsent) -> bool:
        return any((one.run_id, one.task, one.attempt, dead) in self._in_flight for dead in (False, True))

    def _is_full(self) -> bool:
        return len(self._waiting) >= MAX_WAITING // 2 or self._waiting_bytes >= MAX_WAITING_BYTES // 2
