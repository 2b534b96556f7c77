"""What no URL of a server can mean is refused when it is read, in words that show no part of a password."""

import pytest

from oraculo.clients.address import Host, read_address
from oraculo.errors import InvalidSettings

SETTING = "ORACULO_BROKER_URL"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("amqp://u:secreta@h;redis://x", "several URLs have commas between"),
        ("amqp://u:secreta@a redis://b", "several URLs have commas between"),
        ("redis://secreta;h", "a host with a ';'"),
        ("amqp://u:secreta@h:0", "port is not a number from 1 to 65535"),
        ("amqp://u:secreta@h:65536", "port is not a number from 1 to 65535"),
        ("amqps://u:secreta@h?ssl_keyfile=/k.pem", "has ssl_keyfile, which is the key of an ssl_certfile"),
    ],
)
def test_what_cannot_be_meant_is_refused(url: str, words: str) -> None:
    with pytest.raises(InvalidSettings, match=words) as refusal:
        read_address(url, SETTING, port=5672)
    assert str(refusal.value).startswith(f"{SETTING}: ")
    assert "secreta" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("amqp://", Host("localhost", 5672)),
        ("amqp://meu_rabbit-1.exemplo.com.:5673", Host("meu_rabbit-1.exemplo.com.", 5673)),
        ("amqp://[fe80::1%25eth0]:5673", Host("fe80::1%25eth0", 5673)),
        (
            "amqp://\u0939\u093f\u0928\u094d\u0926\u0940.exemplo",
            Host("\u0939\u093f\u0928\u094d\u0926\u0940.exemplo", 5672),
        ),
        ("amqp://caf\u00e9.exemplo", Host("caf\u00e9.exemplo", 5672)),
    ],
)
def test_hosts_of_every_kind_are_taken(url: str, host: Host) -> None:
    assert read_address(url, SETTING, port=5672).hosts == (host,)
