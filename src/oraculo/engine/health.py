"""The health of each part that an engine needs, in words for people and for `/health/ready`."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from oraculo.engine.consumers import EngineConsumers
from oraculo.errors import OraculoError
from oraculo.ports.broker import Broker, BrokerStatus

_PATIENCE = 5.0
_UNKNOWN_WHY = "its consumer gets nothing, and is made again"


class Health(NamedTuple):
    """The faults of all parts."""

    parts: dict[str, str | None]  # what is wrong with each; None: nothing
    is_ready: bool  # able to take work; with several brokers one that works is enough


async def broker_health(broker: Broker) -> Health:
    """Return the health of the brokers."""
    broken = await fault_of(broker.check)
    statuses = broker.statuses()
    parts = {f"broker {status.name}": _status_trouble(status) for status in statuses}
    if len(statuses) == 1:
        parts[f"broker {statuses[0].name}"] = broken or _status_trouble(statuses[0])
    return Health(parts, broken is None and not any(status.deaf for status in statuses))


def unheard_queue(queue: str, statuses: Sequence[BrokerStatus], failure: str | None) -> str | None:
    """Return why no broker brings messages of a queue, or None.

    `failure` is why the last consumer ended.
    """
    told = []
    for status in statuses:
        if status.trouble is None and queue in status.deaf:
            why = dict(status.unread + status.paused).get(queue) or failure or _UNKNOWN_WHY
            told.append(f"of {status.name}: {why}" if len(statuses) > 1 else why)
    return "; ".join(told) or failure


def reading_trouble(queues: EngineConsumers) -> str | None:
    """Return which own queues nobody reads, or None."""
    if not (missing := queues.without_consumer):
        return None
    return f"nobody reads {', '.join(missing)}: a consumer is being made{_last_failure(queues.unread.values())}"


def _status_trouble(status: BrokerStatus) -> str | None:
    if status.trouble is None and status.deaf:
        failure = _last_failure(why for _, why in status.unread)
        pauses = "".join(f"; {queue}: {why}" for queue, why in status.paused)
        return f"heard nothing on {', '.join(status.deaf)}: the consumer is being made again{failure}{pauses}"
    return status.trouble


def _last_failure(reasons: Iterable[str]) -> str:
    told = "; ".join(dict.fromkeys(reasons))
    return f"; the last one failed: {told}" if told else ""


async def fault_of(check: Callable[[], Awaitable[object]]) -> str | None:
    """Return why a check fails, or None."""
    try:
        async with asyncio.timeout(_PATIENCE):
            await check()
    except OraculoError as error:
        return str(error) or type(error).__name__
    except TimeoutError:
        return f"no answer in {_PATIENCE:g} s"
    return None
