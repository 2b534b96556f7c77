"""`oraculo worker` against a broker that it may take for a shared one."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import Result
from typer.testing import CliRunner

from oraculo.brokers.memory import MemoryBroker
from oraculo.cli import serving
from oraculo.cli.app import app
from oraculo.errors import BrokerError, OraculoError
from oraculo.ports.broker import Outgoing, Receipt
from oraculo.ports.clock import SystemClock
from oraculo.wire.message import decode_message
from tests.cli.test_output import FullDisk

needs_full_device = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="only Linux has a device that is always full"
)
COMMAND = (
    b'{"correlation_id": "r", "tarefa": "t", "tentativa": 1, "tipo_evento": "iniciar_execucao",'
    b' "payload": {}, "timestamp": "2026-01-01T00:00:00Z"}'
)
APP = """
import os, signal
from oraculo.worker import App

app = App("meu")


@app.executador("meu")
async def work(payload: dict) -> str:
    os.kill(os.getpid(), signal.SIGTERM)
    return "feito"
"""


class OneCommand(MemoryBroker):
    """Has one command waiting, and keeps the answers that it held when it was closed."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.answers: list[Any] = []
        self._has_given = False

    async def start(self) -> None:
        await super().start()
        if not self._has_given:
            self._has_given = True
            await self.publish([Outgoing("teste.executador_meu", COMMAND)])

    async def close(self) -> None:
        consumer = await self.consume("teste.resultados", prefetch=10)
        self.answers = [decode_message(each.body) for each in await consumer.take(10)]
        await super().close()


def test_a_worker_answers_until_a_signal_and_its_last_answer_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meus_de_teste.py").write_text(APP)
    broker = OneCommand()
    monkeypatch.setattr(serving, "make_broker", lambda *_: broker)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    env = {"ORACULO_BROKER_URL": "amqp://somewhere", "ORACULO_PREFIX": "teste."}
    result = CliRunner().invoke(app, ["worker", "meus_de_teste:app"], env=env)
    assert result.exit_code == 0, result.output
    assert [bytes(answer.payload) for answer in broker.answers] == [b'{"status":"ok","resultado":"feito"}']
    assert signal.getsignal(signal.SIGTERM) is before, "the process has its handlers back"


class Refusing(MemoryBroker):
    is_closed = False

    def __init__(self) -> None:
        super().__init__(SystemClock())

    async def start(self) -> None:
        raise BrokerError("RabbitMQ at somewhere: ACCESS_REFUSED - Login was refused")

    async def close(self) -> None:
        self.is_closed = True


class Frozen(Refusing):
    async def start(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()


def _worked(broker: MemoryBroker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    (folder / "meus_de_teste.py").write_text(APP)
    monkeypatch.setattr(serving, "make_broker", lambda *_: broker)
    monkeypatch.syspath_prepend(str(folder))
    return CliRunner().invoke(app, ["worker", "meus_de_teste:app"], env={"ORACULO_BROKER_URL": "amqp://somewhere"})


def test_a_worker_that_its_broker_does_not_let_in_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Refusing()
    result = _worked(broker, tmp_path, monkeypatch)
    assert result.exit_code == 2
    assert result.stderr == "oraculo: RabbitMQ at somewhere: ACCESS_REFUSED - Login was refused\n"
    assert broker.is_closed


def test_a_signal_ends_a_worker_whose_broker_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Frozen()
    result = _worked(broker, tmp_path, monkeypatch)
    assert result.exit_code == 0, result.output
    assert broker.is_closed


@contextmanager
def _stderr_full() -> Iterator[None]:
    """The process's own, as on a full disk."""
    before = os.dup(2)
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@needs_full_device
def test_a_signal_ends_a_worker_that_cannot_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Frozen()
    with _stderr_full():
        result = _worked(broker, tmp_path, monkeypatch)
    assert result.exit_code == 0, result.output
    assert broker.is_closed


@needs_full_device
@pytest.mark.parametrize(("error", "status"), [(None, 0), (OraculoError("a part of it failed"), 2)])
def test_a_handler_that_never_ends_is_left_behind_though_nobody_can_hear_it(
    error: Exception | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    with _stderr_full():
        serving._leave_behind(error)
    assert left == [status]


@needs_full_device
def test_a_second_signal_ends_the_process_though_nobody_can_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with _stderr_full(), serving._first_signal(lambda: None):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert left == [128 + signal.SIGTERM]


FORKING_APP = """
import multiprocessing, os, signal, time
from oraculo.worker import App

app = App("pai")


@app.executador("meu")
def work(payload: dict) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(5)
    code = child.exitcode
    child.kill()
    os.kill(os.getpid(), signal.SIGTERM)
    return code
"""


def test_a_process_that_a_handler_forks_ends_when_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pai_de_teste.py").write_text(FORKING_APP)
    broker = OneCommand()
    monkeypatch.setattr(serving, "make_broker", lambda *_: broker)
    monkeypatch.syspath_prepend(str(tmp_path))
    env = {"ORACULO_BROKER_URL": "amqp://somewhere", "ORACULO_PREFIX": "teste."}
    result = CliRunner().invoke(app, ["worker", "pai_de_teste:app"], env=env)
    assert result.exit_code == 0, result.output
    assert [bytes(answer.payload) for answer in broker.answers] == [b'{"status":"ok","resultado":-15}']


class NoAnswers(OneCommand):
    """Breaks its promise: it returns no receipt for an answer."""

    async def publish(self, messages: Sequence[Outgoing]) -> Sequence[Receipt]:
        if messages[0].queue == "teste.resultados":
            return []
        return await super().publish(messages)

    async def close(self) -> None:
        await MemoryBroker.close(self)


def test_a_worker_that_fails_ends_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "falha_de_teste.py").write_text(APP.replace("os.kill(os.getpid(), signal.SIGTERM)", ""))
    monkeypatch.setattr(serving, "make_broker", lambda *_: NoAnswers())
    monkeypatch.syspath_prepend(str(tmp_path))
    env = {"ORACULO_BROKER_URL": "amqp://somewhere", "ORACULO_PREFIX": "teste."}
    result = CliRunner().invoke(app, ["worker", "falha_de_teste:app"], env=env)
    assert result.exit_code == 2, result.output
    assert "oraculo: worker 'meu' stopped, for a part of it failed: ValueError" in result.stderr


def test_a_worker_that_fails_ends_though_a_handler_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever looks after the process would take it for one that works."""
    left_behind, handler = list[Exception | None](), threading.Event()

    def leave_behind(error: Exception | None = None) -> None:
        left_behind.append(error)
        handler.set()

    async def fail() -> None:
        asyncio.get_running_loop().run_in_executor(None, handler.wait)
        raise OraculoError("a part of it failed")

    monkeypatch.setattr(serving, "_CLOSE_GRACE", 0.05)
    monkeypatch.setattr(serving, "_leave_behind", leave_behind)
    with pytest.raises(OraculoError) as raised:
        serving._run(fail(), uvicorn.Config(serving._no_app))
    assert left_behind == [raised.value]
