"""The inputs of the engine, and the inbox where they gather: messages, requests, wishes and notes."""

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
    """A delivery from `resultados` or `orquestrador`. It is settled after its effect is committed."""

    delivery: Delivery
    consumer: Consumer


class AnswerInput(msgspec.Struct, eq=False, gc=False):
    """An arrived message that is about a run."""

    message: Message
    arrived: Arrived
    reference: bytes | None = None  # replaces the payload, which is in the object store

    @property
    def task_id(self) -> str | None:
        return self.message.tarefa


class BadAnswer(msgspec.Struct, eq=False, gc=False):
    """An arrived message that names a run and breaks another rule of messages."""

    arrived: Arrived
    why: str

    @property
    def task_id(self) -> str | None:
        return task_named_in(self.arrived.delivery.body)


@dataclass(slots=True, eq=False)
class Submission:
    """A run to create, with its first changes.

    `done` is for the API, `arrived` for a request that came as a message. `queue_field` is the field of the request
    that names its queues.
    """

    changes: Changes
    fingerprint: str
    queue_field: str
    idempotency_key: str | None = None
    uncertain: bool = False  # a commit failed, and may have been written all the same
    done: "asyncio.Future[Created] | None" = None
    arrived: Arrived | None = None


@dataclass(slots=True, eq=False)
class Wish:
    """A change of a run that an operator or a timer asks for. `done` gets the verdict, or None without such a run."""

    run_id: str
    event: Event
    done: "asyncio.Future[Verdict | None]"
    is_set_aside: bool = False  # it waits for its turn, because its run is wide or rests


@dataclass(slots=True, eq=False)
class Resend:
    """A command or dead letter that was committed and is not noted as sent."""

    run_id: str
    task: int
    attempt: int
    done: "asyncio.Future[Verdict | None]"


class Note(msgspec.Struct, eq=False, gc=False):
    """A fact about what the engine did for a run: a confirmed command, or the outcome of a delivery."""

    run_id: str
    event: Event


Input = Arrived | Submission | Wish | Resend
OfRun = AnswerInput | BadAnswer | Wish | Resend | Note


class WideInput(NamedTuple):
    """A run to create, or a wish that changes a whole run, and its number of tasks."""

    input: Submission | Wish
    width: int
    priority: int


def arrived_with(one: Input) -> Arrived | None:
    """Return the message that an input is, or that it came as."""
    return one if isinstance(one, Arrived) else one.arrived if isinstance(one, Submission) else None


T = TypeVar("T")
_PATIENCE = 30.0


async def patiently(future: "asyncio.Future[T]", *, has_key: bool = False) -> T:
    """Wait for a commit, and withdraw the input when it takes too long. Raise StoreUnavailable then.

    The engine itself tries until it succeeds. `has_key`: the request has an idempotency key.
    """
    withdrawal = asyncio.get_running_loop().call_later(_PATIENCE, future.cancel)
    try:
        return await asyncio.shield(future)  # a caller that disconnects withdraws nothing
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
    """Return whether the caller gave up and heard that it may not be done."""
    return not isinstance(one, Arrived) and one.done is not None and one.done.cancelled()


class _Held(NamedTuple):
    """The inputs of a run that rests, in their order."""

    timer: asyncio.TimerHandle
    inputs: list[Input]
    notes: list[Note]


class Inbox:
    """The inputs that wait for the intake.

    They are bounded at their source: messages by the prefetch of consumers, wishes and submissions by the callers who
    wait, notes by the window of the outbox. With `crowded_at` inputs and notes the inbox holds back the commands of
    wide runs.
    """

    def __init__(self, linger: float, crowded_at: float = inf) -> None:
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
        self._linger = linger
        self._waiter: asyncio.Future[None] | None = None
        self._lingering: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        held = sum(len(held.inputs) + len(held.notes) for held in self._held.values())
        return len(self._inputs) + len(self._notes) + len(self._wide) + held

    def holds_back(self) -> bool:
        """Return whether so much waits that more should not come yet; `on_eased` is called when that is over.

        Wide inputs do not count, because they wait for their turn.
        """
        self._holds_back = len(self._inputs) + len(self._notes) >= self._crowded_at
        return self._holds_back

    def _look_whether_eased(self) -> None:
        if self._holds_back and not self.holds_back():
            self.on_eased()

    @property
    def arrived(self) -> Iterator[Arrived]:
        """The messages among the inputs."""
        held = (held.inputs for held in self._held.values())
        wide = (one.input for _, _, one in self._wide)
        return filter(None, map(arrived_with, chain(self._inputs, wide, *held)))

    def put(self, inputs: Iterable[Input]) -> None:
        self._inputs.extend(inputs)
        self.wake()

    def note(self, notes: Iterable[Note], *, at_once: bool = False) -> None:
        """Add notes, which wait a moment for other work: alone they are not worth a commit.

        `at_once`: another process is about to change these runs, and the later of two commits is decided twice.
        """
        self._notes.extend(notes)
        if at_once:
            self._notes_are_urgent = True
            self.wake()
        elif self._waiter is not None and self._lingering is None:
            self._lingering = asyncio.get_running_loop().call_later(self._linger, self.wake)

    def forget_withdrawn(self) -> None:
        """Forget inputs whose callers gave up. They would pile up while the store is away."""
        self._keep_only(lambda one: not is_withdrawn(one))

    def forget_arrived(self, consumer: Consumer) -> None:
        """Forget what a lost consumer brought, because the broker delivers it again."""
        self._keep_only(lambda one: (arrived := arrived_with(one)) is None or arrived.consumer is not consumer)

    def _keep_only(self, is_kept: Callable[[Input], bool]) -> None:
        self._inputs = deque(filter(is_kept, self._inputs))
        self._wide = [each for each in self._wide if is_kept(each[2].input)]
        heapify(self._wide)
        for held in self._held.values():
            held.inputs[:] = filter(is_kept, held.inputs)
        self._look_whether_eased()

    # -- runs that rest -------------------------------------------------------------------------------------------

    def rest(self, run_id: str, seconds: float) -> None:
        """Leave a run alone for some seconds, while its inputs gather."""
        if run_id not in self._held and self._lets_rest:
            timer = asyncio.get_running_loop().call_later(seconds, self._end_rest, run_id)
            self._held[run_id] = _Held(timer, [], [])

    def resting(self, run_ids: Iterable[str]) -> list[str]:
        """Return those of the runs that rest."""
        return [run_id for run_id in run_ids if run_id in self._held] if self._held else []

    def hold(self, run_id: str, items: Iterable[OfRun]) -> None:
        """Keep inputs until their run has rested, if it still rests."""
        inputs, notes = _as_they_came(items)
        held = self._held.get(run_id)
        if held is None:
            self.put(inputs)
            self.note(notes)
        else:
            held.inputs.extend(inputs)
            held.notes.extend(notes)
            for wish in (one for one in inputs if isinstance(one, Wish)):
                wish.is_set_aside = True

    def _end_rest(self, run_id: str) -> None:
        """Put what was held before everything else, which could otherwise make the run rest again."""
        held = self._held.pop(run_id)
        held.timer.cancel()
        self._inputs.extendleft(reversed(held.inputs))
        self._notes.extendleft(reversed(held.notes))
        if held.inputs or held.notes:
            self.wake()

    def end_all_rests(self) -> None:
        """Let no run rest any more, because the engine stops."""
        self._lets_rest = False
        for run_id in list(self._held):
            self._end_rest(run_id)

    # -- wide inputs ----------------------------------------------------------------------------------------------

    def set_aside(self, wide: Iterable[WideInput]) -> None:
        """Keep wide inputs for their turn, in which nothing else is decided."""
        for one in wide:
            if isinstance(one.input, Wish):
                one.input.is_set_aside = True
            heappush(self._wide, (-one.priority, next(self._numbers), one))

    def take_wide(self, most: int) -> Sequence[Input]:
        """Return the wide inputs whose turn it is: up to `most` tasks together, or one input that is wider."""
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
        """Return up to `limit` inputs and as many notes; wait while there are none.

        Nothing comes back when the inbox is woken, or has wide inputs.
        """
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
