"""Notices a broker that has forgotten what it took: one that came back empty, as a container does without its volume.

Some servers tell that while somebody is connected (`Link.losses`), others never, and none tells it to an engine that
was away meanwhile. So engines leave a mark on each broker: a queue that nobody reads, with a message. Where the queue
is missing, whatever the broker had taken is gone, if there was anything. It is made at once, so that a broker which is
emptied again is noticed too; the message follows when all has been taken back, so that an engine which dies before
leaves the rest to the next one.
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
BEGUN_WITHIN = 1.0  # seconds that a start waits for the marks: what is late the looks see to
SIGHTS = 5  # of a queue without its message, after which the engine that made it is not waited for
# By an engine that saw the message before: RabbitMQ counts none in a queue whose leader does not answer.
SIGHTS_MORE = 30


class BrokerMarks:
    def __init__(
        self, broker: FullBroker, links: BrokerWatch, names: QueueNames, telemetry: Telemetry, poll: float
    ) -> None:
        self._memories = [_BrokerMark(each, links, names.memory) for each in broker.behind()]
        self._telemetry = telemetry
        self._poll = poll

    async def begin(self) -> None:
        """Before anything is sent. A broker to which nothing was given has nothing to lose and gets its mark at once,
        also from an API: else whoever looks first would take it for one that forgot what was sent meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BEGUN_WITHIN):
                for memory in self._memories:
                    with suppress(BrokerError):  # the looks that follow tell
                        await memory.begin()

    async def run(self) -> None:
        while True:
            for memory in self._memories:
                await self._look_at(memory)
            in_haste = any(memory.is_in_haste for memory in self._memories)
            await asyncio.sleep(min(self._poll, LOOK_EVERY) if in_haste else LOOK_EVERY)

    async def _look_at(self, memory: "_BrokerMark") -> None:
        """One that lets us leave no mark is told of once."""
        try:
            with suppress(BrokerUnavailable):  # the next look tries again
                await memory.look()
        except BrokerError as error:
            if memory.refusal is None:
                blind = f"should {memory.name} come back empty, that is not noticed: {error}"
                self._telemetry.emit(LoopFailed("memories", blind))
            memory.refusal = error


class _BrokerMark:
    """Of one broker."""

    def __init__(self, broker: FullBroker, links: BrokerWatch, mark: str) -> None:
        self.name = broker.name
        self.refusal: BrokerError | None = None
        self._broker = broker
        self._broker_watch = links
        self._mark = mark
        self._is_reached = False
        self._losses: int | None = None  # those that it had told of by itself when its mark was last there
        self._missed_at = 0.0  # by the loop's time: just before the look that first did not find it
        self._sights = 0  # of its absence
        self._is_begun = False  # an engine has made the queue since then, and its message is still to come
        self._is_lost = False  # this engine takes back what the broker had
        self._had_nothing = False  # when it was last seen to be away: what was sent since it was given as it is now

    @property
    def is_in_haste(self) -> bool:
        return self._is_lost or not self._is_reached

    async def begin(self) -> None:
        """What was begun and not ended is ended here too: its engine died, or ends it once more, which is no harm."""
        [link] = self._broker.statuses()
        if link.trouble is None and not await self._is_marked() and await self._broker_watch.gave_nothing_to(self.name):
            await self._broker.declare([self._mark])
            await publish_all(self._broker, [Outgoing(self._mark, MARK)])

    async def _is_marked(self) -> bool:
        return any(state.ready for state in await self._broker.queues([self._mark]))

    async def look(self) -> None:
        now = asyncio.get_running_loop().time()
        [link] = self._broker.statuses()
        if link.trouble is not None:
            self._had_nothing = self._losses is None and await self._broker_watch.gave_nothing_to(self.name)
            return
        state = next(iter(await self._broker.queues([self._mark])), None)
        self._is_reached = True
        if state is not None and state.ready:
            self._note_mark(link.losses)
        elif state is None or not self._is_lost:
            await self._miss(now, is_begun=state is not None)
        else:
            await self._leave_mark(link.losses)

    async def _miss(self, now: float, *, is_begun: bool) -> None:
        """What is sent from the first sight on went to the broker as it is now; unless it is emptied again."""
        is_emptied_again = self._is_begun and not is_begun
        self._had_nothing = self._had_nothing and not is_emptied_again
        if not self._sights or is_emptied_again:
            self._missed_at, self._sights, self._is_lost = now, 0, False
        self._sights += 1
        self._is_begun = is_begun
        if self._sights >= self._patience():
            await self._broker.declare([self._mark])  # where that is refused, not all is sent again at each start
            self._is_begun = self._is_lost = True
            if await self._may_have_lost():
                self._broker_watch.note_loss(self.name, self._missed_at)
            await self._leave_mark(self._broker.statuses()[0].losses)  # at once when there is nothing to take back

    async def _may_have_lost(self) -> bool:
        """Something that it does not tell of by itself. One that is new has lost nothing; what is sent to it from now
        on is not to be sent twice."""
        if self._losses is None:
            return not (self._had_nothing or await self._broker_watch.gave_nothing_to(self.name))
        return self._losses == self._broker.statuses()[0].losses

    def _patience(self) -> int:
        """What another engine has begun it may end, unless it died. Else this one takes it up: at once when it never
        saw the mark, and at the second sight when it did, for the broker may be about to tell of its loss by itself,
        which is taken care of already."""
        if self._losses is None:
            return SIGHTS if self._is_begun else 1
        return SIGHTS_MORE if self._is_begun else 2

    async def _leave_mark(self, losses: int) -> None:
        if self._broker_watch.has_taken_back(self.name):
            await publish_all(self._broker, [Outgoing(self._mark, MARK)])
            self._note_mark(losses)

    def _note_mark(self, losses: int) -> None:
        self._losses, self._sights, self._is_lost, self.refusal = losses, 0, False, None
