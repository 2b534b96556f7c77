"""Checks that `oraculo doctor` makes of Celery's broker and BullMQ's Redis."""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from oraculo.errors import BrokerError, BrokerUnavailable

if TYPE_CHECKING:
    from oraculo.bridges.bullmq.server import BullmqRedis
    from oraculo.settings import BullmqSettings, CelerySettings

_SECONDS = 6.0


async def reach_celery(settings: "CelerySettings", prefix: str) -> str:
    """Return the version and place of what answers. `prefix` is that of ORÁCULO's queues. Raises BrokerError."""
    from oraculo.bridges.celery.check import check_celery

    return await asyncio.to_thread(check_celery, settings, prefix, _SECONDS)


async def reach_bullmq(settings: "BullmqSettings", prefix: str) -> str:
    """Return the version and place of what answers. `prefix` is that of ORÁCULO's queues. Raises BrokerError."""
    from redis.exceptions import NoPermissionError, RedisError, ResponseError

    from oraculo.bridges.bullmq.server import BullmqRedis
    from oraculo.clients.redis import version_of

    server, about = BullmqRedis(settings.url, prefix), dict[str, object]()
    try:
        async with asyncio.timeout(_SECONDS):
            await server.client.ping()
            with suppress(NoPermissionError):  # the bridge needs no INFO
                about = await server.client.info("server")
            try:
                await _try_rights(server, settings)
            except NoPermissionError as error:
                missing = f"{server.place} does not permit all that docs/reference/limits-bridges.md asks for: {error}"
                raise BrokerError(missing) from error
            except ResponseError as error:
                raise BrokerError(f"{server.place} takes no writes: {error}") from error
    except (RedisError, OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        raise BrokerUnavailable(f"cannot reach {server.place}: {reason}") from error
    finally:
        await server.close()
    return f"{version_of({name.encode(): str(value).encode() for name, value in about.items()})} at {server.place}"


async def _try_rights(server: "BullmqRedis", settings: "BullmqSettings") -> None:
    """Try every right without leaving anything behind. Raises redis-py's errors; NoPermissionError names the keys.

    Only queues that the settings name are tried: others may be forbidden on purpose.
    """
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
        if not any(sign in str(error) for sign in ("NOGROUP", "WRONGTYPE")):  # no such group or queue
            raise
