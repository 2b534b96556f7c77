"""What the engine decides on: messages, requests, wishes and notes; and the inbox where they gather."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain, count
from math import inf
from typing import NamedTuple, TypeVar

import msgspec

from oraculo.core.events import Event
from oraculo.core.machine import Verdict
from oraculo.core.run import Changes
from oraculo.errors import StoreUnavailable
from oraculo.ports.broker import Consumer, Delivery
from oraculo.ports.store import Created
from oraculo.wire.message import Message, task_named_in


class Arrived(msgspec.Struct, eq=False, gc=False):
    """A delivery from `resultados` or `orquestrador`, to be settled once its effect is committed."""

    delivery: Delivery
    consumer: Consumer


class AnswerInput(msgspec.Struct, eq=False, gc=False):
    """An arrived message that is about a run."""

    message: Message
    arrived: Arrived
    reference: bytes | None = None  # what stands for its payload, when that rests in the object store

    @property
    def task_id(self) -> str | None:
        return self.message.tarefa


class BadAnswer(msgspec.Struct, eq=False, gc=False):
    """An arrived message that names a run and breaks the rules of messages in something else."""

    arrived: Arrived
    why: str

    @property
    def task_id(self) -> str | None:
        return task_named_in(self.arrived.delivery.body)


@dataclass(slots=True, eq=False)
class Submission:
    """A run to be created, with its first changes. `done` is for the API; `arrived` for one that came as a message.
    `queue_field`: the field of the request that names its queues."""

    changes: Changes
    fingerprint: str
    queue_field: str
    idempotency_key: str | None = None
    uncertain: bool = False  # a commit of it failed, and may have been written all the same
    done: "asyncio.Future[Created] | None" = None
    arrived: Arrived | None = None


@dataclass(slots=True, eq=False)
class Wish:
    """What an operator or a timer wants done to a run. `done` gets the verdict, or None: there is no such run."""

    run_id: str
    event: Event
    done: "asyncio.Future[Verdict | None]"
    is_set_aside: bool = False  # until its turn, as one of a wide run


@dataclass(slots=True, eq=False)
class Resend:
    """A command, or dead letter, that was found committed but not noted as sent."""

    run_id: str
    task: int
    attempt: int
    done: "asyncio.Future[Verdict | None]"


class Note(msgspec.Struct, eq=False, gc=False):
    """What the engine itself did for a run: a command the broker confirmed, a delivery that came through or not."""

    run_id: str
    event: Event


Input = Arrived | Submission | Wish | Resend
OfRun = AnswerInput | BadAnswer | Wish | Resend | Note


class WideInput(NamedTuple):
    """A run to be created, or a wish that changes all of one, and how many tasks that are."""

    input: Submission | Wish
    width: int
    priority: int


def arrived_with(one: Input) -> Arrived | None:
    """The message that it is, or came as."""
    return one if isinstance(one, Arrived) else one.arrived if isinstance(one, Submission) else None


T = TypeVar("T")
_PATIENCE = 30.0


async def patiently(future: "asyncio.Future[T]", *, has_key: bool = False) -> T:
    """The engine tries a commit until it succeeds; a caller is not kept that long, and withdraws what it asked for.
    `has_key`: of idempotency."""
    withdrawal = asyncio.get_running_loop().call_later(_PATIENCE, future.cancel)
    try:
        return await asyncio.shield(future)  # a caller who goes away withdraws nothing
    except asyncio.CancelledError:
        if not future.cancelled():
            raise
    finally:
        withdrawal.cancel()
    raise StoreUnavailable(
        "not known to be committed: the store does not answer, or takes nothing (GET /health/ready says why); ask "
        f"again later{', with the same Idempotency-Key' if has_key else ''}"
    )


def is_withdrawn(one: Input) -> bool:
    """Whoever asked was told that it may not be done, and does not wait any more."""
    return not isinstance(one, Arrived) and one.done is not None and one.done.cancelled()


class Rest(NamedTuple):
    """Of a run: what comes for it waits so many seconds, or until there is so much of it, or somebody waits for a part
    of it: an operator, a timer. After a lost race, all waits."""

    seconds: float
    enough: float = inf
    after_loss: bool = False


class _Held(NamedTuple):
    """What came for a run that rests, in its order."""

    rest: Rest
    timer: asyncio.TimerHandle
    inputs: list[Input]
    notes: list[Note]


class Inbox:
    """Gathers inputs until the intake takes them. What fills it is bounded at its source: messages by the consumers'
    prefetch, wishes and submissions by the callers who wait for them, notes by the outbox's window.

    `most_held`: messages for runs that rest. They take places of the prefetch, and what comes for other runs needs
    some. `crowded_at`: so many inputs and notes are more than is decided soon."""

    def __init__(self, linger: float, most_held: float = inf, crowded_at: float = inf) -> None:
        self._inputs: deque[Input] = deque()
        self._notes: deque[Note] = deque()
        self._notes_are_urgent = False
        self._wide: list[tuple[int, int, WideInput]] = []  # a heap: the higher priority first, then the older
        self._numbers = count()
        self._crowded_at = crowded_at
        self._holds_back = False
        self.on_eased: Callable[[], object] = lambda: None
        self._held: dict[str, _Held] = {}  # by the runs that rest
        self._lets_rest = True
        self._most_held = most_held
        self._linger = linger
        self._waiter: asyncio.Future[None] | None = None
        self._lingering: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        held = sum(len(held.inputs) + len(held.notes) for held in self._held.values())
        return len(self._inputs) + len(self._notes) + len(self._wide) + held

    def holds_back(self) -> bool:
        """Return whether so much waits to be decided that more should not come yet. `on_eased` is called once that is
        over. Wide inputs do not count: what they wait for is their turn."""
        self._holds_back = len(self._inputs) + len(self._notes) >= self._crowded_at
        return self._holds_back

    def _look_whether_eased(self) -> None:
        if self._holds_back and not self.holds_back():
            self.on_eased()

    @property
    def arrived(self) -> Iterator[Arrived]:
        """The messages among them."""
        held = (held.inputs for held in self._held.values())
        wide = (one.input for _, _, one in self._wide)
        return filter(None, map(arrived_with, chain(self._inputs, wide, *held)))

    def put(self, inputs: Iterable[Input]) -> None:
        self._inputs.extend(inputs)
        self.wake()

    def note(self, notes: Iterable[Note], *, at_once: bool = False) -> None:
        """Notes wait a moment for other work to be committed with, because alone they are not worth a commit.
        `at_once`: somebody else is about to change these runs, and whoever is late decides them twice."""
        self._notes.extend(notes)
        if at_once:
            self._notes_are_urgent = True
            self.wake()
        elif self._waiter is not None and self._lingering is None:
            self._lingering = asyncio.get_running_loop().call_later(self._linger, self.wake)

    def forget_withdrawn(self) -> None:
        """Those whose callers gave up: while the store is away they would pile up, with their payloads."""
        self._keep_only(lambda one: not is_withdrawn(one))

    def forget_arrived(self, consumer: Consumer) -> None:
        """What a consumer brought that is lost: the broker delivers it again."""
        self._keep_only(lambda one: (arrived := arrived_with(one)) is None or arrived.consumer is not consumer)

    def _keep_only(self, is_kept: Callable[[Input], bool]) -> None:
        self._inputs = deque(filter(is_kept, self._inputs))
        self._wide = [each for each in self._wide if is_kept(each[2].input)]
        heapify(self._wide)
        for held in self._held.values():
            held.inputs[:] = filter(is_kept, held.inputs)
        self._look_whether_eased()

    # -- runs that rest -------------------------------------------------------------------------------------------

    def rest(self, run_id: str, rest: Rest) -> None:
        held = self._held.get(run_id)
        if held is not None:
            self._held[run_id] = held._replace(rest=rest if rest.after_loss else held.rest)
        elif self._lets_rest:
            timer = asyncio.get_running_loop().call_later(rest.seconds, self._end_rest, run_id)
            self._held[run_id] = _Held(rest, timer, [], [])

    def resting(self, run_ids: Iterable[str]) -> dict[str, Rest]:
        return {run_id: self._held[run_id].rest for run_id in run_ids if run_id in self._held} if self._held else {}

    def hold(self, run_id: str, items: Iterable[OfRun]) -> None:
        """Until the run has rested. If it has by now, it is not to be kept waiting: not even by a turn of the loop, in
        which the next batch might leave it out again."""
        inputs, notes = _as_they_came(items)
        held = self._held.get(run_id)
        if held is None:
            self.put(inputs)
            self.note(notes)
            return
        held.inputs.extend(inputs)
        held.notes.extend(notes)
        somebody_waits = any(not isinstance(one, Arrived) for one in inputs) and not held.rest.after_loss
        is_full = sum(len(each.inputs) for each in self._held.values()) >= self._most_held and not held.rest.after_loss
        if somebody_waits or is_full or len(held.inputs) >= held.rest.enough:
            self._end_rest(run_id)

    def _end_rest(self, run_id: str) -> None:
        """What was held comes first: it would else be overtaken, by what makes the run rest again."""
        held = self._held.pop(run_id)
        held.timer.cancel()
        self._inputs.extendleft(reversed(held.inputs))
        self._notes.extendleft(reversed(held.notes))
        if held.inputs or held.notes:
            self.wake()

    def end_all_rests(self) -> None:
        """And let no other begin: the engine stops."""
        self._lets_rest = False
        for run_id in list(self._held):
            self._end_rest(run_id)

    # -- wide inputs ----------------------------------------------------------------------------------------------

    def set_aside(self, wide: Iterable[WideInput]) -> None:
        """They wait for their turn, in which nothing else is decided."""
        for one in wide:
            if isinstance(one.input, Wish):
                one.input.is_set_aside = True
            heappush(self._wide, (-one.priority, next(self._numbers), one))

    def take_wide(self, most: int) -> Sequence[Input]:
        """Those whose turn it is: together up to `most` tasks wide, or one that is wider."""
        taken: list[Input] = []
        while self._wide and (self._wide[0][2].width <= most or not taken):
            one = heappop(self._wide)[2]
            most -= one.width
            taken.append(one.input)
        return taken

    # -- what the intake takes ------------------------------------------------------------------------------------

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, limit: int) -> tuple[Sequence[Input], Sequence[Note]]:
        """All that is there, up to `limit` of each; waits when there is nothing. May return nothing when woken, or when
        there are wide inputs."""
        if not self._inputs and not self._notes_are_urgent and not self._wide:
            await self._wait()
        inputs = [self._inputs.popleft() for _ in range(min(limit, len(self._inputs)))]
        notes = [self._notes.popleft() for _ in range(min(limit, len(self._notes)))]
        self._notes_are_urgent &= bool(self._notes)
        self._look_whether_eased()
        return inputs, notes

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if self._notes and self._lingering is None:
            self._lingering = loop.call_later(self._linger, self.wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._lingering is not None:
                self._lingering.cancel()
                self._lingering = None


def _as_they_came(items: Iterable[OfRun]) -> tuple[list[Input], list[Note]]:
    inputs: list[Input] = []
    notes: list[Note] = []
    for item in items:
        if isinstance(item, Note):
            notes.append(item)
        else:
            inputs.append(item.arrived if isinstance(item, AnswerInput | BadAnswer) else item)
    return inputs, notes
