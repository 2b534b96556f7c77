"""Our handlers in real Celery workers, which read plain JSON commands from quorum queues."""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import kombu
import pytest
import pytest_asyncio
from celery import Celery

from oraculo.bridges.celery.failback import first_of
from oraculo.celery_app import load_apps, make_celery_app
from oraculo.errors import InvalidSettings, NotFound
from oraculo.settings import BrokerSettings, CelerySettings, Settings
from oraculo.wire.naming import QueueNames
from tests.bridges.celery_handlers import app as handlers
from tests.bridges.celery_stage import ANYWHERE, ROOT, are_kept, command_in
from tests.cli.processes import run as run_cli
from tests.cli.test_rehearsal import rabbit_user
from tests.end_to_end.stage import Stage, settings_for
from tests.servers.fleet import Fleet
from tests.servers.rabbitmq import RabbitMQ, suspended
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)
PAGE = ROOT / "docs" / "reference" / "limits-bridges.md"


class Engine:
    """A process of `oraculo worker … --engine celery`."""

    def __init__(
        self,
        settings: Settings,
        log: Path,
        *options: str,
        command: list[str] | None = None,
        cwd: Path = ROOT,
        **environment: str,
    ) -> None:
        self._log = log
        env = os.environ | {
            "ORACULO_BROKER_URL": settings.broker.url,
            "ORACULO_PREFIX": settings.broker.prefix,
            "ORACULO_CELERY_APPS": "tests.bridges.celery_handlers:app" if command else "",
            **environment,
        }
        ours = [str(Path(sys.executable).with_name("oraculo")), "worker", "tests.bridges.celery_handlers:app"]
        command = command or [*ours, "--engine", "celery"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "-l", "INFO", *options],
                cwd=cwd,
                env=env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def is_ready(self) -> None:
        def ready() -> bool:
            assert self._process.poll() is None, f"it ended:\n{self.tail()}"
            return " ready." in self.tail()

        await until(ready, within=30, saying="the celery worker to be ready")

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)

    def stop(self) -> int:
        self._process.terminate()
        return self.ended()

    def ended(self) -> int:
        return self._process.wait(30)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def settings(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Settings]:
    """Return the settings of one worker, which the tests of this file share."""
    found = settings_for(fleet.url("rabbitmq"))
    engine = Engine(found, tmp_path_factory.mktemp("engine") / "worker.log", "-c", "3", "-E")
    try:
        await engine.is_ready()
        yield found
    finally:
        engine.kill()


@pytest.fixture
async def oraculo(settings: Settings) -> AsyncIterator[Stage]:
    async with Stage(settings) as stage:
        yield stage


async def test_async_and_plain_handlers_answer(oraculo: Stage) -> None:
    request = {"destinos": ["escavador_youtube", "executador_relatorio"], "payload": {"texto": "coração"}}
    aggregate = await oraculo.run(request)
    assert aggregate["status"] == "concluida", aggregate
    collected = aggregate["resultados"]["escavador_youtube"]["dados"]
    assert collected["payload"] == {"texto": "coração"}
    assert collected["tarefa"] == "escavador_youtube"
    assert aggregate["resultados"]["executador_relatorio"]["resultado"]["arquivo"] == "relatorio.pdf"


async def test_progress_reaches_the_run(oraculo: Stage) -> None:
    run = await oraculo.submit({"destinos": ["escavador_youtube"], "payload": {}})
    await oraculo.ended(run)
    history = await oraculo.operations.history(run)
    assert [entry for entry in history if "half way" in str(entry)], history


async def test_a_failure_is_retried_and_a_final_one_is_not(oraculo: Stage) -> None:
    request = {
        "destinos": [
            {"id": "tinta", "fila": "executador_falha", "payload": {}},
            {"id": "papel", "fila": "executador_falha", "payload": {"final": True}},
        ]
    }
    failures = (await oraculo.run(request))["falhas"]
    assert failures["tinta"]["motivo"] == "ValueError: no ink"
    assert failures["tinta"]["tentativas"] == 3
    assert failures["papel"]["motivo"] == "DoNotRetry: no paper"
    assert failures["papel"]["tentativas"] == 1


async def test_many_processes_share_the_work(oraculo: Stage) -> None:
    destinations = [{"id": f"t{n}", "fila": "executador_relatorio"} for n in range(60)]
    results = (await oraculo.run({"destinos": destinations, "payload": {}}))["resultados"]
    assert len(results) == 60
    assert len({answer["resultado"]["pid"] for answer in results.values()}) > 1


async def test_a_handlers_own_limit_holds(oraculo: Stage) -> None:
    destinations = [{"id": f"t{n}", "fila": "executador_um"} for n in range(4)]
    results = (await oraculo.run({"destinos": destinations, "payload": {}}))["resultados"]
    spans = sorted((one["resultado"]["began"], one["resultado"]["ended"]) for one in results.values())
    assert len(spans) == 4
    assert all(before[1] <= after[0] for before, after in pairwise(spans)), spans


async def test_what_is_no_command_rests_in_the_dead_letters_with_the_reason(oraculo: Stage) -> None:
    await oraculo.publish("executador_relatorio", b"not json")
    queue = oraculo.engine.parts.queues.names.physical("executador_relatorio")

    async def letters() -> Any:
        return await oraculo.broker.dead_letters(queue, limit=10)

    [letter] = await until(letters, saying="the dead letter")
    assert letter.body == b"not json"
    assert "not valid JSON" in letter.reason
    await oraculo.broker.discard(queue, [letter.id])


async def test_a_handler_that_outlives_its_deadline_is_ended(oraculo: Stage, tmp_path: Path) -> None:
    """The process is free again for the next command, whether the handler is async or plain."""
    payload = {"path": str(tmp_path / "never"), "mark": str(tmp_path / "mark")}
    destinations = [{"fila": "executador_espera"}, {"fila": "executador_espera_async"}]
    for _ in range(3):
        aggregate = await oraculo.run({"destinos": destinations, "payload": payload, "timeout": 1})
        assert aggregate["status"] == "timeout"
    assert (await oraculo.run({"destinos": ["executador_relatorio"], "payload": {}}))["status"] == "concluida"


async def test_the_workers_own_limit_holds_where_the_deadline_is_later(fleet: Fleet, tmp_path: Path) -> None:
    settings = settings_for(fleet.url("rabbitmq"))
    engine = Engine(settings, tmp_path / "worker.log", "-c", "1", "--time-limit", "1")
    try:
        await engine.is_ready()
        async with Stage(settings) as stage:
            payload = {"path": str(tmp_path / "never"), "mark": str(tmp_path / "mark")}
            aggregate = await stage.run({"destinos": ["executador_espera"], "payload": payload, "timeout": 20})
    finally:
        engine.kill()
    assert aggregate["status"] == "erro", aggregate
    assert "TimeLimitExceeded" in aggregate["falhas"]["executador_espera"]["motivo"]


async def test_a_revoked_task_fails_with_the_reason(oraculo: Stage, settings: Settings, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    payload = {"path": str(tmp_path / "never"), "mark": str(mark)}
    run = await oraculo.submit({"destinos": ["executador_espera"], "payload": payload, "timeout": 30})
    await until(mark.exists, saying="the handler to begin")
    control = Celery(broker=settings.broker.url, set_as_current=False).control

    def its_id() -> str | None:
        active = control.inspect(timeout=1).active() or {}
        found = [task["id"] for tasks in active.values() for task in tasks if run in str(task["args"])]
        return found[0] if found else None

    task_id = await until(its_id, within=20, saying="the task among what Celery works on")
    control.revoke(task_id, terminate=True)
    aggregate = await oraculo.ended(run)
    assert "TaskRevokedError" in aggregate["falhas"]["executador_espera"]["motivo"]


async def test_a_pool_process_that_is_killed_gives_its_command_back(oraculo: Stage, tmp_path: Path) -> None:
    mark, path = tmp_path / "mark", tmp_path / "path"
    payload = {"path": str(path), "mark": str(mark)}
    run = await oraculo.submit({"destinos": ["executador_espera"], "payload": payload, "timeout": 60})
    await until(lambda: mark.exists() and mark.read_text(), saying="the handler to begin")  # made, then written
    os.kill(int(mark.read_text()), signal.SIGKILL)
    await until(lambda: len(mark.read_text().split()) == 2, within=30, saying="the command to come again")
    path.touch()
    assert (await oraculo.ended(run))["status"] == "concluida"


async def test_a_worker_that_is_killed_gives_its_commands_back(fleet: Fleet, tmp_path: Path) -> None:
    """The workers are `celery -A oraculo.celery_app worker`, with Celery's autoscale."""
    settings = settings_for(fleet.url("rabbitmq"))
    mark, path = tmp_path / "mark", tmp_path / "path"
    command = [sys.executable, "-m", "celery", "-A", "oraculo.celery_app", "worker"]
    first = Engine(
        settings, tmp_path / "first.log", "--autoscale", "4,1", "-n", f"a{mark.parent.name}@%h", command=command
    )
    second: Engine | None = None
    try:
        await first.is_ready()
        async with Stage(settings) as oraculo:
            payload = {"path": str(path), "mark": str(mark)}
            destinations = [{"id": f"t{n}", "fila": "executador_espera"} for n in range(3)]
            run = await oraculo.submit({"destinos": destinations, "payload": payload, "timeout": 60})
            await until(lambda: mark.exists() and len(mark.read_text().split()) == 3, within=30, saying="three at once")
            first.kill()
            second = Engine(
                settings,
                tmp_path / "second.log",
                "--autoscale",
                "4,1",
                "-n",
                f"b{mark.parent.name}@%h",
                command=command,
            )
            await second.is_ready()
            path.touch()
            assert (await oraculo.ended(run))["status"] == "concluida"
    finally:
        first.kill()
        if second is not None:
            second.kill()


async def test_a_stop_lets_what_is_in_work_end(fleet: Fleet, tmp_path: Path) -> None:
    settings = settings_for(fleet.url("rabbitmq"))
    mark, path = tmp_path / "mark", tmp_path / "path"
    engine = Engine(settings, tmp_path / "worker.log", "-c", "1")
    try:
        await engine.is_ready()
        async with Stage(settings) as oraculo:
            payload = {"path": str(path), "mark": str(mark)}
            run = await oraculo.submit({"destinos": ["executador_espera"], "payload": payload, "timeout": 60})
            await until(mark.exists, saying="the handler to begin")
            engine._process.terminate()
            await until(lambda: "Warm shutdown" in engine.tail(), saying="the worker to begin its stop")
            path.touch()
            assert (await oraculo.ended(run))["status"] == "concluida"
            assert engine.ended() == 0
            [state] = await oraculo.broker.queues([oraculo.engine.parts.queues.names.physical("executador_espera")])
            assert (state.ready, state.unacked) == (0, 0), "it was given back although it was answered"
    finally:
        engine.kill()


async def test_a_queue_that_says_nothing_keeps_no_other_from_being_read(fleet: Fleet, tmp_path: Path) -> None:
    server = cast("RabbitMQ", fleet.server("rabbitmq"))
    settings = settings_for(server.url)
    names = QueueNames(settings.broker.prefix)
    async with Stage(settings) as oraculo:
        await oraculo.broker.declare([names.physical(queue) for queue in handlers.handlers])
        with contextlib.ExitStack() as at_the_end:
            async with suspended(server, names.physical("escavador_youtube")):
                engine = Engine(settings, tmp_path / "worker.log", "-c", "1")
                at_the_end.callback(engine.kill)
                await engine.is_ready()
                other = await oraculo.run({"destinos": ["executador_relatorio"], "payload": {}})
                assert other["status"] == "concluida"
            later = await oraculo.run({"destinos": ["escavador_youtube"], "payload": {}})
            assert later["status"] == "concluida", "it is read once it speaks"


async def test_a_queue_that_may_not_be_read_ends_the_worker_and_is_named(fleet: Fleet, tmp_path: Path) -> None:
    """The worker does not wait for RabbitMQ's word on a queue, and yet notices a refusal."""
    prefix = f"t{uuid.uuid4().hex[:10]}."
    settings = settings_for(rabbit_user(fleet, ".*", ".*", f"^(?!{prefix}executador_relatorio$).*"), prefix=prefix)
    engine = Engine(settings, tmp_path / "worker.log", "-c", "1")
    try:
        assert engine.ended() == 1
    finally:
        engine.kill()
    assert "ACCESS_REFUSED" in engine.tail()
    assert f"'{prefix}executador_relatorio'" in engine.tail()


@pytest.mark.parametrize("line", ["raise SystemExit", "import sys; sys.exit('SystemExit')"])
def test_an_app_that_ends_the_process_when_it_is_imported_is_named(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "desiste_no_celery.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidSettings, match=r"ORACULO_CELERY_APPS: desiste_no_celery:app: .*SystemExit"):
        load_apps(Settings(celery=CelerySettings(apps=("desiste_no_celery:app",))))


@pytest.mark.long
async def test_the_command_of_the_page_runs_where_the_module_is(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "meus_workers.py").write_text("from tests.bridges.celery_handlers import app")
    settings = settings_for(fleet.url("rabbitmq"))
    engine = Engine(
        settings,
        tmp_path / "worker.log",
        command=["sh", "-c", command_in(PAGE, "ORACULO_CELERY_APPS=")],
        cwd=tmp_path,
        **ANYWHERE,
        CELERY_WORKER_LOGLEVEL="INFO",
    )
    try:
        await engine.is_ready()
        async with Stage(settings) as oraculo:
            assert (await oraculo.run({"destinos": ["executador_relatorio"], "payload": {}}))["status"] == "concluida"
    finally:
        engine.kill()


@pytest.mark.long
async def test_a_worker_that_fails_ends_with_celerys_exit_status(fleet: Fleet, tmp_path: Path) -> None:
    """A supervisor then starts it again."""
    settings, name = settings_for(fleet.url("rabbitmq")), f"{tmp_path.name}@aqui"
    with kombu.Connection(settings.broker.url) as connection:
        kombu.Queue(f"{name}.celery.pidbox", exclusive=True, channel=connection.channel()).declare()
        engine = Engine(settings, tmp_path / "worker.log", "-c", "1", "-n", name)
        try:
            assert engine.ended() == 1
        finally:
            engine.kill()
    assert "Unrecoverable error" in engine.tail()
    assert "RESOURCE_LOCKED" in engine.tail()


async def test_the_rights_of_the_page_suffice(fleet: Fleet, tmp_path: Path) -> None:
    """They cover commands, runs that Celery's clients start, remote control and events."""
    prefix = f"t{uuid.uuid4().hex[:10]}."
    rights = shlex.split(command_in(PAGE, "rabbitmqctl set_permissions -p vhost oraculo"))[-3:]
    url = rabbit_user(fleet, *(right.replace(r"^loja\.", f"^{re.escape(prefix)}") for right in rights))
    settings, name, run = settings_for(url, prefix=prefix), f"{prefix}worker@aqui", f"run-{prefix}"
    engine = Engine(settings, tmp_path / "worker.log", "-c", "1", "-E", "-n", name)
    client = Celery(broker=url, set_as_current=False)
    try:
        await engine.is_ready()
        async with Stage(settings) as oraculo:
            assert (await oraculo.run({"destinos": ["executador_relatorio"], "payload": {}}))["status"] == "concluida"
            client.send_task("iniciar_execucao", (run, "relatorio", {}), queue=f"{prefix}orquestrador_core")

            async def is_over() -> bool:
                with contextlib.suppress(NotFound):
                    return (await oraculo.ended(run))["status"] == "concluida"
                return False

            await until(is_over, within=30, saying="the run that a client of Celery's started")
        assert client.control.inspect([name], timeout=5).ping()
        assert "ACCESS_REFUSED" not in engine.tail()
        assert engine.stop() == 0
    finally:
        engine.kill()


NOWHERE = "amqp://127.0.0.1:1//"
VARIABLES = ("CELERY_BROKER_URL", "CELERY_BROKER_READ_URL", "CELERY_BROKER_WRITE_URL")


@pytest.mark.parametrize("name", VARIABLES)
def test_no_variable_of_celerys_is_put_before_our_address(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, NOWHERE)
    app = make_celery_app(Settings(broker=BrokerSettings(url="amqp://a.example")), [handlers])
    made = [app.connection(), app.connection_for_read(), app.connection_for_write(), app.pool.connection]
    assert [each.hostname for each in made] == ["a.example"] * 4
    assert app.connection_for_write("amqp://b.example").hostname == "b.example"


@pytest.mark.long
async def test_a_worker_beside_another_app_of_celerys_reads_our_broker(fleet: Fleet, tmp_path: Path) -> None:
    settings = settings_for(fleet.url("rabbitmq"))
    engine = Engine(settings, tmp_path / "worker.log", "-c", "1", APP="theirs", **dict.fromkeys(VARIABLES, NOWHERE))
    try:
        await engine.is_ready()
        async with Stage(settings) as oraculo:
            aggregate = await oraculo.run({"destinos": ["executador_relatorio"], "payload": {}})
            assert aggregate["status"] == "concluida"
    finally:
        engine.kill()


@pytest.mark.parametrize(
    ("ours", "celerys"),
    [
        ("amqp://a,redis://b", "amqp://a:5672/%2F"),
        # kombu takes what a URL leaves out from the URL before it.
        (
            "amqp://u:p%40@a:5673/prod,redis://b,amqps://c/",
            "amqp://u:p%40@a:5673/prod;amqps://c:5671/%2F?ssl_check_hostname=true",
        ),
        ("amqps://[::1]/x?ssl_ca_certs=/ca.pem", "amqps://[::1]:5671/x?ssl_ca_certs=/ca.pem"),
        ("amqp://u:p@a:5673,b/prod", "amqp://u:p@a:5673/prod;amqp://u:p@b:5672/prod"),
    ],
)
def test_all_rabbitmqs_of_the_list_are_celerys_and_no_other_broker(ours: str, celerys: str) -> None:
    app = make_celery_app(Settings(broker=BrokerSettings(url=ours)), [handlers])
    assert app.conf.broker_url == celerys


def test_the_first_broker_of_a_list_is_looked_for_only_from_another() -> None:
    connection = kombu.Connection("amqp://a.example//;amqp://b.example//")
    assert first_of(connection) is None
    connection.maybe_switch_next()
    first = first_of(connection)
    assert first is not None
    assert first.hostname == "a.example"
    assert first_of(kombu.Connection("amqp://a.example//")) is None
    redis = kombu.Connection("redis://a.example;redis://b.example")
    redis.maybe_switch_next()
    assert first_of(redis) is None, "its connection cannot be cut from outside"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_connection_to_the_first_broker_is_known_by_any_name(host: str, fleet: Fleet) -> None:
    """An open connection has another host name than its URL. It must not be cut every few seconds."""
    with kombu.Connection(f"{fleet.url('rabbitmq').replace('127.0.0.1', host)};amqp://b.example//") as connection:
        connection.connect()
        assert first_of(connection) is None


@pytest.mark.long
async def test_a_worker_goes_to_the_next_broker_and_back_to_the_first(fleet: Fleet, tmp_path: Path) -> None:
    first, second = fleet.breakable("rabbitmq"), fleet.url("rabbitmq")
    settings = settings_for(f"{first.url},{second}")
    queue = QueueNames(settings.broker.prefix).physical("executador_relatorio")
    engine = Engine(settings, tmp_path / "worker.log", "-c", "1")
    try:
        await engine.is_ready()
        await are_kept(first, queue)
        await asyncio.to_thread(first.kill)
        await until(lambda: _is_sent(second, queue), within=40, saying="the worker to make the queue there")
        await until(lambda: " received" in engine.tail(), within=40, saying="the command on the second broker")
        await asyncio.to_thread(first.start)
        before = engine.tail().count(" received")
        await until(lambda: _is_sent(first.url, queue), within=40, saying="the first broker to take a command")
        await until(lambda: engine.tail().count(" received") > before, within=40, saying="the command on the first")
    finally:
        engine.kill()


def _is_sent(url: str, queue: str) -> bool:
    """Send a plain command to that broker alone. False: the queue does not exist yet."""
    command = {
        "correlation_id": "r",
        "tipo_evento": "iniciar_execucao",
        "payload": {},
        "timestamp": "2026-01-01T00:00:00Z",
    }
    with contextlib.suppress(Exception), kombu.Connection(url, transport_options={"confirm_publish": True}) as to:
        to.Producer().publish(command, exchange="", routing_key=queue, mandatory=True, confirm_timeout=5)
        return True
    return False


@pytest.mark.parametrize("url", ["redis://localhost", "nats://localhost", "redis://localhost,amqp://localhost"])
def test_other_brokers_are_refused_in_words(url: str) -> None:
    settings = Settings(broker=BrokerSettings(url=url), celery=CelerySettings())
    with pytest.raises(InvalidSettings, match="must name a RabbitMQ"):
        make_celery_app(settings, [handlers])


WORKERS = """
from oraculo.worker import App

app = App("meus")


@app.executador("relatorio")
def report(payload):
    return {}
"""


def test_the_command_line_says_what_to_mend(tmp_path: Path) -> None:
    (tmp_path / "meus.py").write_text(WORKERS)
    env = {"ORACULO_BROKER_URL": "redis://localhost"}
    done = run_cli("worker", "meus:app", "--engine", "celery", cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert "ORACULO_BROKER_URL: must name a RabbitMQ" in done.stderr
    done = run_cli("worker", "meus:app", "--autoscale", "3,1", cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert "--autoscale: is no option of `oraculo worker`" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nao-ha"], "--nao-ha"),
        (["--time-limit", "muito"], "'muito' is not a valid float"),
        (["nem_opcao"], "Unable to parse extra configuration"),
    ],
)
def test_what_celery_does_not_understand_is_one_line(options: list[str], words: str, tmp_path: Path) -> None:
    line = _refusal(options, tmp_path)
    assert line.startswith("oraculo: --engine celery: ")
    assert words in line
    assert line.endswith("(see `celery worker --help`)")


@pytest.mark.parametrize("options", [["-D"], ["--concurrency", "2", "--detach"]])
def test_a_worker_that_celery_could_not_detach_is_refused_and_not_silently_gone(
    options: list[str], tmp_path: Path
) -> None:
    line = _refusal(options, tmp_path)
    assert line.startswith("oraculo: --engine celery: does not detach")


def _refusal(options: list[str], folder: Path) -> str:
    """Return the one line with which `oraculo worker --engine celery` ends."""
    (folder / "meus.py").write_text(WORKERS)
    env = {"ORACULO_BROKER_URL": "amqp://somewhere"}
    done = run_cli("worker", "meus:app", "--engine", "celery", *options, cwd=folder, env=env)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    return line


def test_without_handlers_any_broker_of_celery_will_do() -> None:
    app = make_celery_app(Settings(broker=BrokerSettings(url="nats://localhost,redis://localhost/3")), [])
    assert app.conf.broker_url == "redis://localhost/3"
