"""The suite for stores that write an engine's commits in the order in which it gave them: more than the port asks."""

import asyncio

from oraculo.core.events import Progressed
from oraculo.testing.store_runs import changed, create, load, make_run
from oraculo.testing.store_suite import StoreSuite


class InOrderSuite(StoreSuite):
    async def test_successive_changes_of_one_run_that_do_not_wait(self) -> None:
        async with self.opened() as store:
            run = make_run("a")
            await create(store, run)
            first = store.commit([], [changed(run, Progressed(0, 1.0, "first"))])
            run.head.version = 2  # an engine so sure of itself that it does not wait
            second = changed(run, Progressed(0, 2.0, "second"))
            run.head.version = 1
            results = await asyncio.gather(first, store.commit([], [second]))
            assert [result.conflicts for result in results] == [frozenset(), frozenset()]
            snapshot = await load(store, "a")
            assert (snapshot.head.version, snapshot.tasks[0].note) == (3, "second")
