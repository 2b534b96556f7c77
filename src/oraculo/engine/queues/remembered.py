"""The queues of commands in work and of dead letters, read from the store for brokers that cannot list queues.

A queue that only requests name is thus shown after a restart too, and by engines that did not send to it.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice

from oraculo.errors import BrokerError, WrittenByNewer
from oraculo.pipeline.definition import decode_definition
from oraculo.ports.broker_admin import FullBroker, QueueState
from oraculo.ports.readable import readable
from oraculo.ports.store import Snapshot, Store
from oraculo.wire.naming import QueueNames

LOOK_EVERY = 60.0  # seconds
_LOOKS_TOGETHER = 3  # queues that the broker is asked about at a time
_PAGE = 20  # runs that are in memory at a time, with their payloads
_MOST_RUNS = 1000  # that are read for each broker, because many runs share few queues
_WIDEST = 100  # tasks; a wider run takes long to load and is skipped
_MOST_QUEUES = 100  # that are remembered, because a list of all queues looks at each


class RememberedQueues:
    """The names of such queues, looked up now and then."""

    def __init__(self, broker: FullBroker, store: Store) -> None:
        self._broker = broker
        self._store = store
        self.names: frozenset[str] = frozenset()  # without the prefix

    async def run(self) -> None:
        while True:
            found: dict[str, None] = {}
            for dead_letters in (True, False):  # dead letters come first, because nothing else reveals them
                for broker in self._without_a_list():
                    found |= dict.fromkeys(sorted(await self._of_runs(broker, dead_letters=dead_letters)))
            self.names = frozenset(islice(found, _MOST_QUEUES))
            await asyncio.sleep(LOOK_EVERY)

    async def unlisted(self, listed: Iterable[QueueState], names: QueueNames) -> list[QueueState]:
        """Return the states of queues that the broker does not list and the store knows."""
        wanted = set(map(names.physical, self.names)) - {state.queue for state in listed}
        left, found = iter(sorted(wanted)), list[QueueState]()

        async def look() -> None:
            for name in left:
                with suppress(BrokerError):  # a queue that the broker hides is left out
                    found.extend(await self._broker.queues([name]))

        await asyncio.gather(*(look() for _ in range(_LOOKS_TOGETHER)))  # more at once would delay each other
        return found

    def _without_a_list(self) -> list[str]:
        brokers = zip(self._broker.statuses(), self._broker.behind(), strict=True)
        return [status.name for status, broker in brokers if not broker.capabilities.lists_queues]

    async def _of_runs(self, broker: str, *, dead_letters: bool) -> set[str]:
        found: set[str] = set()
        after, seen = "", 0
        while seen < _MOST_RUNS and (
            page := await self._store.held_by(broker, _PAGE, after, dead_letters=dead_letters)
        ):
            for snapshot in await self._narrow(page):
                found |= _queues_of(snapshot)
            after, seen = page[-1], seen + len(page)
        return found

    async def _narrow(self, run_ids: Sequence[str]) -> Sequence[Snapshot]:
        heads, _ = await readable(self._store.heads, run_ids)
        narrow = [run_id for run_id, head in heads.items() if head.total <= _WIDEST]
        found, _ = await readable(self._store.load, narrow)
        return list(found.values())


def _queues_of(snapshot: Snapshot) -> set[str]:
    """Return the queues of a run at which a broker took something."""
    try:
        steps = decode_definition(snapshot.definition).steps
    except WrittenByNewer:
        return set()
    return {steps[task.number].queue for task in snapshot.tasks if task.via is not None}
