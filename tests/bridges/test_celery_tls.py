"""TLS to RabbitMQ over kombu: a private certificate authority, and the name in the certificate."""

import ssl
from pathlib import Path
from typing import Any, cast

import pytest

from oraculo.bridges.celery.connections import CeleryBroker
from oraculo.bridges.celery.tls import SecuredConnection, verified
from oraculo.celery_app import make_celery_app
from oraculo.errors import InvalidSettings
from oraculo.settings import BrokerSettings, CelerySettings, Settings
from tests.bridges.celery_handlers import app as handlers
from tests.bridges.test_celery_engine import Engine
from tests.cli.test_doctor import doctor
from tests.end_to_end.stage import Stage, settings_for
from tests.servers.fleet import Fleet
from tests.servers.rabbitmq import RabbitMQ

pytestmark = pytest.mark.timeout(120)
THEIRS = CelerySettings(broker_url="amqps://b.example")


@pytest.fixture
def server(fleet: Fleet) -> RabbitMQ:
    return cast("RabbitMQ", fleet.server("rabbitmq"))


async def test_a_worker_trusts_the_authority_that_the_url_names(server: RabbitMQ, tmp_path: Path) -> None:
    settings = settings_for(server.tls_url)
    engine = Engine(settings, tmp_path / "worker.log", "-c", "1")
    try:
        await engine.is_ready()
        async with Stage(settings) as oraculo:
            aggregate = await oraculo.run({"destinos": ["executador_relatorio"], "payload": {}})
            assert aggregate["status"] == "concluida"
    finally:
        engine.kill()


@pytest.mark.parametrize(
    ("host", "more", "fault"),
    [
        ("localhost", "", None),
        ("127.1", "", "CERTIFICATE_VERIFY_FAILED"),  # this machine, by a name that is not in the certificate
        ("127.1", "&ssl_check_hostname=false", None),
    ],
)
def test_the_bridge_looks_at_the_name_in_the_certificate(
    host: str, more: str, fault: str | None, server: RabbitMQ
) -> None:
    _, checks = doctor(ORACULO_CELERY_BROKER_URL=server.tls_url.replace("localhost", host) + more)
    assert checks["celery"]["estado"] == ("erro" if fault else "ok"), checks["celery"]
    assert fault is None or fault in checks["celery"]["detalhe"]


@pytest.mark.parametrize(
    ("url", "made"),
    [
        ("amqps://a?ssl_ca_certs=/ca&ssl_cert_reqs=none", {"ca_certs": "/ca", "cert_reqs": 0}),
        ("amqps://a?ssl_check_hostname=false", True),
        (verified("amqps://a"), {"server_hostname": "a"}),
        (verified("amqps://a?heartbeat=5"), {"server_hostname": "a"}),
        (verified("amqps://a?ssl_check_hostname=false"), True),
        (verified("amqp://a"), False),
        (verified("rediss://a"), {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}),
        (verified("rediss://a?ssl_ca_certs=/ca"), {"ssl_ca_certs": "/ca"}),
    ],
)
def test_what_a_url_says_of_tls(url: str, made: Any) -> None:
    connection = SecuredConnection(url)
    assert connection.ssl == made
    assert connection.clone().ssl == made


def test_each_of_a_list_has_its_own() -> None:
    connection = SecuredConnection(f"amqps://a?ssl_ca_certs=/ca;amqp://b;{verified('amqps://c')}")
    assert connection.ssl == {"ca_certs": "/ca", "server_hostname": "a"}
    connection.maybe_switch_next()
    assert connection.ssl is False
    connection.maybe_switch_next()
    assert connection.ssl == {"server_hostname": "c"}


def test_our_own_broker_is_verified_and_celerys_is_as_its_url_says() -> None:
    own = make_celery_app(Settings(broker=BrokerSettings(url="amqps://a.example")), [handlers])
    assert own.connection().ssl == {"server_hostname": "a.example"}
    assert make_celery_app(Settings(celery=THEIRS)).connection().ssl is False
    url = "amqps://c.example:5671/%2F"
    both = Settings(broker=BrokerSettings(url=url), celery=CelerySettings(broker_url=url))
    assert make_celery_app(both, [handlers]).connection().ssl == {"server_hostname": "c.example"}


@pytest.mark.parametrize("no", ["false", "0", "no", "No"])
def test_no_is_no_in_every_word_that_other_urls_have_for_it(no: str) -> None:
    settings = Settings(broker=BrokerSettings(url=f"amqps://a.example?ssl_ca_certs=/ca&ssl_check_hostname={no}"))
    assert make_celery_app(settings, [handlers]).connection().ssl == {"ca_certs": "/ca"}


def test_a_parameter_that_nobody_knows_is_a_bad_setting() -> None:
    with pytest.raises(InvalidSettings, match="unknown parameter 'ssl_authority'; known: ssl_ca_certs"):
        CeleryBroker("amqps://a?ssl_authority=/ca.pem")
