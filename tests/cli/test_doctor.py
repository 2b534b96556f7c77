"""What `oraculo doctor` finds without a server."""

import json
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
import redis
from typer.testing import CliRunner

from oraculo import __version__
from oraculo.cli.app import app
from oraculo.cli.welcome import Welcome
from oraculo.ports.clock import SystemClock
from oraculo.settings import load_settings
from oraculo.settings.urls import redacted
from tests.servers.fleet import Fleet
from tests.servers.process import free_port
from tests.servers.valkey import Sentinel, Valkey

NOWHERE = "http://127.0.0.1:9"


def doctor(*args: str, **env: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *args], env=env)
    checks = json.loads(result.stdout)["verificacoes"]
    return result.exit_code, {check["nome"]: check for check in checks}


def test_looking_makes_no_store(tmp_path: Path) -> None:
    _, checks = doctor()
    assert "not there yet" in checks["store"]["detalhe"]
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_there_is_opened_and_proved(tmp_path: Path) -> None:
    (tmp_path / "x.db").touch()
    _, checks = doctor(ORACULO_STORE_URL="sqlite:///x.db")
    assert checks["store"]["estado"] == "ok"
    assert "SQLite" in checks["store"]["detalhe"]


def test_a_broken_store_is_an_error_and_1(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("this is no database, and it is long enough for SQLite to see that" * 20)
    code, checks = doctor(ORACULO_STORE_URL="sqlite:///x.db")
    assert code == 1
    assert checks["store"]["estado"] == "erro"
    assert "ORACULO_STORE_URL" in checks["store"]["o_que_fazer"]


def test_what_a_broker_has_for_the_log_is_reported_alone() -> None:
    with Valkey() as server, redis.Redis.from_url(server.url) as plain:
        plain.config_set("maxmemory", "100mb")
        plain.config_set("maxmemory-policy", "allkeys-lru")
        _, checks = doctor(ORACULO_BROKER_URL=server.url)
    assert checks["broker"]["estado"] == "aviso"
    assert "it may evict queues, with all that is in them; set it to noeviction" in checks["broker"]["detalhe"]


def test_a_shared_broker_where_any_queue_may_be_named_is_a_warning() -> None:
    nobody = {"ORACULO_BROKER_URL": "redis://127.0.0.1:1"}
    _, checks = doctor(**nobody)
    assert checks["queues"]["estado"] == "aviso"
    assert "ORACULO_PREFIX, or ORACULO_QUEUES_ALLOW" in checks["queues"]["o_que_fazer"]
    for bounded in ({"ORACULO_PREFIX": "loja."}, {"ORACULO_QUEUES_ALLOW": "loja-*"}):
        assert "queues" not in doctor(**nobody, **bounded)[1]
    assert "queues" not in doctor()[1]


def test_an_empty_store_is_left_empty(fleet: Fleet) -> None:
    namespace = f"doctor-{uuid4().hex[:8]}"
    _, checks = doctor(ORACULO_STORE_URL=f"{fleet.url('redis')}?namespace={namespace}")
    assert checks["store"]["estado"] == "ok"
    assert "empty: it is laid out at the first start" in checks["store"]["detalhe"]
    with redis.Redis.from_url(fleet.url("redis")) as plain:
        assert plain.keys(f"{namespace}:*") == []


def test_a_store_that_runs_and_refuses_is_not_to_be_started(fleet: Fleet) -> None:
    user = f"doctor-{uuid4().hex[:8]}"
    with redis.Redis.from_url(fleet.url("redis")) as plain:
        plain.acl_setuser(user, enabled=True, passwords=["+p"], keys=["*"], commands=["+@all", "-zadd"])
        try:
            _, checks = doctor(ORACULO_STORE_URL=fleet.url("redis").replace("redis://", f"redis://{user}:p@"))
        finally:
            plain.acl_deluser(user)
    assert "'zadd'" in checks["store"]["detalhe"]
    assert checks["store"]["o_que_fazer"] == "mend that, or ORACULO_STORE_URL"


def test_a_lock_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.db.lock").mkdir()
    code, checks = doctor(ORACULO_STORE_URL="sqlite:///x.db")
    assert code == 1
    assert "x.db.lock is not a file that can be written" in checks["store"]["detalhe"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.db").touch()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    code, checks = doctor(ORACULO_STORE_URL="sqlite:///x.db")
    assert code == 1
    assert f"{tmp_path} is not writable" in checks["store"]["detalhe"]


def test_a_folder_for_large_results_that_cannot_be_looked_at_is_an_error() -> None:
    code, checks = doctor(ORACULO_OBJECTS_URL=f"./{'x' * 300}")
    assert code == 1
    assert checks["objects"]["estado"] == "erro"
    assert "File name too long" in checks["objects"]["detalhe"]
    assert "ORACULO_OBJECTS_URL" in checks["objects"]["o_que_fazer"]


def test_what_may_be_lost_is_a_warning() -> None:
    with Valkey(durable=False) as server:
        _, checks = doctor(ORACULO_BROKER_URL=server.url, ORACULO_STORE_URL=server.url)
    for part in ("broker", "store"):
        assert checks[part]["estado"] == "aviso"
        assert "no append-only file" in checks[part]["detalhe"]


def test_a_clock_that_differs_from_the_stores_is_a_warning(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{fleet.url('redis')}?namespace=doctor-{uuid4().hex[:8]}"
    assert CliRunner().invoke(app, ["migrate"], env={"ORACULO_STORE_URL": url}).exit_code == 0
    _, checks = doctor(ORACULO_STORE_URL=url)
    assert checks["store"]["estado"] == "ok"
    monkeypatch.setattr(SystemClock, "now", lambda _: time.time() + 90)
    _, checks = doctor(ORACULO_STORE_URL=url)
    assert checks["store"]["estado"] == "aviso"
    assert "clock is 90 s ahead" in checks["store"]["detalhe"]


def test_the_systems_behind_the_bridges_are_reached(fleet: Fleet) -> None:
    _, checks = doctor(ORACULO_CELERY_BROKER_URL=fleet.url("rabbitmq"), ORACULO_BULLMQ_URL=fleet.url("redis"))
    assert {checks[name]["estado"] for name in ("celery", "bullmq")} == {"ok"}
    assert checks["celery"]["detalhe"].startswith("can be reached at amqp://guest:**@127.0.0.1")
    assert checks["bullmq"]["detalhe"].startswith(("Valkey ", "Redis "))
    _, checks = doctor(ORACULO_CELERY_BROKER_URL=fleet.url("rabbitmq"), ORACULO_CELERY_EVENTS="false")
    assert checks["celery"]["detalhe"].endswith("ORACULO_CELERY_EVENTS=false: failed tasks come without their reason")


@pytest.mark.parametrize(
    ("celery", "bullmq"),
    [("redis://:segredo@127.0.0.1:9/0", "redis://:segredo@127.0.0.1:9"), ("pyamqp://u:segredo@127.0.0.1:9//", "")],
)
def test_systems_behind_the_bridges_that_are_not_there_are_errors(celery: str, bullmq: str) -> None:
    code, checks = doctor(ORACULO_CELERY_BROKER_URL=celery, ORACULO_BULLMQ_URL=bullmq)
    assert code == 1
    for name, variable in (("celery", "ORACULO_CELERY_BROKER_URL"), ("bullmq", "ORACULO_BULLMQ_URL")):
        if name in checks:
            assert checks[name]["estado"] == "erro"
            assert "127.0.0.1:9" in checks[name]["detalhe"]
            assert checks[name]["o_que_fazer"] == f"start it, or mend {variable}"
    assert "segredo" not in str(checks)


def test_a_redis_of_bullmq_that_takes_no_writes_is_an_error() -> None:
    with Valkey() as server, redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)
        code, checks = doctor(ORACULO_BULLMQ_URL=server.url)
        assert code == 1
        assert checks["bullmq"]["estado"] == "erro"
        assert "takes no writes: command not allowed when used memory" in checks["bullmq"]["detalhe"]
        client.config_set("maxmemory", 0)
        client.config_set("min-replicas-to-write", 1)
        said = doctor(ORACULO_BULLMQ_URL=server.url)[1]["bullmq"]["detalhe"]
        assert "takes no writes: NOREPLICAS" in said
        client.config_set("min-replicas-to-write", 0)
        assert doctor(ORACULO_BULLMQ_URL=server.url)[1]["bullmq"]["estado"] == "ok"
        assert client.dbsize() == 0


def test_a_bridge_with_a_url_that_cannot_be_is_a_bad_setting() -> None:
    code, checks = doctor(ORACULO_CELERY_BROKER_URL="nothing")
    assert code == 2
    assert "ORACULO_CELERY_BROKER_URL" in checks["settings"]["detalhe"]
    assert checks["broker"]["estado"] == "ok"


def test_a_url_that_cannot_be_one_is_bad_usage() -> None:
    result = CliRunner().invoke(app, ["doctor", "--url", "zz"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "--url: 'zz'" in result.stderr


def test_a_server_that_was_named_and_is_not_there_is_an_error() -> None:
    code, checks = doctor("--url", NOWHERE)
    assert code == 1
    assert NOWHERE in checks["server"]["detalhe"]


@pytest.mark.parametrize(
    ("version", "problem", "state", "said"),
    [
        (__version__, None, "ok", f"ready, version {__version__}"),
        (__version__, "no engine is alive", "aviso", "ready, but engines: no engine is alive"),
        ("0.0.1", "no engine is alive", "aviso", "ready, but its version is 0.0.1; engines: no engine is alive"),
    ],
)
def test_a_server_that_is_ready_says_which_of_its_parts_fail(
    monkeypatch: pytest.MonkeyPatch, version: str, problem: str | None, state: str, said: str
) -> None:
    parts = {"engine": {"ok": True, "problema": None}, "engines": {"ok": problem is None, "problema": problem}}
    answer = httpx2.Response(200, json={"status": "degradado", "versao": version, "partes": parts})
    monkeypatch.setattr(httpx2.Client, "request", lambda *_args, **_options: answer)
    code, checks = doctor("--url", NOWHERE)
    assert code == 0
    assert (checks["server"]["estado"], checks["server"]["detalhe"]) == (state, f"at {NOWHERE}, {said}")


def test_an_engine_without_an_api_is_ready_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = httpx2.Response(200, json={"status": "ok", "versao": __version__, "partes": {}})
    missing = httpx2.Response(404, json={"title": "Not Found", "status": 404})
    answers = {"/health/ready": ready}
    monkeypatch.setattr(httpx2.Client, "request", lambda _self, _method, path, **_: answers.get(path, missing))
    code, checks = doctor("--url", NOWHERE, "--api-key", "chave")
    assert (code, checks["server"]["estado"]) == (0, "ok")


def test_bad_settings_are_2_and_every_fault_is_reported() -> None:
    result = CliRunner().invoke(app, ["doctor"], env={"ORACULO_API_PORT": "many", "ORACULO_STORE_URL": "x"})
    assert result.exit_code == 2
    assert "ORACULO_API_PORT" in result.stdout
    assert "ORACULO_STORE_URL" in result.stdout


def test_a_broker_that_is_not_there_is_an_error_that_says_where_and_what_to_do() -> None:
    code, checks = doctor(ORACULO_BROKER_URL="nats://user:secret@127.0.0.1:9")
    assert code == 1
    assert checks["broker"]["estado"] == "erro"
    assert "127.0.0.1:9" in checks["broker"]["detalhe"]
    assert "secret" not in str(checks)
    assert "ORACULO_BROKER_URL" in checks["broker"]["o_que_fazer"]


def test_a_broker_that_runs_and_takes_nothing_is_not_to_be_started() -> None:
    with Valkey() as server, redis.Redis.from_url(server.url) as plain:
        plain.replicaof("127.0.0.1", free_port())
        code, checks = doctor(ORACULO_BROKER_URL=server.url)
    assert code == 1
    assert "is a replica, and read-only" in checks["broker"]["detalhe"]
    assert checks["broker"]["o_que_fazer"] == "mend that, or ORACULO_BROKER_URL"


def test_a_sentinel_is_no_store() -> None:
    with Sentinel() as server:
        code, checks = doctor(ORACULO_BROKER_URL=server.url, ORACULO_STORE_URL=server.url)
    assert code == 1
    for part in ("broker", "store"):
        assert "is a Redis Sentinel" in checks[part]["detalhe"]
        assert checks[part]["o_que_fazer"] == f"mend that, or ORACULO_{part.upper()}_URL"


def test_each_of_several_brokers_is_named(fleet: Fleet) -> None:
    urls = ",".join((fleet.url("rabbitmq"), fleet.url("redis"), fleet.url("nats"), "redis://127.0.0.1:9"))
    code, checks = doctor(ORACULO_BROKER_URL=urls)
    states = {name: check for name, check in checks.items() if name.startswith("broker ")}
    assert code == 1
    assert [check["estado"] for check in states.values()] == ["ok", "ok", "ok", "erro"]
    assert [check["detalhe"].split()[0] for check in states.values()][:3] == ["RabbitMQ", "Valkey", "NATS"]
    assert [name.split("://")[0] for name in states] == ["broker amqp", "broker redis", "broker nats", "broker redis"]
    assert not [name for name in states if "@" in name]


def test_each_node_of_a_cluster_is_named(fleet: Fleet) -> None:
    code, checks = doctor(ORACULO_BROKER_URL=fleet.url("nats") + ",127.0.0.1:9")
    states = {name: check["estado"] for name, check in checks.items() if name.startswith("broker ")}
    assert code == 1
    assert list(states.values()) == ["ok", "erro"]
    assert "127.0.0.1:9" in list(states)[1]


def test_a_url_with_a_parameter_that_nobody_knows_is_a_bad_setting() -> None:
    code, checks = doctor(ORACULO_BROKER_URL="redis://localhost?tiemout=3")
    assert code == 2
    assert "'tiemout'" in checks["settings"]["detalhe"]


def test_the_pipelines_folder_is_checked(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "bad.yaml").write_text("name: x\n")
    code, checks = doctor(ORACULO_PIPELINES="p")
    assert code == 2
    assert "bad.yaml" in checks["pipelines"]["detalhe"]
    assert "pipelines validate p" in checks["pipelines"]["o_que_fazer"]


def test_a_pipelines_folder_that_is_not_there_is_a_bad_setting() -> None:
    code, checks = doctor(ORACULO_PIPELINES="no-such")
    assert code == 2
    assert "ORACULO_PIPELINES" in checks["pipelines"]["o_que_fazer"]


def test_secrets_are_not_shown() -> None:
    env = {"ORACULO_API_KEYS": "segredo-de-dezesseis", "ORACULO_WEBHOOK_SECRET": "whsec_c2VncmVkby0y"}
    result = CliRunner().invoke(app, ["doctor"], env=env)
    assert "api.keys = 1 set" in result.stdout
    assert "webhook.secret = set" in result.stdout
    assert "segredo" not in result.stdout
    assert "c2VncmVkby0y" not in result.stdout


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://user:pw@host/v", "amqp://user:***@host/v"),
        ("redis://:pw@host", "redis://:***@host"),
        ("postgresql://host/db?password=pw", "postgresql://host/db"),
        ("sqlite:///x.db", "sqlite:///x.db"),
        ("sqlite:////var/a@b.db", "sqlite:////var/a@b.db"),
        ("./objects?x=pw", "./objects"),
        ("nats://pw@a,b", "nats://***@a,b"),
        ("nats://user:pw@[::1]:1,[::2]?replicas=3", "nats://user:***@[::1]:1,[::2]"),
        ("amqp://guest@host", "amqp://guest@host"),
        # Not percent-encoded.
        ("amqp://user:pw@pw@host", "amqp://***"),
        ("postgresql://user:pw@pw/pw@host/db", "postgresql://***"),
        ("amqp://user:pw@pw#pw@host/v", "amqp://***"),
        ("amqp://user:12,pw/pw@host/v", "amqp://***"),
        ("amqp://user:12?pw@host", "amqp://***"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert redacted(url) == shown


def test_dev_does_not_show_the_password_of_its_store() -> None:
    settings = load_settings({"ORACULO_STORE_URL": "postgresql://user:segredo@host/db"})
    (state,) = [line for line in Welcome(settings, [], samples=False)._lines("http://here") if "state:" in line]
    assert "postgresql://user:***@host/db" in state


def test_a_store_whose_url_cannot_be_read_is_bad_usage() -> None:
    status, checks = doctor("--url", NOWHERE, ORACULO_STORE_URL="postgresql://[::1/d")
    assert status == 2
    assert checks["settings"]["detalhe"].startswith("ORACULO_STORE_URL: ")
