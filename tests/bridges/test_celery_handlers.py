"""A command in Celery's pool is answered or given back, whatever happens to it. Without a server."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.worker.request import Request

from oraculo.bootstrap import make_objects
from oraculo.bridges.celery.command_consumer import CommandRequest
from oraculo.bridges.celery.handlers import HandlerFailed, HandlerTask
from oraculo.bridges.celery.publisher import BlockingPublisher
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings
from oraculo.ports.broker import Outgoing, Receipt
from oraculo.settings import BrokerSettings, ObjectSettings, Settings
from oraculo.worker import App, DoNotRetry
from oraculo.worker.large_results import LargeAnswers

COMMAND = msgspec.json.encode(
    {
        "correlation_id": "r",
        "tipo_evento": "iniciar_execucao",
        "payload": {},
        "timestamp": "2026-01-01T00:00:00Z",
        "tarefa": "t",
        "tentativa": 1,
        "a_field_of_others": 7,
    }
).decode()
AWAY, REFUSED = BrokerUnavailable("it is away"), BrokerError("it is too large")
SOFT_LIMIT = SoftTimeLimitExceeded(1)


class FaultyBroker:
    """Raises these faults, one for each call, and keeps the messages of the other calls."""

    def __init__(self, *faults: Exception | None) -> None:
        self._faults = list(faults)
        self.published: list[Outgoing] = []

    async def start(self) -> None: ...

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        fault = self._faults.pop(0) if self._faults else None
        if fault is not None:
            raise fault
        self.published += messages
        return [Receipt("faulty") for _ in messages]

    @property
    def answers(self) -> list[Any]:
        return [msgspec.json.decode(each.body)["payload"] for each in self.published if each.reason is None]


def task(broker: Any, handle: Callable[[dict[str, Any]], Any] = lambda _: 5, **settings: Any) -> HandlerTask:
    app = App("de-teste")

    @app.executador("x")
    def work(payload: dict[str, Any]) -> Any:
        return handle(payload)

    [handler] = app.handlers.values()
    made = Settings(broker=BrokerSettings(prefix="p."), **settings)
    make = partial(make_objects, made) if made.objects.url else lambda: None
    _tasks.append(HandlerTask(handler, BlockingPublisher(lambda: broker), made, make))
    return _tasks[-1]


_tasks: list[HandlerTask] = []


@pytest.fixture(autouse=True)
def _no_loop_is_left() -> Iterator[None]:
    """In production the loop of a task lives as long as its thread."""
    yield
    while _tasks:
        _tasks.pop()._close_loop()


def is_given_back(work: HandlerTask) -> bool:
    with pytest.raises(Reject) as rejected:
        work.run(COMMAND)
    return bool(rejected.value.requeue)


def test_a_failure_that_a_handler_returns_is_answered_and_shown_by_celery() -> None:
    broker = FaultyBroker()
    returned = {"status": "erro", "erros": ["sem estoque"]}
    with pytest.raises(HandlerFailed, match="sem estoque"):
        task(broker, lambda _: returned).run(COMMAND)
    assert broker.answers == [returned]


def test_an_answer_is_published_once() -> None:
    broker = FaultyBroker()
    task(broker).run(COMMAND)
    assert broker.answers == [{"status": "ok", "resultado": 5}]


@pytest.mark.parametrize(
    "faults",
    [(AWAY,), (REFUSED, AWAY), (REFUSED, REFUSED, AWAY), (SOFT_LIMIT, AWAY), (InvalidSettings.at("x", "wrong"),)],
    ids=["away", "refused, then away", "dead letters away", "out of time, then away", "settings"],
)
def test_a_command_whose_answer_cannot_be_published_is_given_back(faults: Sequence[Exception]) -> None:
    broker = FaultyBroker(*faults)
    assert is_given_back(task(broker))
    assert broker.published == []


def test_an_answer_that_is_refused_ends_in_a_short_failure() -> None:
    broker = FaultyBroker(REFUSED)
    task(broker).run(COMMAND)
    [answer] = broker.answers
    assert answer == {"status": "erro", "erros": ["the broker refused the answer: it is too large"], "repetir": False}


def test_a_command_whose_every_answer_is_refused_rests_in_the_dead_letters() -> None:
    broker = FaultyBroker(REFUSED, REFUSED)
    task(broker).run(COMMAND)
    [letter] = broker.published
    assert (letter.queue, letter.body.decode()) == ("p.executador_x", COMMAND)
    assert letter.reason == "the broker refused the answer: it is too large"


def test_a_time_limit_while_the_answer_is_published_does_not_lose_it() -> None:
    broker = FaultyBroker(SOFT_LIMIT)
    task(broker).run(COMMAND)
    assert broker.answers == [{"status": "ok", "resultado": 5}]


@pytest.mark.parametrize("error", [BaseException("odd"), GeneratorExit("odd")], ids=["base", "exit"])
def test_whatever_a_handler_raises_is_answered(error: BaseException) -> None:
    """Celery acks the command of a failed task, so nobody else would answer it."""

    def fail(_: Any) -> None:
        raise error

    broker = FaultyBroker()
    with pytest.raises(HandlerFailed):
        task(broker, handle=fail).run(COMMAND)
    assert broker.answers == [{"status": "erro", "erros": [f"{type(error).__name__}: odd"]}]


def test_a_group_of_errors_is_answered_with_its_members() -> None:
    async def fail(_: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(refuse())

    async def refuse() -> None:
        raise DoNotRetry("no paper")

    broker = FaultyBroker()
    with pytest.raises(HandlerFailed):
        task(broker, handle=fail).run(COMMAND)
    assert broker.answers == [{"status": "erro", "erros": ["DoNotRetry: no paper"], "repetir": False}]


@pytest.mark.parametrize("where", ["resolved", "shortened"])
def test_a_time_limit_around_the_handler_is_answered(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object) -> bytes:
        raise SOFT_LIMIT

    monkeypatch.setattr(LargeAnswers, where, interrupted)
    broker = FaultyBroker()
    with pytest.raises(HandlerFailed, match="SoftTimeLimitExceeded"):
        task(broker).run(COMMAND)
    assert "SoftTimeLimitExceeded" in broker.answers[0]["erros"][0]


def test_settings_that_cannot_be_used_are_answered() -> None:
    broker = FaultyBroker()
    objects = ObjectSettings(url="nenhum://lugar")
    with pytest.raises(HandlerFailed, match="ORACULO_OBJECTS_URL"):
        task(broker, objects=objects).run(COMMAND)
    [answer] = broker.answers
    assert answer["status"] == "erro"
    assert "ORACULO_OBJECTS_URL" in answer["erros"][0]
    assert "repetir" not in answer, "another worker may have better settings"


@pytest.mark.parametrize(("fault", "given_back"), [(None, []), (AWAY, [True])])
def test_a_killed_handler_whose_answer_cannot_be_published_is_given_back(
    fault: Exception | None, given_back: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[Any] = []

    class Task:
        handler_task = task(FaultyBroker(fault))

    monkeypatch.setattr(Request, "on_timeout", lambda *_: happened.append("acked unless it was given back"))
    monkeypatch.setattr(Request, "reject", lambda _self, requeue: happened.append(requeue))
    request = object.__new__(CommandRequest)
    request._task, request._args = Task, [COMMAND]
    request.on_timeout(soft=False, timeout=1)
    assert happened == [*given_back, "acked unless it was given back"]
