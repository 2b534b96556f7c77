"""kombu connections whose URL parameters for TLS mean what they mean in ORÁCULO's other URLs.

kombu passes `ssl_ca_certs` and its like on under these names. Redis' client knows the names, but RabbitMQ's client has
others and fails. RabbitMQ's client also ignores the name in a certificate unless `server_hostname` says what to expect.
"""

import re
import ssl
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import kombu
from celery.app.amqp import AMQP

_RABBITMQ = ("amqp", "amqps", "pyamqp")
_KNOWN = ("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile")
_VERIFY = {"amqps": "ssl_check_hostname=true", "rediss": "ssl_cert_reqs=required&ssl_check_hostname=true"}
_NO = re.compile(r"(?<=ssl_check_hostname=)(?:0|no)(?=&|$)", re.IGNORECASE)


def verified(url: str) -> str:
    """Return the URL of our own broker, whose certificate is verified unless the URL has TLS parameters."""
    parts = urlsplit(url)
    query = _NO.sub("false", parts.query)  # the only word for no that kombu knows
    if parts.scheme in _VERIFY and "ssl_" not in query:
        query = "&".join(filter(None, (query, _VERIFY[parts.scheme])))
    return urlunsplit(parts._replace(query=query))


class SecuredConnection(kombu.Connection):  # type: ignore[misc, unused-ignore]
    """A kombu connection. Without TLS parameters it verifies what Celery's own workers verify: nothing."""

    def _init_params(self, **params: Any) -> None:
        """Set the parameters of one URL. kombu calls this for the first of a list and for each that it switches to."""
        if params["transport"] in _RABBITMQ and isinstance(params["ssl"], dict):
            params["ssl"] = _for_rabbitmq(params["ssl"], params["hostname"])
        super()._init_params(**params)

    def switch(self, conn_str: str) -> None:
        self._initial_params["ssl"] = False  # else a URL without parameters inherits those of the first in the list
        super().switch(conn_str)


class SecuredAMQP(AMQP):  # type: ignore[misc, unused-ignore]
    """The part of a Celery app that connects, by SecuredConnection."""

    Connection = SecuredConnection


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
