"""Tries what the bridge needs on Celery's broker, for `oraculo doctor`."""

import uuid

import kombu

from oraculo.bridges.celery.connections import (
    SEND_TIMEOUT,
    CeleryBroker,
    CeleryUnavailable,
    SetupTimeout,
    TaskRefused,
    close,
    open_channel,
    refusals,
)
from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.settings import CelerySettings
from oraculo.wire import naming
from oraculo.wire.answers import describe

_NO_EVENTS = "; ORACULO_CELERY_EVENTS=false: failed tasks come without their reason"


def check_celery(settings: CelerySettings, prefix: str, seconds: float) -> str:
    """Return where Celery's broker was reached. Raises BrokerError, which says what the bridge lacks."""
    celery_broker = CeleryBroker(settings.broker_url, settings.key_prefix, prefix + naming.BRIDGE_REPLIES)
    connection = celery_broker.connection()
    try:
        with celery_broker.faults(connection), SetupTimeout(connection, seconds):
            celery_broker.connect(connection)
            with refusals("what the bridge does"):
                _try_rights(celery_broker, connection)
            return f"can be reached at {connection.as_uri()}{'' if settings.events else _NO_EVENTS}"
    except CeleryUnavailable as error:
        raise BrokerUnavailable(str(error)) from error
    except TaskRefused as error:
        raise BrokerError(f"{connection.as_uri()}: {error}") from error
    except Exception as error:  # kombu's transports raise errors of their own
        raise BrokerError(f"{connection.as_uri()}: {describe(error)}") from error
    finally:
        close(connection)


def _try_rights(celery_broker: CeleryBroker, connection: kombu.Connection) -> None:
    """Declare the reply queue, read from it, and send to a queue that does not exist. No reply is taken."""
    with open_channel(connection) as channel:
        celery_broker.declare_replies(channel)
        if celery_broker.is_redis:  # reading there takes a reply out
            return
        channel.basic_qos(0, 1, False)
        channel.basic_consume(celery_broker.replies.name, callback=lambda _: None)  # given back with the channel
        nowhere = f"oraculo-doctor-{uuid.uuid4().hex}"
        kombu.Producer(channel).publish({}, exchange="", routing_key=nowhere, confirm_timeout=SEND_TIMEOUT)
