"""Whether the systems behind the bridges can be used: each is asked once, in the way of its bridge."""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from oraculo.errors import BrokerError, BrokerUnavailable

if TYPE_CHECKING:
    from oraculo.bridges.bullmq.server import BullmqRedis
    from oraculo.settings import BullmqSettings, CelerySettings

_SECONDS = 6.0


async def reach_celery(settings: "CelerySettings", prefix: str) -> str:
    """`prefix`: of our queues."""
    from oraculo.bridges.celery.check import check_celery

    return await asyncio.to_thread(check_celery, settings, prefix, _SECONDS)


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
