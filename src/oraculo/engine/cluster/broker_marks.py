"""The marks by which engines notice that a broker forgot what it took, such as a container without its volume.

No server reports that to an engine that was away meanwhile, and some never do. So engines leave a mark on each broker:
a queue that nobody reads, with a message. A missing queue means that whatever the broker had taken is gone.

An engine makes the queue again at once, so that a second loss is noticed too. The message follows when everything is
taken back. An engine that dies before that leaves the rest to the next one.
"""

import asyncio
from contextlib import suppress

from oraculo.engine.cluster.broker_watch import BrokerWatch
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Outgoing, publish_all
from oraculo.ports.broker_admin import FullBroker
from oraculo.ports.telemetry import LoopFailed, Telemetry
from oraculo.wire.naming import QueueNames

MARK = (
    b'{"correlation_id":"memoria","tipo_evento":"memoria","payload":{},"timestamp":"1970-01-01T00:00:00Z",'
    b'"nota":"as long as it is here, this broker has forgotten nothing; leave it"}'
)
LOOK_EVERY = 2.0  # seconds
BEGUN_WITHIN = 1.0  # seconds that a start waits for the marks; later looks do the rest
LOOKS = 5  # at a queue without its message, after which this engine acts
# For an engine that saw the message before: RabbitMQ counts none in a queue whose leader does not answer.
MORE_LOOKS = 30


class BrokerMarks:
    """The marks on all brokers, and the looks at them."""

    def __init__(
        self, broker: FullBroker, watch: BrokerWatch, names: QueueNames, telemetry: Telemetry, poll: float
    ) -> None:
        self._marks = [_BrokerMark(each, watch, names.memory) for each in broker.behind()]
        self._telemetry = telemetry
        self._poll = poll

    async def begin(self) -> None:
        """Leave a mark on each broker that has nothing to lose, before anything is sent.

        Also an API leaves marks. Otherwise the first engine to look would take what was sent meanwhile for lost.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(BEGUN_WITHIN):
                for mark in self._marks:
                    with suppress(BrokerError):  # the later looks log that
                        await mark.begin()

    async def run(self) -> None:
        while True:
            for mark in self._marks:
                await self._look_at(mark)
            in_haste = any(mark.is_in_haste for mark in self._marks)
            await asyncio.sleep(min(self._poll, LOOK_EVERY) if in_haste else LOOK_EVERY)

    async def _look_at(self, mark: "_BrokerMark") -> None:
        """Look at one mark, and log once that a broker refuses it."""
        try:
            with suppress(BrokerUnavailable):  # the next look tries again
                await mark.look()
        except BrokerError as error:
            if mark.refusal is None:
                blind = f"should {mark.name} come back empty, that is not noticed: {error}"
                self._telemetry.emit(LoopFailed("broker marks", blind))
            mark.refusal = error


class _BrokerMark:
    """The mark on one broker."""

    def __init__(self, broker: FullBroker, watch: BrokerWatch, mark: str) -> None:
        self.name = broker.name
        self.refusal: BrokerError | None = None
        self._broker = broker
        self._broker_watch = watch
        self._mark = mark
        self._is_reached = False
        self._was_seen = False  # its mark was there, when this engine looked
        self._missed_at = 0.0  # by the loop's time, just before the look that first missed it
        self._misses = 0  # looks in a row that did not find it
        self._is_begun = False  # an engine has made the queue, and its message is still to come
        self._is_lost = False  # this engine takes back what the broker had
        self._had_nothing = False  # when it was last away: what came later went to the broker as it is now

    @property
    def is_in_haste(self) -> bool:
        return self._is_lost or not self._is_reached

    async def begin(self) -> None:
        """Leave the mark if the broker has nothing to lose.

        An unfinished mark is finished here too: its engine died, or finishes it once more, which does no harm.
        """
        [status] = self._broker.statuses()
        if status.trouble is not None or await self._is_marked():
            return
        if await self._broker_watch.gave_nothing_to(self.name):
            await self._broker.declare([self._mark])
            await publish_all(self._broker, [Outgoing(self._mark, MARK)])
            self._note_mark()

    async def _is_marked(self) -> bool:
        return any(state.ready for state in await self._broker.queues([self._mark]))

    async def look(self) -> None:
        """Look whether the mark is there, and act when it is not."""
        now = asyncio.get_running_loop().time()
        [status] = self._broker.statuses()
        if status.trouble is not None:
            self._had_nothing = not self._was_seen and await self._broker_watch.gave_nothing_to(self.name)
            return
        state = next(iter(await self._broker.queues([self._mark])), None)
        self._is_reached = True
        if state is not None and state.ready:
            self._note_mark()
        elif state is None or not self._is_lost:
            await self._miss(now, is_begun=state is not None)
        else:
            await self._leave_mark()

    async def _miss(self, now: float, *, is_begun: bool) -> None:
        """Count a look that did not find the mark, and note the loss after enough of them.

        What is sent from the first such look on went to the broker as it is now, unless it is emptied again.
        """
        is_emptied_again = self._is_begun and not is_begun
        self._had_nothing = self._had_nothing and not is_emptied_again
        if not self._misses or is_emptied_again:
            self._missed_at, self._misses, self._is_lost = now, 0, False
        self._misses += 1
        self._is_begun = is_begun
        if self._misses >= self._patience():
            await self._broker.declare([self._mark])  # a refusal here keeps each start from sending everything again
            self._is_begun = self._is_lost = True
            if await self._may_have_lost():
                self._broker_watch.note_loss(self.name, self._missed_at)
            await self._leave_mark()  # only when there is nothing to take back

    async def _may_have_lost(self) -> bool:
        """Return whether the broker lost something.

        A new broker has lost nothing, and what is sent to it from now on must not be sent twice.
        """
        return self._was_seen or not (self._had_nothing or await self._broker_watch.gave_nothing_to(self.name))

    def _patience(self) -> int:
        """Return the number of looks after which this engine acts.

        Another engine may finish the mark that it began, unless it died. An engine that saw the mark looks twice,
        because a server that restarts may not show all of its queues at once.
        """
        if not self._was_seen:
            return LOOKS if self._is_begun else 1
        return MORE_LOOKS if self._is_begun else 2

    async def _leave_mark(self) -> None:
        if self._broker_watch.has_taken_back(self.name):
            await publish_all(self._broker, [Outgoing(self._mark, MARK)])
            self._note_mark()

    def _note_mark(self) -> None:
        self._was_seen, self._misses, self._is_lost, self.refusal = True, 0, False, None
