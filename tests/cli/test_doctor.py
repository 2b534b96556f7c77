"""What `oraculo doctor` finds without a server."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oraculo.cli.app import app
from oraculo.settings.urls import redacted
from tests.servers.fleet import Fleet

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


def test_a_server_that_was_named_and_is_not_there_is_an_error() -> None:
    code, checks = doctor("--url", NOWHERE)
    assert code == 1
    assert NOWHERE in checks["server"]["detalhe"]


def test_bad_settings_are_2_and_every_fault_is_told() -> None:
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


def test_each_of_several_brokers_is_told_of(fleet: Fleet) -> None:
    urls = ",".join((fleet.url("rabbitmq"), fleet.url("redis"), fleet.url("nats"), "redis://127.0.0.1:9"))
    code, checks = doctor(ORACULO_BROKER_URL=urls)
    states = {name: check for name, check in checks.items() if name.startswith("broker ")}
    assert code == 1
    assert [check["estado"] for check in states.values()] == ["ok", "ok", "ok", "erro"]
    assert [check["detalhe"].split()[0] for check in states.values()][:3] == ["RabbitMQ", "Valkey", "NATS"]


def test_each_node_of_a_cluster_is_told_of(fleet: Fleet) -> None:
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
    env = {"ORACULO_API_KEYS": "segredo-1", "ORACULO_WEBHOOK_SECRET": "whsec_c2VncmVkby0y"}
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
