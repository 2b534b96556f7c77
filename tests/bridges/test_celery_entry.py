"""The Celery app `orquestrador_core`, by which any Celery client starts runs."""

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import kombu
import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command

from oraculo import celery_app
from oraculo.bridges.celery.app import NAME, OraculoCelery
from oraculo.errors import NotFound
from oraculo.ports.browse import RunQuery
from oraculo.settings import Settings
from oraculo.worker import App
from tests.bridges.celery_stage import CELERY, ROOT
from tests.end_to_end.stage import Stage, settings_for
from tests.servers.fleet import Fleet
from tests.servers.process import Server
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)
workers = App("de-teste")


@workers.escavador("youtube")
async def collect(payload: dict[str, Any]) -> dict[str, Any]:
    return payload


@workers.escavador("blog")
async def collect_too(payload: dict[str, Any]) -> dict[str, Any]:
    return payload


@workers.executador("relatorio")
async def report(payload: dict[str, Any]) -> dict[str, Any]:
    return payload


class EntryWorker:
    """A process of `celery -A oraculo.celery_app worker`."""

    def __init__(self, settings: Settings, log: Path, celery_url: str = "", *, celery: Sequence[str] = CELERY) -> None:
        self.log = log
        env = os.environ | {
            "ORACULO_BROKER_URL": settings.broker.url,
            "ORACULO_PREFIX": settings.broker.prefix,
            "ORACULO_CELERY_BROKER_URL": celery_url,
            "ORACULO_BROKER_PUBLISH_TIMEOUT": "1",
            "ORACULO_BROKER_CONNECT_TIMEOUT": "1",
        }
        command = [*celery, "-A", "oraculo.celery_app", "worker", "-l", "INFO", "-c", "1"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)

    def expect_running(self) -> None:
        assert self._process.poll() is None, f"it ended:\n{self.log.read_text()[-3000:]}"

    def says(self, text: str) -> bool:
        self.expect_running()
        return text in self.log.read_text(errors="replace")

    def end(self) -> None:
        self._process.kill()
        self._process.wait(30)


@pytest.fixture(scope="module", params=["rabbitmq", pytest.param("redis", marks=pytest.mark.long)])
def settings(request: pytest.FixtureRequest, fleet: Fleet) -> Settings:
    return settings_for(fleet.url(request.param))


@pytest.fixture(scope="module")
def entry(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EntryWorker]:
    started = EntryWorker(settings, tmp_path_factory.mktemp("entry") / "entry.log")
    yield started
    started.end()


def client(url: str) -> Celery:
    """Return a client that knows nothing of ORÁCULO but the broker's address."""
    return Celery("orquestrador_core", broker=url, set_as_current=False)


async def test_each_of_its_tasks_starts_a_run(settings: Settings, entry: EntryWorker) -> None:
    queue = f"{settings.broker.prefix}orquestrador_core"
    celery, ids = client(settings.broker.url), [f"run-{uuid.uuid4()}" for _ in range(3)]
    async with Stage(settings, workers) as oraculo:
        celery.send_task("iniciar_coleta", (ids[0], "youtube", {"canal": "c"}), queue=queue)
        celery.send_task("iniciar_execucao", (ids[1], "relatorio", {"dados": [1]}), queue=queue)
        pipeline = {"pipeline": "coleta-execucao", "payload": {"parametros": {"canal": "d"}}}
        celery.send_task("iniciar_pipeline", kwargs=pipeline, task_id=ids[2], queue=queue)
        collected, executed, piped = [await _ended(oraculo, entry, run_id) for run_id in ids]
    assert collected["resultados"]["escavador_youtube"]["dados"] == {"fonte": "youtube", "parametros": {"canal": "c"}}
    assert executed["resultados"]["executador_relatorio"]["resultado"] == {"dados": [1]}
    assert piped["status"] == "concluida", piped


async def _ended(oraculo: Stage, entry: EntryWorker, run_id: str) -> dict[str, Any]:
    async def found() -> dict[str, Any] | None:
        entry.expect_running()
        try:
            return await oraculo.ended(run_id)
        except NotFound:
            return None

    ended = await until(found, within=40, saying=f"the run {run_id}")
    assert ended is not None
    return ended


async def test_the_same_task_twice_is_one_run(settings: Settings, entry: EntryWorker) -> None:
    queue, run_id = f"{settings.broker.prefix}orquestrador_core", f"run-{uuid.uuid4()}"
    celery, before = client(settings.broker.url), entry.log.read_text().count("succeeded in")
    async with Stage(settings, workers) as oraculo:
        for _ in range(2):
            celery.send_task("iniciar_coleta", (run_id, "youtube", {}), queue=queue)
        await _ended(oraculo, entry, run_id)
        await until(lambda: entry.log.read_text().count("succeeded in") == before + 2, within=20, saying="both tasks")
        assert len((await oraculo.operations.runs(RunQuery())).heads) == 1


async def test_a_request_that_could_only_be_refused_rests_in_the_dead_letters(
    settings: Settings, entry: EntryWorker
) -> None:
    queue = f"{settings.broker.prefix}orquestrador_core"
    bad: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("iniciar_pipeline", ["p"], {"prioridade": 99}),
        ("iniciar_coleta", ["r", 7], {}),
        ("iniciar_execucao", ["r", {"fila": 7}], {}),
        ("iniciar_pipeline", ["p", {}, 7], {}),
        ("iniciar_pipeline", ["p", {"texto": "\ud800"}], {}),
        ("iniciar_coleta", ["r"], {}),
        ("iniciar_execucao", ["r", "relatorio", {}, 7], {}),
    ]
    async with Stage(settings) as oraculo:
        for task, arguments, options in bad:
            client(settings.broker.url).send_task(task, arguments, options, queue=queue)

        async def reasons() -> list[str] | None:
            entry.expect_running()
            letters = await oraculo.broker.dead_letters(oraculo.engine.parts.queues.names.requests, limit=20)
            return [letter.reason for letter in letters] if len(letters) == len(bad) else None

        found = await until(reasons, within=30, saying="the dead letters")
    fields = sorted(reason.partition(":")[0] for reason in found)
    arguments = ["iniciar_coleta", "iniciar_coleta", "iniciar_execucao", "iniciar_execucao"]
    assert fields == sorted([*arguments, "correlation_id", "not valid JSON", "prioridade"])
    assert any("missing 1 required positional argument: 'fonte'" in reason for reason in found)


# Celery with short pauses between the retries of a request.
HURRIED = """
from celery.__main__ import main
from oraculo.bridges.celery import entry

entry._FIRST_PAUSE = 0.1
main()
"""


@pytest.fixture
def ours(fleet: Fleet) -> Server:
    return fleet.breakable("redis")


async def test_after_the_last_retry_the_request_rests_in_a_dead_letter_queue(
    fleet: Fleet, ours: Server, tmp_path: Path
) -> None:
    """Our broker is away, and Celery's works."""
    theirs, settings = fleet.url("rabbitmq"), settings_for(ours.url)
    entry = EntryWorker(settings, tmp_path / "entry.log", celery_url=theirs, celery=[sys.executable, "-c", HURRIED])
    try:
        await until(lambda: entry.says(" ready."), within=30, saying="the worker to be ready")
        ours.kill()
        queue = f"{settings.broker.prefix}orquestrador_core"
        client(theirs).send_task("iniciar_coleta", ("run-7", "youtube", {"canal": "c"}), queue=queue)
        dead = f"{settings.broker.prefix}orquestrador.dlq"
        message = await until(lambda: _taken(theirs, dead), within=60, saying="the dead letter")
        assert message.payload["correlation_id"] == "run-7"
        assert message.payload["payload"]["destinos"] == ["escavador_youtube"]
        assert "after 3 retries" in message.headers["x-oraculo-reason"]
        assert entry.log.read_text().count("Retry in") == 3
    finally:
        entry.end()


def _taken(url: str, queue: str) -> Any:
    with kombu.Connection(url) as connection:
        try:
            found = kombu.Queue(queue, channel=connection.channel()).get(accept=["json"])
        except connection.channel_errors:
            return None
        if found is not None:
            found.ack()
        return found


def test_settings_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("ORACULO_")}
    command = [*CELERY, "-A", "oraculo.celery_app", "worker"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "ORACULO_BROKER_URL: names no broker that Celery knows" in done.stderr
    assert "Traceback" not in done.stderr


class Named(Exception):
    pass


@pytest.fixture
def node_name(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that starts a worker with these options, and returns its name."""

    def name_only(_app: Any, hostname: str, **_options: Any) -> None:
        raise Named(hostname)

    monkeypatch.setattr(OraculoCelery, "Worker", name_only)
    monkeypatch.setenv("ORACULO_BROKER_URL", "amqp://somewhere")

    def start(*options: str) -> str:
        monkeypatch.delitem(vars(celery_app), "app", raising=False)
        command = ["-A", "oraculo.celery_app", "worker", *options]
        with pytest.raises(Named) as named:
            celery_command.main(command, standalone_mode=False, auto_envvar_prefix="CELERY")
        return str(named.value)

    return start


def test_its_workers_have_a_name_of_their_own(node_name: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    here = socket.gethostname()
    assert node_name() == f"orquestrador_core-{os.getpid()}@{here}"
    assert node_name("-n", "outro@%h") == f"outro@{here}"
    monkeypatch.setenv("CELERY_WORKER_HOSTNAME", "do_ambiente@%h")
    assert node_name() == f"do_ambiente@{here}"


def test_another_command_line_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program other than `celery` may ask for the app."""
    monkeypatch.setenv("ORACULO_BROKER_URL", "amqp://somewhere")
    monkeypatch.delitem(vars(celery_app), "app", raising=False)
    with click.Context(click.Command("deles")) as context:
        assert celery_app.app.main == NAME
    assert context.default_map is None
