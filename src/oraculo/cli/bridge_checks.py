"""Whether the systems behind the bridges can be reached: each is asked once, in the way of its bridge."""

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from oraculo.errors import BrokerError, BrokerUnavailable

if TYPE_CHECKING:
    from oraculo.settings import BullmqSettings, CelerySettings

_SECONDS = 6.0


async def reach_celery(settings: "CelerySettings") -> str:
    return await asyncio.to_thread(_reach_celery, settings)


def _reach_celery(settings: "CelerySettings") -> str:
    """kombu blocks, and some of its waits have no limit: then the connection is cut."""
    from oraculo.bridges.celery.connections import Address, CeleryAway, cut

    address = Address(settings.broker_url, settings.key_prefix, "oraculo-doctor")
    connection = address.connection()
    fuse = threading.Timer(_SECONDS, cut, [connection])
    fuse.daemon = True
    fuse.start()
    try:
        with address.faults(connection):
            address.connect(connection)
            return f"can be reached at {connection.as_uri()}"
    except CeleryAway as error:
        raise BrokerUnavailable(str(error)) from error
    finally:
        fuse.cancel()
        with suppress(Exception):  # whatever state kombu left it in
            connection.release()


async def reach_bullmq(settings: "BullmqSettings") -> str:
    from redis.exceptions import NoPermissionError, RedisError, ResponseError

    from oraculo.bridges.bullmq.server import BullmqRedis
    from oraculo.clients.redis import version_of

    server, about = BullmqRedis(settings.url), dict[str, object]()
    try:
        async with asyncio.timeout(_SECONDS):
            await server.client.ping()
            with suppress(NoPermissionError):  # the bridge does not ask for it
                about = await server.client.info("server")
            try:
                await server.try_to_write()
            except NoPermissionError:  # where only the names with the bridge's prefix are allowed
                pass
            except ResponseError as error:
                raise BrokerError(f"{server.place} takes no writes: {error}") from error
    except (RedisError, OSError, TimeoutError) as error:
        told = str(error) or "no answer in time"
        raise BrokerUnavailable(f"cannot reach {server.place}: {told}") from error
    finally:
        await server.close()
    return f"{version_of({name.encode(): str(value).encode() for name, value in about.items()})} at {server.place}"
