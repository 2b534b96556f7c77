"""kombu connections whose URL parameters for TLS mean what they mean in ORÁCULO's other URLs.

kombu passes `ssl_ca_certs` and its like on under these names. Redis' client knows the names, but RabbitMQ's client has
others and fails. RabbitMQ's client also ignores the name in a certificate unless `server_hostname` says what to expect.
"""

import ssl
from typing import Any

import kombu
from celery.app.amqp import AMQP

_AMQPS, _REDISS = "amqps", "rediss"
_RABBITMQ = (_AMQPS, "amqp", "pyamqp")
_KNOWN = ("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile")
_VERIFIED = {
    _AMQPS: {"ssl_check_hostname": True},
    _REDISS: {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True},
}


class SecuredConnection(kombu.Connection):  # type: ignore[misc, unused-ignore]
    """A connection to the broker of a Celery app.

    Without TLS parameters in the URL it verifies what the workers of that app verify: nothing, by kombu's default.
    """

    def _init_params(self, **params: Any) -> None:
        """Set the parameters of one URL. kombu calls this for the first of a list and for each that it switches to."""
        super()._init_params(**params | {"ssl": self._tls_of(params["transport"], params["ssl"], params["hostname"])})

    def switch(self, conn_str: str) -> None:
        self._initial_params["ssl"] = False  # else a URL without parameters inherits those of the first in the list
        super().switch(conn_str)

    def _tls_of(self, transport: str | None, given: Any, host: str | None) -> Any:
        return _for_rabbitmq(given, host) if transport in _RABBITMQ and isinstance(given, dict) else given


class VerifiedConnection(SecuredConnection):
    """A connection to our own broker. It verifies the certificate unless the URL says otherwise."""

    def _tls_of(self, transport: str | None, given: Any, host: str | None) -> Any:
        return super()._tls_of(transport, given or _VERIFIED.get(transport or "", given), host)


class SecuredAMQP(AMQP):  # type: ignore[misc, unused-ignore]
    """What a Celery app connects with, on the broker of ORACULO_CELERY_BROKER_URL."""

    Connection = SecuredConnection


class VerifiedAMQP(AMQP):  # type: ignore[misc, unused-ignore]
    """What a Celery app connects with, on the broker of ORACULO_BROKER_URL."""

    Connection = VerifiedConnection


def _for_rabbitmq(given: dict[str, Any], host: str | None) -> dict[str, Any] | bool:
    """Return the parameters under the names of RabbitMQ's client. Raises TypeError for an unknown parameter."""
    if not any(name.startswith("ssl_") for name in given):  # the copy of a connection has them already
        return given
    if unknown := sorted(given.keys() - set(_KNOWN)):
        raise TypeError(f"unknown parameter '{unknown[0]}'; known: {', '.join(_KNOWN)}")
    made = {name.removeprefix("ssl_"): value for name, value in given.items()}
    if made.pop("check_hostname", True) and made.get("cert_reqs") != ssl.CERT_NONE:
        made["server_hostname"] = host
    return made or True
