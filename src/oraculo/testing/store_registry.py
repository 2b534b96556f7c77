"""The tests of the store suite about pipelines, engines, facts and the installation."""

import asyncio
import time

from oraculo.testing.store_runs import (
    NOW,
)
from oraculo.testing.store_stage import StoreStage


class StoreRegistry(StoreStage):
    """Tests about pipelines, engines, facts and the installation."""

    async def test_pipelines_are_put_replaced_and_deleted(self) -> None:
        async with self.opened() as store:
            assert await store.pipelines() == {}
            await store.put_pipeline("vídeo", b'{"v":1}', NOW)
            await store.put_pipeline("blog", b'{"b":1}', NOW)
            await store.put_pipeline("vídeo", b'{"v":2}', NOW + 1)
            assert await store.pipelines() == {"vídeo": b'{"v":2}', "blog": b'{"b":1}'}
            assert await store.delete_pipeline("vídeo") is True
            assert await store.delete_pipeline("vídeo") is False
            assert await store.pipelines() == {"blog": b'{"b":1}'}

    async def test_the_pipelines_mark_changes_with_every_put_and_delete(self) -> None:
        async with self.opened() as store:
            marks = [await store.pipelines_mark()]
            for definition in (b"{}", b'{"a":1}', b'{"a":1}'):
                await store.put_pipeline("p", definition, NOW)  # all at one moment: the mark is no time
                marks.append(await store.pipelines_mark())
            assert await store.delete_pipeline("p")
            marks.append(await store.pipelines_mark())
            assert len(set(marks)) == len(marks)
            assert await store.pipelines_mark() == marks[-1]

    # -- engines ------------------------------------------------------------------------------------------------

    async def test_engines_that_attend_see_each_other(self) -> None:
        async with self.opened() as store:
            assert await store.attend("b", NOW, 5) == ["b"]
            assert await store.attend("a", NOW + 1, 5) == ["a", "b"]
            assert await store.attend("b", NOW + 2, 5) == ["a", "b"]

    async def test_an_engine_that_no_longer_attends_is_forgotten(self) -> None:
        async with self.opened() as store:
            await store.attend("a", NOW, 5)
            assert await store.attend("b", NOW + 5, 5) == ["a", "b"]
            assert await store.attend("b", NOW + 5.5, 5) == ["b"]
            assert await store.attend("a", NOW + 6, 5) == ["a", "b"]

    async def test_an_engine_that_was_noted_before_the_clock_was_set_back_is_forgotten(self) -> None:
        async with self.opened() as store:
            await store.attend("dead", NOW, 5)
            assert await store.attend("alive", NOW - 600, 5) == ["alive"]
            await store.attend("other", NOW - 599, 5)
            assert await store.attend("alive", NOW - 598, 5) == ["alive", "other"]

    async def test_whoever_is_no_engine_sees_those_that_attend(self) -> None:
        async with self.opened() as store:
            assert list(await store.engines(NOW - 5)) == []
            await store.attend("b", NOW, 5)
            await store.attend("a", NOW + 1, 5)
            assert list(await store.engines(NOW)) == ["a", "b"]
            assert list(await store.engines(NOW + 0.5)) == ["a"]
            assert list(await store.engines(NOW + 1.5)) == []
            assert await store.attend("a", NOW + 2, 5) == ["a", "b"], "looking forgets nobody"

    async def test_an_installation_has_a_name_of_its_own_that_stays(self) -> None:
        async with self.opened() as store, self.opened() as other:
            names = await asyncio.gather(store.installation(), other.installation())
            assert names[0] == names[1] == await store.installation()
            assert len(names[0]) == 32
            reopened = await self.reopen(store)
            assert await reopened.installation() == names[0]
            await reopened.close()

    async def test_what_was_noted_once_is_known_to_all_and_stays(self) -> None:
        async with self.opened() as store, self.opened() as other:
            assert not await store.noted("seen: /a")
            await asyncio.gather(store.note("seen: /a"), other.note("seen: /a"))
            assert await store.noted("seen: /a")
            assert await other.noted("seen: /a")
            assert not await store.noted("seen: /b")
            reopened = await self.reopen(store)
            assert await reopened.noted("seen: /a")
            await reopened.close()

    async def test_its_own_clock_goes_on_by_seconds_since_1970(self) -> None:
        async with self.opened() as store:
            if (first := await store.clock()) is not None:
                second = await store.clock()
                assert second is not None
                assert first <= second < first + 60
                assert abs(time.time() - first) < 60, "the server of a test goes by this machine's clock"

    async def test_an_engine_that_departs_is_forgotten_at_once(self) -> None:
        async with self.opened() as store:
            await store.attend("a", NOW, 5)
            await store.attend("b", NOW, 5)
            await store.depart("a")
            await store.depart("nobody")
            assert await store.attend("b", NOW, 5) == ["b"]
