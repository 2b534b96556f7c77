"""Sends what was committed: commands and dead letters. The outbox is the state itself: a task whose command is not
noted as sent is sent again by whoever finds it, under the same identity."""

import asyncio
from collections.abc import Sequence

from oraculo.core.command import deadline_of, encode_command
from oraculo.core.events import Sent
from oraculo.core.naming import QueueNames
from oraculo.core.run import Changes, Run
from oraculo.core.timestamps import to_iso
from oraculo.engine.inputs import Inbox, Note, Resend
from oraculo.engine.peers import Peers
from oraculo.engine.publishing import Key, Line
from oraculo.ports.broker import Broker, Outgoing
from oraculo.ports.clock import Clock
from oraculo.ports.store import Store, Unsent
from oraculo.ports.telemetry import DeadLettered, Telemetry

_PAGE = 1000
_MOST_SEEN = 50_000


class Outbox:
    def __init__(
        self,
        broker: Broker,
        store: Store,
        inbox: Inbox,
        peers: Peers,
        *,
        names: QueueNames,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._broker = broker
        self._store = store
        self._inbox = inbox
        self._peers = peers
        self._names = names
        self._clock = clock
        self._telemetry = telemetry
        # Apart, so that a quarantine that is full does not hold up the commands.
        self._commands = Line(broker, clock, telemetry, self._confirmed, self._refused)
        self._dead_letters = Line(broker, clock, telemetry, self._confirmed, self._refused)
        self._in_flight: set[Key] = set()  # from the decision until the note of it is committed
        self._spilled = False  # there was no room: the sweep finds what was left out
        self._seen_unsent: dict[Unsent, int] = {}  # and in how many sweeps

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

    def _add(self, run: Run, number: int, attempt: int, now_iso: str, dead: str | None) -> None:
        key = (run.id, number, attempt, dead is not None)
        task = run.tasks[number]
        line = self._commands if dead is None else self._dead_letters
        if key in self._in_flight:
            return
        if line.load >= 1:
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
        expires_at = None if dead is not None else deadline_of(run, task)
        line.add(key, Outgoing(queue, body, run.head.priority, dead, expires_at))

    def noted(self, run_id: str, event: Sent) -> None:
        """The note of this sending is committed, or no longer matters."""
        self._in_flight.discard((run_id, event.task, event.attempt, event.dead_letter))

    # -- publishing -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with asyncio.TaskGroup() as lines:  # one that fails stops the other: both are taken up again
            lines.create_task(self._commands.run())
            lines.create_task(self._dead_letters.run())

    def _confirmed(self, keys: Sequence[Key], via: str) -> None:
        now = self._clock.now()
        self._inbox.note(Note(key[0], Sent(key[1], key[2], key[3], via, now)) for key in keys)

    def _refused(self, keys: Sequence[Key]) -> None:
        """Left unsent: the sweep tries again, until the task's deadline says that it was never taken."""
        self._in_flight.difference_update(keys)

    async def flushed(self) -> None:
        """Returns when everything that was handed over is confirmed."""
        await self._commands.flushed()
        await self._dead_letters.flushed()

    # -- the sweep ------------------------------------------------------------------------------------------------

    async def sweep(self, *, at_once: bool = False) -> None:
        """Finds commands that were committed and are not noted as sent: a crash's, another engine's, the spilled.

        What is seen for the first time may be another engine's, on its way now; it is sent when the next sweep still
        finds it, or a later one when other engines come first. `at_once` skips that courtesy: at start, and for what
        this engine had no room for, when there is no other.
        """
        at_once = (at_once or self._spilled) and self._peers.is_alone
        self._spilled = False
        seen: dict[Unsent, int] = {}
        after: tuple[str, int] | None = None
        while page := await self._store.unsent(_PAGE, after):
            after = (page[-1].run_id, page[-1].task)
            await self._resend(page, seen, at_once)
            if self._is_full():
                self._spilled = True
                break
        self._seen_unsent = seen

    async def _resend(self, page: Sequence[Unsent], seen: dict[Unsent, int], at_once: bool) -> None:
        """Waits until they are decided, so that a page does not pile up on the one before."""
        loop = asyncio.get_running_loop()
        lost = [one for one in page if not self._is_in_flight(one) and (at_once or self._is_ours(one))]
        if len(seen) < _MOST_SEEN:
            seen.update({one: self._seen_unsent.get(one, 0) + 1 for one in page})
        resends = [Resend(one.run_id, one.task, one.attempt, loop.create_future()) for one in lost]
        self._inbox.put(resends)
        await asyncio.gather(*(resend.done for resend in resends), return_exceptions=True)

    def _is_ours(self, one: Unsent) -> bool:
        return self._seen_unsent.get(one, 0) > self._peers.rank(one.run_id)

    def _is_in_flight(self, one: Unsent) -> bool:
        return any((one.run_id, one.task, one.attempt, dead) in self._in_flight for dead in (False, True))

    def _is_full(self) -> bool:
        return max(self._commands.load, self._dead_letters.load) >= 0.5
