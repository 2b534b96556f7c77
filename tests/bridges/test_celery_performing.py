"""Whatever becomes of a command in Celery's pool, its run is told, or the command comes again. Without a server."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.worker.request import Request

from oraculo.celery_app.commands import CommandRequest
from oraculo.celery_app.performing import HandlerFailed, Performer
from oraculo.errors import BrokerError, BrokerUnavailable, InvalidSettings
from oraculo.ports.broker import Outgoing
from oraculo.ports.clock import SystemClock
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


class Publisher:
    """Raises what it is told to, one for each call, and keeps the messages of the others."""

    def __init__(self, *faults: Exception | None) -> None:
        self._faults = list(faults)
        self.published: list[Outgoing] = []

    def publish(self, messages: Sequence[Outgoing]) -> None:
        fault = self._faults.pop(0) if self._faults else None
        if fault is not None:
            raise fault
        self.published += messages

    @property
    def answers(self) -> list[Any]:
        return [msgspec.json.decode(each.body)["payload"] for each in self.published if each.reason is None]


def performer(publisher: Any, handle: Callable[[dict[str, Any]], Any] = lambda _: 5, **settings: Any) -> Performer:
    app = App("de-teste")

    @app.executador("x")
    def work(payload: dict[str, Any]) -> Any:
        return handle(payload)

    [handler] = app.handlers.values()
    made = Settings(broker=BrokerSettings(prefix="p."), **settings)
    return Performer(handler, publisher, made, SystemClock())


def test_a_failure_that_a_handler_returns_is_answered_and_shown_by_celery() -> None:
    publisher = Publisher()
    returned = {"status": "erro", "erros": ["sem estoque"]}
    with pytest.raises(HandlerFailed, match="sem estoque"):
        performer(publisher, lambda _: returned).perform(COMMAND)
    assert publisher.answers == [returned]


def is_given_back(work: Performer) -> bool:
    with pytest.raises(Reject) as rejected:
        work.perform(COMMAND)
    return bool(rejected.value.requeue)


def test_an_answer_is_published_once() -> None:
    publisher = Publisher()
    performer(publisher).perform(COMMAND)
    assert publisher.answers == [{"status": "ok", "resultado": 5}]


@pytest.mark.parametrize(
    "faults",
    [(AWAY,), (REFUSED, AWAY), (REFUSED, REFUSED, AWAY), (SOFT_LIMIT, AWAY), (InvalidSettings.at("x", "wrong"),)],
    ids=["away", "refused, then away", "dead letters away", "out of time, then away", "settings"],
)
def test_a_command_whose_run_cannot_be_told_is_given_back(faults: Sequence[Exception]) -> None:
    publisher = Publisher(*faults)
    assert is_given_back(performer(publisher))
    assert publisher.published == []


def test_an_answer_that_is_refused_ends_in_a_short_failure() -> None:
    publisher = Publisher(REFUSED)
    performer(publisher).perform(COMMAND)
    [told] = publisher.answers
    assert told == {"status": "erro", "erros": ["the broker refused the answer: it is too large"], "repetir": False}


def test_a_command_whose_every_answer_is_refused_rests_in_the_dead_letters() -> None:
    publisher = Publisher(REFUSED, REFUSED)
    performer(publisher).perform(COMMAND)
    [letter] = publisher.published
    assert (letter.queue, letter.body.decode()) == ("p.executador_x", COMMAND)
    assert letter.reason == "the broker refused the answer: it is too large"


def test_a_time_limit_while_the_answer_is_published_does_not_lose_it() -> None:
    publisher = Publisher(SOFT_LIMIT)
    performer(publisher).perform(COMMAND)
    assert publisher.answers == [{"status": "ok", "resultado": 5}]


@pytest.mark.parametrize("error", [BaseException("odd"), GeneratorExit("odd")], ids=["base", "exit"])
def test_whatever_a_handler_raises_is_told(error: BaseException) -> None:
    """Celery acks the command of a task that has failed, so nobody else would answer it."""

    def fail(_: Any) -> None:
        raise error

    publisher = Publisher()
    with pytest.raises(HandlerFailed):
        performer(publisher, handle=fail).perform(COMMAND)
    assert publisher.answers == [{"status": "erro", "erros": [f"{type(error).__name__}: odd"]}]


def test_of_a_group_of_errors_what_is_in_it_is_told() -> None:
    async def fail(_: Any) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(refuse())

    async def refuse() -> None:
        raise DoNotRetry("no paper")

    publisher = Publisher()
    with pytest.raises(HandlerFailed):
        performer(publisher, handle=fail).perform(COMMAND)
    assert publisher.answers == [{"status": "erro", "erros": ["DoNotRetry: no paper"], "repetir": False}]


@pytest.mark.parametrize("where", ["resolved", "shortened"])
def test_a_time_limit_around_the_handler_is_told(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: object) -> bytes:
        raise SOFT_LIMIT

    monkeypatch.setattr(LargeAnswers, where, interrupted)
    publisher = Publisher()
    with pytest.raises(HandlerFailed, match="SoftTimeLimitExceeded"):
        performer(publisher).perform(COMMAND)
    assert "SoftTimeLimitExceeded" in publisher.answers[0]["erros"][0]


def test_settings_that_cannot_be_used_are_told() -> None:
    publisher = Publisher()
    objects = ObjectSettings(url="nenhum://lugar")
    with pytest.raises(HandlerFailed, match="ORACULO_OBJECTS_URL"):
        performer(publisher, objects=objects).perform(COMMAND)
    [told] = publisher.answers
    assert told["status"] == "erro"
    assert "ORACULO_OBJECTS_URL" in told["erros"][0]
    assert "repetir" not in told, "another worker may have better settings"


@pytest.mark.parametrize(("fault", "given_back"), [(None, []), (AWAY, [True])])
def test_a_killed_handler_whose_run_cannot_be_told_is_given_back(
    fault: Exception | None, given_back: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[Any] = []

    class Task:
        performer = performer(Publisher(fault))

    monkeypatch.setattr(Request, "on_timeout", lambda *_: happened.append("acked unless it was given back"))
    monkeypatch.setattr(Request, "reject", lambda _self, requeue: happened.append(requeue))
    request = object.__new__(CommandRequest)
    request._task, request._args = Task, [COMMAND]
    request.on_timeout(soft=False, timeout=1)
    assert happened == [*given_back, "acked unless it was given back"]
