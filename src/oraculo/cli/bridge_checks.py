"""Whether the systems behind the bridges can be used: each is asked once, in the way of its bridge."""

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.wire.answers import describe

if TYPE_CHECKING:
    from oraculo.bridges.bullmq.server import BullmqRedis
    from oraculo.settings import BullmqSettings, CelerySettings

_SECONDS = 6.0
_UNHEARD = "ORACULO_CELERY_EVENTS=false: failed tasks come without their reason"


async def reach_celery(settings: "CelerySettings", prefix: str) -> str:
    """`prefix`: of our queues."""
    return await asyncio.to_thread(_reach_celery, settings, prefix)


def _reach_celery(settings: "CelerySettings", prefix: str) -> str:
    """kombu blocks, and some of its waits have no limit: then the connection is cut."""
    from oraculo.bridges.celery.bridge import REPLIES
    from oraculo.bridges.celery.connections import Address, CeleryAway, TaskRefused, cut, try_rights

    address = Address(settings.broker_url, settings.key_prefix, prefix + REPLIES)
    connection = address.connection()
    fuse = threading.Timer(_SECONDS, cut, [connection])
    fuse.daemon = True
    fuse.start()
    try:
        with address.faults(connection):
            address.connect(connection)
            try_rights(address, connection)
            unheard = "" if settings.events else f"; {_UNHEARD}"
            return f"can be reached at {connection.as_uri()}{unheard}"
    except TaskRefused as error:
        raise BrokerError(f"{connection.as_uri()}: {error}") from error
    except CeleryAway as error:
        raise BrokerUnavailable(str(error)) from error
    except Exception as error:  # each of kombu's transports has its own; the other checks are worth having
        raise BrokerError(f"{connection.as_uri()}: {describe(error)}") from error
    finally:
        fuse.cancel()
        with suppress(Exception):  # whatever state kombu left it in
            connection.release()


async def reach_bullmq(settings: "BullmqSettings", prefix: str) -> str:
    """`prefix`: of our queues."""
    from redis.exceptions import NoPermissionError, RedisError, ResponseError

    from oraculo.bridges.bullmq.server import BullmqRedis
    from oraculo.clients.redis import version_of

    server, about = BullmqRedis(settings.url, prefix), dict[str, object]()
    try:
        async with asyncio.timeout(_SECONDS):
            await server.client.ping()
            with suppress(NoPermissionError):  # the bridge does not ask for it
                about = await server.client.info("server")
            try:
                await _try_rights(server, settings)
            except NoPermissionError as error:
                told = f"{server.place} does not permit all that docs/reference/limits-bridges.md asks for: {error}"
                raise BrokerError(told) from error
            except ResponseError as error:
                raise BrokerError(f"{server.place} takes no writes: {error}") from error
    except (RedisError, OSError, TimeoutError) as error:
        told = str(error) or "no answer in time"
        raise BrokerUnavailable(f"cannot reach {server.place}: {told}") from error
    finally:
        await server.close()
    return f"{version_of({name.encode(): str(value).encode() for name, value in about.items()})} at {server.place}"


async def _try_rights(server: "BullmqRedis", settings: "BullmqSettings") -> None:
    """By what leaves nothing behind. Of the queues those that are named: others may be forbidden on purpose. Raises
    what redis-py does, with the keys that it is about."""
    from redis.exceptions import NoPermissionError

    keys = ["oraculo:*"]
    try:
        await server.try_to_write()
        for queue in filter(None, (settings.entry, *settings.queues)):
            keys.append(f"{settings.prefix}:{queue}:*")
            await _try_queue(server.client, f"{settings.prefix}:{queue}", is_heard=not settings.legacy)
    except NoPermissionError as error:
        raise NoPermissionError(f"{keys[-1]}: {error}") from error


async def _try_queue(client: Any, key: str, *, is_heard: bool) -> None:
    from redis.exceptions import NoPermissionError, ResponseError

    script = client.register_script("return redis.call('ZADD', KEYS[1], 'XX', 0, 'x')")
    try:
        await script(keys=[f"{key}:delayed"])
        if is_heard:
            await client.xreadgroup("oraculo-doctor", "x", {f"{key}:events": ">"}, count=1)
    except NoPermissionError:
        raise
    except ResponseError as error:
        if not any(sign in str(error) for sign in ("NOGROUP", "WRONGTYPE")):  # there is no such group, or no queue
            raise
