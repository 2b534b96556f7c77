"""An API beside engines looks whether anybody hears the answers: an engine may live, and use other queues."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from oraculo.engine import health
from oraculo.engine.health import unheard_answers
from oraculo.errors import BrokerUnavailable
from oraculo.ports.broker import QueueState

ASK = "see whether the engines have the same ORACULO_BROKER_URL and ORACULO_BROKER_PREFIX"
QUEUE = "x.resultados"
Look = QueueState | Exception | None


class Seen:
    """A broker that is seen in one state after the other."""

    def __init__(self, *looks: Look) -> None:
        self._looks = list(looks)

    async def queues(self, names: Sequence[str]) -> Sequence[QueueState]:
        assert list(names) == [QUEUE]
        look = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if isinstance(look, Exception):
            raise look
        return [] if look is None else [look]


def state(ready: int, unacked: int | None, consumers: int | None, **at: QueueState) -> QueueState:
    return QueueState(QUEUE, ready, unacked, 0, consumers, at=at)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_MOMENT", 0.0)


async def told(*looks: Look) -> str | None:
    broker: Any = Seen(*looks)
    return await unheard_answers(broker, QUEUE)


NOBODY = state(0, 0, 0)
HEARD = state(5, 0, 1)
UNSURE = state(2, 0, None)


@pytest.mark.parametrize(
    ("look", "why"),
    [
        (NOBODY, f"nobody listens on queue {QUEUE}, where answers come: {ASK}"),
        (state(1, 0, 0), f"nobody listens on queue {QUEUE}, where answers come, and 1 message waits there: {ASK}"),
        (state(2, 0, 0), f"nobody listens on queue {QUEUE}, where answers come, and 2 messages wait there: {ASK}"),
        (HEARD, None),
        (UNSURE, f"2 messages wait in queue {QUEUE}, where answers come, and nobody seems to take them: {ASK}"),
        (
            state(1, 0, None),
            f"1 message waits in queue {QUEUE}, where answers come, and nobody seems to take it: {ASK}",
        ),
        (state(2, 1, None), None),  # somebody took one
        (state(2, None, None), None),  # perhaps
        (state(0, 0, None), None),
        (None, None),  # it may be seen by nobody
    ],
)
async def test_what_is_told_of_the_queue(look: Look, why: str | None) -> None:
    assert await told(look) == why


@pytest.mark.parametrize("looks", [(NOBODY, HEARD), (HEARD, NOBODY), (UNSURE, state(2, 2, None)), (NOBODY, None)])
async def test_what_is_so_for_a_moment_is_not_told(looks: Sequence[Look]) -> None:
    assert await told(*looks) is None


@pytest.mark.parametrize(
    "looks", [(BrokerUnavailable("away"),), (NOBODY, BrokerUnavailable("away")), (TimeoutError(),)]
)
async def test_a_broker_that_is_away_is_told_as_that(looks: Sequence[Look]) -> None:
    assert await told(*looks) is None


async def test_a_broker_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PATIENCE", 0.01)

    class Silent:
        queues = staticmethod(lambda _: asyncio.Event().wait())

    broker: Any = Silent()
    async with asyncio.timeout(5):
        assert await unheard_answers(broker, QUEUE) is None


async def test_of_several_brokers_those_are_named_where_nobody_hears() -> None:
    each = state(7, 0, 1, rabbitmq=HEARD, redis=NOBODY, nats=UNSURE)
    assert await told(each) == (
        f"nobody listens on queue {QUEUE} at broker redis, where answers come; "
        f"2 messages wait in queue {QUEUE} at broker nats, where answers come, and nobody seems to take them: {ASK}"
    )
    fewer = state(5, 0, 1, rabbitmq=HEARD, redis=NOBODY)
    for looks in ((each, fewer), (fewer, each)):
        assert await told(*looks) == f"nobody listens on queue {QUEUE} at broker redis, where answers come: {ASK}"
