"""The workers of examples/plain_workers, as processes of their own on real brokers: each passes every case of
`oraculo check-worker`, and the engine gathers their answers."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
import redis
from nats.js.errors import NoStreamResponseError
from pika.exceptions import ChannelClosedByBroker

from oraculo.testing.worker_cases import CASE_NAMES
from tests.brokers.nats_stage import BareNats, api, plain_client
from tests.cli.processes import run
from tests.end_to_end.stage import Stage, settings_for
from tests.servers.fleet import BROKERS, Fleet
from tests.servers.nats import Nats
from tests.servers.node import expect_node, install_packages, node
from tests.servers.process import free_port
from tests.servers.proxy import Proxy
from tests.servers.valkey import Valkey
from tests.waiting import until

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PLAIN = EXAMPLES / "plain_workers"
BROKER_OF = {
    "pika_worker.py": "rabbitmq",
    "node_amqplib": "rabbitmq",
    "redis_worker.py": "redis",
    "node_ioredis": "redis",
    "nats_worker.py": "nats",
}
# The same troubles again, for the workers in another language.
PYTHON_FIRST = [name if name.endswith(".py") else pytest.param(name, marks=pytest.mark.long) for name in BROKER_OF]
REDIS_WORKERS = ["redis_worker.py", pytest.param("node_ioredis", marks=pytest.mark.long)]
OURS = [name for name in os.listdir(PLAIN) if not name.startswith(("_", "."))]


class PlainWorker:
    """`command URL QUEUE` as a process, which writes into a file."""

    def __init__(self, command: list[str], url: str, queue: str, log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen([*command, url, queue], stdout=output, stderr=output)

    def expect_alive(self) -> None:
        assert self._process.poll() is None, f"it ended:\n{self.tail()}"

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)


Start = Callable[..., PlainWorker]  # name, URL, queue, and options for what runs it


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, fleet: Fleet) -> Callable[[str], Path]:
    """A copy of a Node worker's folder with what it needs; the examples stay as they are."""
    folders: dict[str, Path] = {}

    def install(name: str) -> Path:
        expect_node(fleet)
        if name not in folders:
            folder = tmp_path_factory.mktemp(name)
            for file in ("package.json", "worker.mjs"):
                shutil.copy(PLAIN / name / file, folder)
            install_packages(folder)
            folders[name] = folder
        return folders[name]

    return install


@pytest.fixture
def start(tmp_path: Path, installed: Callable[[str], Path]) -> Iterator[Start]:
    """Starts a worker by its name in the folder; all end with the test."""
    workers: list[PlainWorker] = []

    def started(name: str, url: str, queue: str, *options: str) -> PlainWorker:
        script = PLAIN / name
        run_by, file = (sys.executable, script) if script.is_file() else (node(), installed(name) / "worker.mjs")
        workers.append(PlainWorker([run_by, *options, str(file)], url, queue, tmp_path / f"{name}.log"))
        return workers[-1]

    yield started
    for worker in workers:
        worker.kill()


def test_every_plain_worker_is_tested_and_told_of() -> None:
    assert sorted(OURS) == sorted(BROKER_OF)
    told = (EXAMPLES / "README.md").read_text()
    assert [name for name in OURS if f"plain_workers/{name}" not in told] == []


@pytest.mark.parametrize("name", BROKER_OF)
def test_a_plain_worker_passes_every_case(name: str, fleet: Fleet, start: Start, tmp_path: Path) -> None:
    queue = "escavador_plano" if name.endswith(".py") else "executador_plano"
    url, prefix = fleet.url(BROKER_OF[name]), f"t{uuid.uuid4().hex[:10]}."
    worker = start(name, url, prefix + queue)
    env = {"ORACULO_BROKER_URL": url, "ORACULO_PREFIX": prefix}
    done = run("check-worker", "--queue", queue, "--json", cwd=tmp_path, env=env)
    worker.expect_alive()
    assert done.returncode == 0, (done.stdout, done.stderr, worker.tail())
    cases: list[dict[str, Any]] = json.loads(done.stdout)["casos"]
    assert [case["nome"] for case in cases] == list(CASE_NAMES)
    assert [case for case in cases if case["estado"] != "ok"] == []


@pytest.mark.parametrize("broker", BROKERS)
async def test_the_engine_gathers_what_plain_workers_answer(broker: str, fleet: Fleet, start: Start) -> None:
    url = fleet.url(broker)
    settings = settings_for(url)
    names = [name for name in BROKER_OF if BROKER_OF[name] == broker]
    queues = {f"{kind}_{number}": name for number, name in enumerate(names) for kind in ("escavador", "executador")}
    workers = [start(name, url, settings.broker.prefix + queue) for queue, name in queues.items()]
    async with Stage(settings) as oraculo:
        for queue in queues:  # deeper than Python's own reader can follow: nobody dies of it
            await oraculo.publish(queue, b"[" * 100_000)
        request = {"destinos": list(queues), "payload": {"texto": "coração"}, "timeout": 30}
        aggregate = await oraculo.run(request, wait=40)
    assert aggregate["status"] == "concluida", (aggregate, [worker.tail() for worker in workers])
    expected = {"status": "ok", "resultado": {"recebido": {"texto": "coração"}}}
    assert aggregate["resultados"] == dict.fromkeys(queues, expected)
    for worker in workers:
        worker.expect_alive()


async def test_the_declaration_that_the_page_shows_is_taken_once_oraculo_has_made_the_queue(fleet: Fleet) -> None:
    settings = settings_for(fleet.url("rabbitmq"))
    queue = f"{settings.broker.prefix}executador_relatorio"
    page = (ROOT / "docs/how-to/rabbitmq.md").read_text("utf-8")
    shown = re.search(r"```python\n(channel\.queue_declare.*?)```", page, re.DOTALL)
    assert shown
    taken: list[bytes] = []
    async with Stage(settings) as oraculo:
        await oraculo.submit({"destinos": ["executador_relatorio"], "payload": {}, "timeout": 30})
        with pika.BlockingConnection(pika.URLParameters(settings.broker.url)) as connection:

            def is_made() -> bool:
                with contextlib.suppress(ChannelClosedByBroker), connection.channel() as looking:
                    looking.queue_declare(queue, passive=True)
                    return True
                return False

            await until(is_made, saying="the queue to be made")
            with pytest.raises(ChannelClosedByBroker, match="406"), connection.channel() as seed:
                seed.queue_declare(queue=queue)
            given = {"channel": connection.channel(), "on_message": lambda *message: taken.append(message[3])}
            exec(shown[1].replace("executador_relatorio", queue), given)

            def is_taken() -> bool:
                connection.process_data_events(time_limit=0)
                return bool(taken)

            await until(is_taken, saying="the command")
    assert json.loads(taken[0])["tipo_evento"] == "iniciar_execucao"


# What their clients do after seconds or minutes, at once.
HURRIED_NODE = "const later = setTimeout; globalThis.setTimeout = (what, ms, ...more) => later(what, ms / 50, ...more);"
HURRIED_NATS = """
import asyncio, functools, sys
sys.path.insert(0, {folder!r})
import nats, nats_worker

nats.connect = functools.partial(nats.connect, reconnect_time_wait=0.01)
asyncio.run(nats_worker.main(*sys.argv[1:]))
"""
TRIES = {"nats_worker.py": 70, "node_ioredis": 30}  # more than their clients make if they are not told otherwise


@pytest.fixture
def start_hurried(start: Start, tmp_path: Path) -> Start:
    node_script, nats_script = tmp_path / "hurried.cjs", tmp_path / "hurried.py"
    node_script.write_text(HURRIED_NODE)
    nats_script.write_text(HURRIED_NATS.format(folder=str(PLAIN)))

    def started(name: str, url: str, queue: str) -> PlainWorker:
        if name == "nats_worker.py":
            return start(str(nats_script), url, queue)
        return start(name, url, queue, *(["--require", str(node_script)] if name == "node_ioredis" else []))

    return started


@pytest.mark.parametrize("name", PYTHON_FIRST)
async def test_a_plain_worker_waits_for_its_server_at_its_start_and_later(
    name: str, fleet: Fleet, start_hurried: Start
) -> None:
    settings = settings_for(fleet.url(BROKER_OF[name]))
    queue, tries = "executador_plano", TRIES.get(name, 2)
    with Proxy(settings.broker.url) as proxy:
        proxy.refuses = True
        worker = start_hurried(name, proxy.url, settings.broker.prefix + queue)
        async with Stage(settings) as oraculo:
            for _ in ("at its start", "later"):
                until_then = proxy.refused + tries
                await until(lambda most=until_then: proxy.refused >= most, saying="the worker to try again and again")
                worker.expect_alive()
                proxy.refuses = False
                aggregate = await oraculo.run({"destinos": [queue], "payload": {}, "timeout": 30}, wait=40)
                assert aggregate["status"] == "concluida", (aggregate, worker.tail())
                proxy.refuses = True
                proxy.cut()


SLOW = """
import sys, time
sys.path.insert(0, {folder!r})
import pika_worker

def handle(command):
    print("at work", flush=True)
    time.sleep(4)  # of heartbeats that are a second apart the server misses two, and no more
    return {{"status": "ok"}}

pika_worker.handle = handle
pika_worker.main(*sys.argv[1:])
"""


async def test_the_one_of_pika_keeps_its_connection_while_it_works(fleet: Fleet, start: Start, tmp_path: Path) -> None:
    script, settings = tmp_path / "worker.py", settings_for(fleet.url("rabbitmq"))
    script.write_text(SLOW.format(folder=str(PLAIN)))
    worker = start(str(script), f"{settings.broker.url}?heartbeat=1", f"{settings.broker.prefix}executador_lento")
    async with Stage(settings) as oraculo:
        aggregate = await oraculo.run({"destinos": ["executador_lento"], "payload": {}, "timeout": 15}, wait=20)
    assert aggregate["status"] == "concluida", (aggregate, worker.tail())
    assert worker.tail().count("at work") == 1


@pytest.mark.parametrize("name", REDIS_WORKERS)
@pytest.mark.parametrize(
    ("trouble", "told", "mend"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), "'maxmemory'", ("CONFIG", "SET", "maxmemory", "0")),
        (("REPLICAOF", "127.0.0.1", str(free_port())), "read only replica", ("REPLICAOF", "NO", "ONE")),
    ],
    ids=["full", "replica"],
)
async def test_those_of_redis_wait_for_a_server_that_takes_nothing(
    name: str, trouble: tuple[str, ...], told: str, mend: tuple[str, ...], start: Start
) -> None:
    queue, command = "executador_plano", {"correlation_id": "c", "tipo_evento": "iniciar_execucao", "payload": 1}
    with Valkey() as server, redis.Redis.from_url(server.url) as client:
        worker = start(name, server.url, queue)
        await until(lambda: "waiting for work" in worker.tail(), saying="the worker to be there")
        with client.pipeline(transaction=True) as step:  # it has the command, and cannot answer
            step.xadd(queue, {"body": json.dumps(command)}).execute_command(*trouble).execute()
        await until(lambda: worker.tail().count(told) > 1, saying="the worker to wait")
        client.execute_command(*mend)
        await until(lambda: client.xlen("resultados") == 1, saying="its answer")
        await until(lambda: client.xlen(queue) == 0, saying="the command to have left")
        worker.expect_alive()


@pytest.mark.parametrize("name", REDIS_WORKERS)
async def test_those_of_redis_find_what_was_on_its_way_when_the_connection_was_lost(name: str, start: Start) -> None:
    queue, command = "executador_plano", {"correlation_id": "c", "tipo_evento": "iniciar_execucao", "payload": 1}
    with Valkey() as server, redis.Redis.from_url(server.url) as client:
        worker = start(name, server.url, queue)
        await until(lambda: "waiting for work" in worker.tail(), saying="the worker to be there")
        with client.pipeline(transaction=True) as step:
            step.xadd(queue, {"body": json.dumps(command)})
            step.xreadgroup(queue, f"plain-{socket.gethostname()}", {queue: ">"})  # what it took, and never heard of
            step.client_kill_filter(_type="normal", skipme=True).execute()
        await until(lambda: client.xlen("resultados"), saying="its answer")
        worker.expect_alive()


async def test_the_one_of_redis_goes_on_when_its_server_was_killed_and_is_back(start: Start) -> None:
    with Valkey() as server:
        worker = start("redis_worker.py", server.url, "executador_plano")
        await until(lambda: "waiting for work" in worker.tail(), saying="the worker to be there")
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            client.xadd(
                "executador_plano", {"body": json.dumps({"correlation_id": "c", "tipo_evento": "x", "payload": 1})}
            )
            await until(lambda: client.xlen("resultados"), saying="its answer")


@pytest.mark.parametrize("name", REDIS_WORKERS)
async def test_those_of_redis_go_on_when_all_was_flushed(name: str, start: Start) -> None:
    with Valkey() as server, redis.Redis.from_url(server.url) as client:
        worker = start(name, server.url, "executador_plano")
        await until(lambda: "waiting for work" in worker.tail(), saying="the worker to be there")
        client.flushall()
        body = json.dumps({"correlation_id": "c", "tipo_evento": "iniciar_execucao", "payload": 1})
        client.xadd("executador_plano", {"body": body})
        await until(lambda: client.xlen("resultados"), saying="its answer")
        worker.expect_alive()


async def test_the_one_of_nats_waits_for_a_jetstream_that_is_not_there_yet(start: Start) -> None:
    with BareNats(jetstream=False) as server:
        worker = start("nats_worker.py", server.url, "executador_plano")
        await until(lambda: "trying again soon" in worker.tail(), saying="the worker to wait")
        server.restart_with(jetstream=True)
        await until(lambda: "waiting for work" in worker.tail(), saying="the worker to be there")


async def test_the_one_of_nats_goes_on_when_its_server_is_back_without_its_data(start: Start) -> None:
    command = {"correlation_id": "c", "tipo_evento": "iniciar_execucao", "payload": 1}
    with Nats() as server:
        worker = start("nats_worker.py", server.url, "executador_plano")
        await until(lambda: "waiting for work" in worker.tail(), saying="the worker to be there")
        server.kill()
        shutil.rmtree(server.folder / "jetstream")
        server.start()
        async with plain_client(server.url) as client:

            async def is_taken() -> bool:
                try:
                    await client.jetstream().publish("executador_plano", json.dumps(command).encode())
                except NoStreamResponseError:
                    worker.expect_alive()
                    return False
                return True

            async def is_answered() -> bool:
                found = await api(client, "STREAM.INFO.resultados")
                return "error" not in found and found["state"]["messages"] == 1

            await until(is_taken, within=30.0, saying="its queue")
            await until(is_answered, within=30.0, saying="its answer")


async def make_impatient(client: Any, queue: str) -> None:
    """A queue, and that of the answers, whose server waits for an ack for a second."""
    terms = {"durable_name": queue, "name": queue, "ack_policy": "explicit", "ack_wait": 10**9}
    for stream in (queue, "resultados"):
        config = {"name": stream, "subjects": [stream], "retention": "workqueue"}
        assert "error" not in await api(client, f"STREAM.CREATE.{stream}", config)
    made = await api(client, f"CONSUMER.CREATE.{queue}.{queue}", {"stream_name": queue, "config": terms})
    assert "error" not in made


AT_A_GATE = """
import asyncio, os, sys
sys.path.insert(0, {folder!r})
import nats_worker

def handle(command, handle=nats_worker.handle):
    if os.path.exists({gate!r}):  # the first time
        print("at the gate", flush=True)
        open({gate!r}).read()
        os.remove({gate!r})
    return handle(command)

nats_worker.handle = handle
asyncio.run(nats_worker.main(*sys.argv[1:]))
"""


async def test_the_one_of_nats_goes_on_when_its_server_was_killed_while_it_worked(start: Start, tmp_path: Path) -> None:
    gate, script, queue = tmp_path / "gate", tmp_path / "worker.py", "executador_plano"
    os.mkfifo(gate)
    script.write_text(AT_A_GATE.format(folder=str(PLAIN), gate=str(gate)))
    command = {"correlation_id": "c", "tipo_evento": "iniciar_execucao", "payload": 1}
    with Nats() as server:
        async with plain_client(server.url) as client:
            await make_impatient(client, queue)
            await client.jetstream().publish(queue, json.dumps(command).encode())
        worker = start(str(script), server.url, queue)
        await until(lambda: "at the gate" in worker.tail(), saying="the worker to have the command")
        with gate.open("w"):
            server.kill()
            server.start()
        async with plain_client(server.url) as client:

            async def is_settled() -> bool:
                worker.expect_alive()
                queued = (await api(client, f"STREAM.INFO.{queue}"))["state"]["messages"]
                answers = (await api(client, "STREAM.INFO.resultados"))["state"]["messages"]
                return bool(answers) and not queued

            await until(is_settled, within=30.0, saying="its answer")


UNREADABLE = """
import asyncio, sys
sys.path.insert(0, {folder!r})
import {module} as worker

worker.handle = lambda command: {{"status": "ok", "resultado": object()}}
started = worker.main(*sys.argv[1:3])
if started is not None:
    asyncio.run(started)
"""


ONCE = {"name": "p", "steps": [{"type": "executador_x", "retry": {"maxAttempts": 1}}]}


@pytest.mark.parametrize("name", [name for name in BROKER_OF if name.endswith(".py")])
async def test_a_result_that_is_no_json_is_a_failure_of_the_work(
    name: str, fleet: Fleet, start: Start, tmp_path: Path
) -> None:
    script, settings = tmp_path / "worker.py", settings_for(fleet.url(BROKER_OF[name]))
    script.write_text(UNREADABLE.format(folder=str(PLAIN), module=name.removesuffix(".py")))
    worker = start(str(script), settings.broker.url, f"{settings.broker.prefix}executador_x")
    async with Stage(settings) as oraculo:
        await oraculo.operations.put_pipeline("p", json.dumps(ONCE).encode())
        aggregate = await oraculo.run({"pipeline": "p", "payload": {}, "timeout": 30}, wait=40)
    assert aggregate["status"] == "erro", (aggregate, worker.tail())
    assert "not JSON serializable" in aggregate["falhas"]["executador_x"]["motivo"]


@pytest.mark.parametrize("name", REDIS_WORKERS)
async def test_those_of_redis_bury_a_command_whose_answer_has_nowhere_to_go(name: str, start: Start) -> None:
    queue, command = "executador_plano", {"correlation_id": "c", "tipo_evento": "iniciar_execucao", "payload": 1}
    with Valkey() as server, redis.Redis.from_url(server.url) as client:
        client.set("text", "which is no queue")
        start(name, server.url, queue)
        for target in ("text", ""):
            client.xadd(queue, {"body": json.dumps(command | {"responder_em": target})})
        await until(lambda: client.xlen(f"{queue}.dlq") == 1, saying="the first in the dead letters")
        await until(lambda: client.xlen("resultados") == 1, saying="the answer of the second")
        await until(lambda: client.xlen(queue) == 0, saying="both to have left")
        [(_, letter)] = client.xrange(f"{queue}.dlq")
        assert b"WRONGTYPE" in letter[b"reason"]


SLOW_FOR_NATS = """
import asyncio, sys, time
sys.path.insert(0, {folder!r})
import nats_worker

def handle(command):
    print("at work", flush=True)
    time.sleep(3)  # three times what the server waits for an ack
    return {{"status": "ok"}}

nats_worker.handle = handle
asyncio.run(nats_worker.main(*sys.argv[1:]))
"""


async def test_the_one_of_nats_keeps_its_command_while_it_works(start: Start, tmp_path: Path) -> None:
    scripts, queue = [tmp_path / f"worker{n}.py" for n in range(2)], "executador_plano"  # with a log for each
    for script in scripts:
        script.write_text(SLOW_FOR_NATS.format(folder=str(PLAIN)))
    command = {"correlation_id": "c", "tipo_evento": "iniciar_execucao", "payload": 1}
    with Nats() as server:
        async with plain_client(server.url) as client:
            await make_impatient(client, queue)
            workers = [start(str(script), server.url, queue) for script in scripts]
            for worker in workers:
                await until(lambda one=worker: "waiting for work" in one.tail(), saying="the workers to be there")
            await client.jetstream().publish(queue, json.dumps(command).encode())

            async def is_answered() -> bool:
                return bool((await api(client, "STREAM.INFO.resultados"))["state"]["messages"])

            await until(is_answered, within=30.0, saying="its answer")
        assert sum(worker.tail().count("at work") for worker in workers) == 1


OUT_OF_TIME = """
import asyncio, sys
sys.path.insert(0, {folder!r})
import nats_worker
from nats.errors import TimeoutError as ItsOwn
from nats.js import JetStreamContext

faults = [TimeoutError(), ItsOwn()]
fetch = JetStreamContext.PullSubscription.fetch

async def quiet_at_first(*args, **options):
    if faults:
        raise faults.pop()
    return await fetch(*args, **options)

JetStreamContext.PullSubscription.fetch = quiet_at_first
asyncio.run(nats_worker.main(*sys.argv[1:]))
"""


async def test_the_one_of_nats_outlives_a_quiet_time(start: Start, tmp_path: Path) -> None:
    """nats-py tells in two ways that nothing came: by an error of its own, or, when the server said so just before its
    own timer rings, by Python's."""
    script, queue = tmp_path / "worker.py", "executador_plano"
    script.write_text(OUT_OF_TIME.format(folder=str(PLAIN)))
    command = {"correlation_id": "c", "tipo_evento": "iniciar_execucao", "payload": 1}
    with Nats() as server:
        worker = start(str(script), server.url, queue)
        await until(lambda: "waiting for work" in worker.tail(), saying="the worker to be there")
        async with plain_client(server.url) as client:
            await client.jetstream().publish(queue, json.dumps(command).encode())

            async def is_answered() -> bool:
                worker.expect_alive()
                found = await api(client, "STREAM.INFO.resultados")
                return "error" not in found and found["state"]["messages"] == 1

            await until(is_answered, within=30.0, saying="its answer")
