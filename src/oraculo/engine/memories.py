"""Notices a broker that has forgotten what it took: one that came back empty, as a container does without its volume.

Some servers tell that while somebody is connected (`Link.losses`), others never, and none tells it to an engine that
was away meanwhile. So engines leave a mark on each broker: a queue into which nothing is ever put. Where it is missing,
whatever the broker had taken is gone, if there was anything. It is made again once all of that has been taken back, so
that an engine which dies before leaves the rest to the next one.
"""

import asyncio
from contextlib import suppress

from oraculo.core.naming import QueueNames
from oraculo.engine.links import LinkWatch
from oraculo.engine.peers import Peers
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Broker
from oraculo.ports.telemetry import LoopFailed, Telemetry

LOOK_EVERY = 2.0  # seconds
SIGHTS = 3  # of a missing mark, before the next engine takes it up: the one before it may be at it


class Memories:
    def __init__(
        self,
        broker: Broker,
        links: LinkWatch,
        peers: Peers,
        names: QueueNames,
        telemetry: Telemetry,
        poll: float,
    ) -> None:
        self._memories = [_Memory(each, links, peers, names) for each in broker.behind()]
        self._telemetry = telemetry
        self._poll = poll

    async def run(self) -> None:
        while self._memories:
            for memory in list(self._memories):
                await self._look_at(memory)
            is_lost = any(memory.is_lost for memory in self._memories)
            await asyncio.sleep(min(self._poll, LOOK_EVERY) if is_lost else LOOK_EVERY)
        await asyncio.Event().wait()  # no broker lets us leave a mark

    async def _look_at(self, memory: "_Memory") -> None:
        try:
            with suppress(BrokerUnavailable):  # the next look tries again
                await memory.look()
        except BrokerError as error:
            self._memories.remove(memory)
            blind = f"should {memory.name} come back empty, that is not noticed: {error}"
            self._telemetry.emit(LoopFailed("memories", blind))


class _Memory:
    """Of one broker."""

    def __init__(self, broker: Broker, links: LinkWatch, peers: Peers, names: QueueNames) -> None:
        self.name = broker.name
        self.is_lost = False
        self._broker = broker
        self._links = links
        self._peers = peers
        self._mark, self._trial = names.memory, names.memory_trial
        self._begun: float | None = None  # by the loop's time: the first look
        self._losses: int | None = None  # those that it had told of by itself when its mark was last there
        self._sights = 0  # of the missing mark, since then

    async def look(self) -> None:
        if self._begun is None:
            self._begun = asyncio.get_running_loop().time()
        [link] = self._broker.links()
        if link.trouble is not None:
            return
        if await self._broker.queues([self._mark]):
            self._note_mark(link.losses)
        elif not self.is_lost:
            await self._miss(link.losses)
        elif self._links.has_taken_back(self.name):
            await self._leave_mark(link.losses)
            await self._broker.remove([self._trial])

    async def _miss(self, losses: int) -> None:
        """The engine whose turn it is takes it up at once when it never saw the mark: what it sent itself came later.
        Else at the second sight, for the broker may be about to tell of its loss by itself, and that one is taken care
        of already."""
        self._sights += 1
        first = 1 if self._losses is None else 2
        if self._sights < first + SIGHTS * self._peers.rank(self.name):
            return
        if await self._links.is_held(self.name):
            await self._broker.declare([self._trial])  # where even that is refused, not all is sent again at each start
            self.is_lost = True
            if self._losses is None:
                self._links.note_loss(self.name, self._begun)
            elif losses == self._losses:
                self._links.note_loss(self.name)
        else:
            await self._leave_mark(losses)

    async def _leave_mark(self, losses: int) -> None:
        await self._broker.declare([self._mark])
        self._note_mark(losses)

    def _note_mark(self, losses: int) -> None:
        self._losses, self._sights, self.is_lost = losses, 0, False
