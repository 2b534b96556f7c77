"""kombu's connection, for which the parameters of TLS in a URL mean what they mean in every other URL of ours.

kombu reads `ssl_ca_certs` and its like, and hands them on under these names: Redis' client knows them, RabbitMQ's has
others and fails. RabbitMQ's client also leaves the name in a certificate alone unless it is told which it must be.
"""

import ssl
from typing import Any

import kombu

_AMQPS, _REDISS = "amqps", "rediss"
_RABBITMQ = (_AMQPS, "amqp", "pyamqp")
_KNOWN = ("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile")
_VERIFIED = {
    _AMQPS: {"ssl_check_hostname": True},
    _REDISS: {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True},
}


class SecuredConnection(kombu.Connection):  # type: ignore[misc, unused-ignore]
    """A URL that says nothing of TLS but its scheme is as kombu has it, and as the Celery app's own workers do."""

    def _init_params(self, **params: Any) -> None:
        """For the first URL of a list, and again whenever it goes on to another."""
        super()._init_params(**params | {"ssl": self._tls_of(params["transport"], params["ssl"], params["hostname"])})

    def switch(self, conn_str: str) -> None:
        self._initial_params["ssl"] = False  # else one that says nothing would have that of the first in the list
        super().switch(conn_str)

    def _tls_of(self, transport: str | None, given: Any, host: str | None) -> Any:
        return _for_rabbitmq(given, host) if transport in _RABBITMQ and isinstance(given, dict) else given


class VerifiedConnection(SecuredConnection):
    """To our own broker, whose certificate is verified by everybody."""

    def _tls_of(self, transport: str | None, given: Any, host: str | None) -> Any:
        return super()._tls_of(transport, given or _VERIFIED.get(transport or "", given), host)


def _for_rabbitmq(given: dict[str, Any], host: str | None) -> dict[str, Any] | bool:
    """Raises TypeError for a parameter that its client does not know."""
    if not any(name.startswith("ssl_") for name in given):  # a copy of a connection has them as they were made here
        return given
    if unknown := sorted(given.keys() - set(_KNOWN)):
        raise TypeError(f"the unknown parameter '{unknown[0]}'; known: {', '.join(_KNOWN)}")
    made = {name.removeprefix("ssl_"): value for name, value in given.items()}
    if made.pop("check_hostname", True) and made.get("cert_reqs") != ssl.CERT_NONE:
        made["server_hostname"] = host
    return made or True
