"""Each combination of extras that the documents name, installed as they say and started on real servers."""

import re
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.bridges.celery_stage import CeleryWorker
from tests.cli.processes import Process, environment
from tests.cli.processes import until as wait_until
from tests.servers.fleet import Fleet
from tests.stores.postgres_stage import with_schema

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "celery_workers"
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
BROKERS = {"rabbitmq": "rabbitmq", "redis": "redis", "nats": "nats", "nkeys": "nats"}
STORES = {"postgres": "postgres", "redis": "redis", "mongo": "mongodb"}
AWS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
HANDLERS = """
from oraculo.worker import App

app = App("eco")


@app.executador("eco")
async def echo(payload):
    return payload
"""
MAKE_CREDENTIALS = """
import os, nkeys
seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode()
print("-----BEGIN NATS USER JWT-----", "eyJ.eyJ.x", "------END NATS USER JWT------", "", sep="\\n")
print("-----BEGIN USER NKEY SEED-----", seed, "------END USER NKEY SEED------", sep="\\n")
"""


def combinations() -> list[str]:
    """Those that a document writes as `'.[a,b]'`, and each extra by itself, as README lists them."""
    pages = [*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    written = {found for page in pages for found in re.findall(r"'\.\[([\w,]+)\]'", page.read_text("utf-8"))}
    return sorted(written | set(EXTRAS))


def whole(extras: str) -> set[str]:
    """The extras, and those that they bring."""
    names: set[str] = set()
    for extra in extras.split(","):
        brought = re.fullmatch(r"oraculo\[(.+)\]", EXTRAS[extra][0])
        names |= whole(brought[1]) if brought else {extra}
    return names


class Installed:
    """A fresh virtual environment with ORÁCULO and the extras, and a folder to run its programs in."""

    def __init__(self, folder: Path, extras: str = "") -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        uv = str(Path(sys.executable).with_name("uv"))  # for pip, many environments take minutes
        self._run(uv, "venv", "--seed", "--python", sys.executable, str(folder / "venv"))
        here = f".[{extras}]" if extras else "."
        self._run(
            uv, "pip", "install", "--compile-bytecode", "--python", str(self.bin / "python"), "-e", here, cwd=ROOT
        )
        (folder / "handlers.py").write_text(HANDLERS)

    def pip(self, *arguments: str) -> None:
        self._run(str(self.bin / "python"), "-m", "pip", *arguments, cwd=ROOT)

    def python(self, program: str) -> str:
        return self._run(str(self.bin / "python"), "-c", program)

    def oraculo(self, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        command = [str(self.bin / "oraculo"), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self._env(env), capture_output=True, text=True, timeout=60, check=False
        )

    def celery(self, url: str, log: str, command: str, cwd: Path, **env: str) -> CeleryWorker:
        return CeleryWorker(url, self.folder / log, command=f"{self.bin}/{command}", cwd=cwd, **self._env(env))

    def served(self, **env: str) -> Process:
        program = [str(self.bin / "oraculo")]
        return Process("serve", "--app", "handlers:app", cwd=self.folder, env=self._env(env), program=program)

    def _run(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=self._env({}), capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout

    @staticmethod
    def _env(env: Mapping[str, str]) -> dict[str, str]:
        """Nothing but the new environment gives modules to what runs in it, and these are compiled only once."""
        return environment(PYTHONPATH="", PYTHONDONTWRITEBYTECODE="", **env)


@pytest.mark.parametrize("extras", combinations())
async def test_what_is_installed_with_extras_runs(extras: str, fleet: Fleet, tmp_path: Path) -> None:
    installed, names = Installed(tmp_path, extras), whole(extras)
    brokers = [url for name in sorted(names) if (url := _reached(fleet, BROKERS.get(name)))] or ["memory://"]
    stores = [url for name in sorted(names) if (url := _reached(fleet, STORES.get(name)))] or [""]
    if "nkeys" in names:
        credentials = tmp_path / "user.creds"
        credentials.write_text(installed.python(MAKE_CREDENTIALS))
        brokers.append(f"{fleet.url('nats')}?credentials={credentials}")
    for number in range(max(len(brokers), len(stores))):
        settings = _settings(brokers[number % len(brokers)])
        if (store := stores[number % len(stores)]).startswith("postgres"):
            settings["ORACULO_STORE_URL"] = await with_schema(store)
        elif store:
            settings["ORACULO_STORE_URL"] = store
        if "bullmq" in names:
            settings["ORACULO_BULLMQ_URL"] = fleet.url("redis")
        _expect_a_run(installed, settings)
    if "celery" in names:
        shared = next((url for url in brokers if url != "memory://"), "")
        _expect_celery_over_redis(installed, fleet.url("redis"), shared)
    if "s3" in names:
        place = "s3://bucket/oraculo?endpoint_url=http://127.0.0.1:9"
        told = installed.oraculo("doctor", ORACULO_OBJECTS_URL=place, **AWS).stdout
        assert 'Could not connect to the endpoint URL: "http://127.0.0.1:9/' in told


def _reached(fleet: Fleet, name: str | None) -> str | None:
    """The URL of a server; None where the machine has none, which the summary of the tests says."""
    try:
        return name and fleet.url(name)
    except pytest.skip.Exception:
        return None


def _settings(broker: str) -> dict[str, str]:
    unique = f"t{uuid.uuid4().hex[:10]}"
    store = f"sqlite:///{unique}.db"
    return {"ORACULO_BROKER_URL": broker, "ORACULO_PREFIX": f"{unique}.", "ORACULO_STORE_URL": store}


def _expect_a_run(installed: Installed, settings: dict[str, str]) -> None:
    server = installed.served(**settings)
    try:
        wait_until(lambda: _is_ready(server.url), saying="the server to be ready")
        request = {"destinos": ["executador_eco"], "payload": {"texto": "olá"}, "timeout": 30}
        found = httpx2.post(f"{server.url}/orquestracoes", json=request, headers={"Prefer": "wait=30"}, timeout=40)
        assert found.json()["status"] == "concluida", (settings, found.json(), server.errors)
    finally:
        server.end()


def _is_ready(url: str) -> bool:
    return httpx2.get(f"{url}/health/ready").json()["status"] == "ok"


def _expect_celery_over_redis(installed: Installed, redis: str, shared: str) -> None:
    """Its tasks as steps; and, where Celery's worker can reach our broker, a run that a Celery client starts."""
    queue = f"loja-{uuid.uuid4().hex[:10]}"
    settings = _settings(shared or "memory://") | {
        "ORACULO_CELERY_BROKER_URL": redis,
        "ORACULO_CELERY_QUEUE": queue,
        "ORACULO_CELERY_TASKS_ALLOW": "loja.*",
        "ORACULO_PIPELINES": str(EXAMPLE),
    }
    loja = installed.celery(
        redis, "loja.log", "celery -A loja worker", EXAMPLE, CELERY_BROKER_URL=redis, LOJA_QUEUE=queue
    )
    core = installed.celery(redis, "core.log", "celery -A oraculo.celery_app worker", installed.folder, **settings)
    server = installed.served(**settings)
    try:
        loja.start()
        request = {"pipeline": "anuncio", "payload": {"titulo": "Oferta"}, "timeout": 60}
        found = httpx2.post(f"{server.url}/orquestracoes", json=request, headers={"Prefer": "wait=60"}, timeout=70)
        assert found.json()["status"] == "concluida", (found.json(), loja.tail(), server.errors)
        if shared:
            core.start()
            start = f"import sys; sys.path.insert(0, {str(EXAMPLE)!r}); import start_a_run; start_a_run.main"
            run_id = installed.python(f"{start}({redis!r}, {settings['ORACULO_PREFIX'] + 'orquestrador_core'!r})")
            where = f"{server.url}/orquestracoes/{run_id.strip()}"
            wait_until(
                lambda: httpx2.get(where).json().get("status") == "concluida",
                within=60,
                saying=f"the run that Celery started; its worker: {core.tail()}",
            )
    finally:
        server.end()
        loja.kill()
        core.kill()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """An environment without any extra; each test adds what an error says."""
    return Installed(tmp_path_factory.mktemp("bare"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ORACULO_BROKER_URL", "amqp://127.0.0.1:9"),
        ("ORACULO_BROKER_URL", "redis://127.0.0.1:9"),
        ("ORACULO_BROKER_URL", "nats://127.0.0.1:9"),
        ("ORACULO_STORE_URL", "postgresql://127.0.0.1:9/x"),
        ("ORACULO_STORE_URL", "mongodb://127.0.0.1:9/x"),
        ("ORACULO_OBJECTS_URL", "s3://bucket/oraculo?endpoint_url=http://127.0.0.1:9"),
        ("ORACULO_CELERY_BROKER_URL", "redis://127.0.0.1:9"),
        ("ORACULO_BULLMQ_URL", "redis://127.0.0.1:9"),
    ],
)
def test_what_an_error_says_of_a_missing_package_can_be_run(bare: Installed, variable: str, value: str) -> None:
    env: dict[str, Any] = {variable: value, **AWS}
    told = bare.oraculo("serve", "--port", "0", **env).stderr
    advice = re.search(r"pip (install) '(oraculo\[\w+\])' where ORÁCULO is installed$", told.strip())
    assert advice, told
    bare.pip(*advice.groups())
    checked = bare.oraculo("doctor", **env).stdout
    assert "not installed" not in checked
    assert "127.0.0.1:9" in checked
