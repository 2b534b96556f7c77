"""What is wrong with each part that an engine needs, in words for people and for `/health/ready`."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from oraculo.engine.consumers import OwnQueues
from oraculo.errors import OraculoError
from oraculo.ports.broker import Broker, Link

_PATIENCE = 5.0
_UNKNOWN_WHY = "its consumer gets nothing, and is made again"


class Health(NamedTuple):
    parts: dict[str, str | None]  # what is wrong with each; None: nothing
    is_ready: bool  # able to take work; with several brokers one that works is enough


async def broker_health(broker: Broker) -> Health:
    broken = await fault_of(broker.check)
    links = broker.links()
    parts = {f"broker {link.name}": _link_trouble(link) for link in links}
    if len(links) == 1:
        parts[f"broker {links[0].name}"] = broken or _link_trouble(links[0])
    return Health(parts, broken is None and not any(link.deaf for link in links))


def unheard_queue(queue: str, links: Sequence[Link], failure: str | None) -> str | None:
    """Return why nothing is heard on a queue, and of several brokers on which; None: it is heard.

    `failure`: why the last consumer ended."""
    told = []
    for link in links:
        if link.trouble is None and queue in link.deaf:
            why = dict(link.unread + link.paused).get(queue) or failure or _UNKNOWN_WHY
            told.append(f"of {link.name}: {why}" if len(links) > 1 else why)
    return "; ".join(told) or failure


def reading_trouble(queues: OwnQueues) -> str | None:
    if not (missing := queues.without_consumer):
        return None
    return f"nobody reads {', '.join(missing)}: a consumer is being made{_last_failure(queues.unread.values())}"


def _link_trouble(link: Link) -> str | None:
    if link.trouble is None and link.deaf:
        failure = _last_failure(why for _, why in link.unread)
        pauses = "".join(f"; {queue}: {why}" for queue, why in link.paused)
        return f"heard nothing on {', '.join(link.deaf)}: the consumer is being made again{failure}{pauses}"
    return link.trouble


def _last_failure(reasons: Iterable[str]) -> str:
    told = "; ".join(dict.fromkeys(reasons))
    return f"; the last one failed: {told}" if told else ""


async def fault_of(check: Callable[[], Awaitable[object]]) -> str | None:
    try:
        async with asyncio.timeout(_PATIENCE):
            await check()
    except OraculoError as error:
        return str(error) or type(error).__name__
    except TimeoutError:
        return f"no answer in {_PATIENCE:g} s"
    return None
