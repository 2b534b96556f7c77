"""A line of messages on their way to the broker: in order, a batch at a time, until each is confirmed."""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import accumulate, islice

from oraculo.core.troubled import TroubledQueues
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge
from oraculo.ports.broker import Broker, NotTaken, Outgoing
from oraculo.ports.clock import Clock
from oraculo.ports.telemetry import CommandsPublished, PublishFailed, Telemetry

PUBLISHED_TOGETHER = 500
PUBLISHED_BYTES = 1024 * 1024  # a broker has seconds to confirm a batch, and a link may be slow
MAX_WAITING = 50_000
MAX_WAITING_BYTES = 64 * 1024 * 1024
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

Key = tuple[str, int, int, bool]  # run id, task, attempt, whether it is the dead letter
Entry = tuple[Key, Outgoing]
Confirmed = Callable[[Sequence[Key], Sequence[str], float], None]  # which broker took each, and since when it was asked
Refused = Callable[[Sequence[Entry], BrokerError], None]
StillWanted = Callable[[Sequence[Entry], bool], Awaitable[Sequence[Entry]]]  # and whether they have waited for long


class Line:
    """`confirmed` and `refused` are told of what became of each message: a broker that is away is waited for, one that
    says no to a message does not hold up the others. `still_wanted` is asked before each try: what waits for a broker
    may be wanted no longer. `refusing`: where queues are noted that did not take something."""

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        telemetry: Telemetry,
        confirmed: Confirmed,
        refused: Refused,
        still_wanted: StillWanted,
        refusing: TroubledQueues,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._telemetry = telemetry
        self._confirmed = confirmed
        self._refused = refused
        self._still_wanted = still_wanted
        self._refusing = refusing
        self._waiting: deque[Entry] = deque()
        self._bytes = 0
        self._under_way = 0  # of those that wait, how many the broker is asked to take now
        self._waited = 0  # of those that wait, how many already did when the broker was last away
        self.trouble: str | None = None  # why the broker did not take the last batch
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def load(self) -> float:
        """How full it is, from 0 to 1."""
        return max(len(self._waiting) / MAX_WAITING, self._bytes / MAX_WAITING_BYTES)

    @property
    def has_more(self) -> bool:
        """Than what the broker is asked to take now."""
        return len(self._waiting) > self._under_way

    def add(self, key: Key, message: Outgoing) -> None:
        self._waiting.append((key, message))
        self._bytes += len(message.body)
        self._empty.clear()
        self._wake.set()

    async def flushed(self) -> None:
        """Returns when everything that was added is confirmed or refused."""
        await self._empty.wait()

    async def run(self) -> None:
        while True:
            if not self._waiting:
                self._empty.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            batch = self._next_batch()
            self._under_way = len(batch)
            await self._publish(batch)
            self._waited = max(0, self._waited - len(batch))
            for _, message in batch:
                self._waiting.popleft()
                self._bytes -= len(message.body)

    def _next_batch(self) -> list[Entry]:
        sizes = accumulate(len(message.body) for _, message in islice(self._waiting, PUBLISHED_TOGETHER))
        count = bisect_right(list(sizes), PUBLISHED_BYTES)
        return list(islice(self._waiting, max(1, count)))

    async def _publish(self, batch: Sequence[Entry]) -> None:
        """Until the broker has answered. Meanwhile runs time out by their own deadlines, and say why."""
        pause = _FIRST_PAUSE
        while batch := await self._still_wanted(batch, self._waited > 0):
            started = self._clock.now()
            try:
                vias = await self._broker.publish([message for _, message in batch])
            except NotTaken as error:
                self.trouble = None
                self._telemetry.emit(PublishFailed(error.count, str(error)))
                self._tell_apart(batch, error, started)
                return
            except BrokerError as error:
                self.trouble = str(error) if isinstance(error, BrokerUnavailable) else None
                self._telemetry.emit(PublishFailed(len(batch), str(error)))
                if not isinstance(error, BrokerUnavailable):
                    await self._set_apart(batch, error)
                    return
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                self._waited = len(self._waiting)
            else:
                self.trouble = None
                self._refusing.works(message.queue for _, message in batch)
                self._tell_confirmed([key for key, _ in batch], vias, started)
                return
        self.trouble = None  # nothing is left that it holds up

    def _tell_confirmed(self, keys: Sequence[Key], vias: Sequence[str], started: float) -> None:
        if commands := sum(not is_dead_letter for *_, is_dead_letter in keys):
            self._telemetry.emit(CommandsPublished(commands, self._clock.now() - started))
        self._confirmed(keys, vias, started)

    def _tell_apart(self, batch: Sequence[Entry], error: NotTaken, started: float) -> None:
        """A queue that is full holds up no other: what it did not take is for the sweep."""
        taking = {message.queue: via for (_, message), via in zip(batch, error.vias, strict=True)}  # as of the last
        self._refusing.works(queue for queue, via in taking.items() if via is not None)
        left = [queue for queue, via in taking.items() if via is None]
        self._refusing.note(left, str(error), asyncio.get_running_loop().time())
        outcomes = list(zip(batch, error.vias, strict=True))
        self._refused([entry for entry, via in outcomes if via is None], error)
        if taken := [(key, via) for (key, _), via in outcomes if via is not None]:
            keys, vias = zip(*taken, strict=True)
            self._tell_confirmed(keys, vias, started)

    async def _set_apart(self, batch: Sequence[Entry], error: BrokerError) -> None:
        if len(batch) == 1:
            [(_, message)] = batch
            if not isinstance(error, MessageTooLarge):  # which says nothing of its queue
                self._refusing.note([message.queue], str(error), asyncio.get_running_loop().time())
            self._refused(batch, error)
            return
        for entry in batch:
            await self._publish([entry])
