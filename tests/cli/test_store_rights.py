"""The documented rights for a Redis store are needed and suffice; `oraculo doctor` sees what is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from oraculo.stores.redis import RedisStore
from oraculo.testing.store_suite import StoreSuite
from tests.cli.test_doctor import doctor
from tests.servers.fleet import Fleet

DOC = (Path(__file__).parents[2] / "docs" / "reference" / "limits-stores.md").read_text("utf-8")
DOCUMENTED = next(line for line in DOC.splitlines() if line.startswith("ACL SETUSER")).split()
RULES = [rule for rule in DOCUMENTED if rule[0] in "~+"]


def url_of(fleet: Fleet) -> str:
    """Of another database than the first, which takes a right to select."""
    return f"{fleet.url('redis').removesuffix('/0')}/1"


@pytest.fixture
def plain(fleet: Fleet) -> Iterator[Any]:
    with redis.Redis.from_url(url_of(fleet)) as client:
        yield client


@contextmanager
def user_with(plain: Any, fleet: Fleet, *rules: str) -> Iterator[str]:
    """The URL of a store for a new user who has these rights, on keys that nobody else has."""
    name = f"u{uuid4().hex[:8]}"
    own = [rule.replace("~oraculo:", f"~{name}:") for rule in rules]
    plain.execute_command("ACL", "SETUSER", name, "on", ">pw", *own)
    try:
        yield f"{url_of(fleet).replace('redis://', f'redis://{name}:pw@')}?namespace={name}"
    finally:
        plain.acl_deluser(name)
        if left := plain.keys(f"{name}:*"):
            plain.unlink(*left)


class TestWithTheDocumentedRights(StoreSuite):
    @pytest.fixture(autouse=True)
    def _url(self, plain: Any, fleet: Fleet) -> Iterator[None]:
        with user_with(plain, fleet, *RULES) as self.url:
            yield

    async def make_store(self) -> RedisStore:
        store = RedisStore(self.url)
        await store.start()
        return store


def test_doctor_needs_what_the_docs_list(plain: Any, fleet: Fleet) -> None:
    with user_with(plain, fleet, *RULES) as url:
        _, checks = doctor(ORACULO_STORE_URL=url)
    assert checks["store"]["estado"] == "ok", checks["store"]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("+info", "+time")])
def test_doctor_finds_each_right_that_is_missing(plain: Any, fleet: Fleet, rule: str) -> None:
    with user_with(plain, fleet, *(one for one in RULES if one != rule)) as url:
        _, checks = doctor(ORACULO_STORE_URL=url)
    assert checks["store"]["estado"] == "erro", checks["store"]


async def test_without_the_right_to_ask_for_its_time_it_has_no_clock(plain: Any, fleet: Fleet) -> None:
    with user_with(plain, fleet, *(one for one in RULES if one != "+time")) as url:
        store = RedisStore(url)
        await store.start()
        assert await store.clock() is None
        await store.close()


def test_doctor_says_what_it_cannot_see_without_info(plain: Any, fleet: Fleet) -> None:
    with user_with(plain, fleet, *(one for one in RULES if one != "+info")) as url:
        _, checks = doctor(ORACULO_STORE_URL=url)
    assert checks["store"]["estado"] == "aviso"
    assert "may not ask INFO, so that nobody sees whether it evicts or loses runs" in checks["store"]["detalhe"]
