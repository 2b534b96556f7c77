"""What is wrong with each part that an engine needs, in words for people and for `/health/ready`."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from oraculo.engine.reading import OwnQueues
from oraculo.errors import OraculoError
from oraculo.ports.broker import Broker, Link, QueueState

_PATIENCE = 5.0
_MOMENT = 0.2  # for which messages may wait, or nobody listen, where all is well


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


def reading_trouble(queues: OwnQueues) -> str | None:
    if not (missing := queues.without_consumer):
        return None
    return f"nobody reads {', '.join(missing)}: a consumer is being made{_last_failure(queues.unread.values())}"


async def unheard_answers(broker: Broker, queue: str) -> str | None:
    """Of an API beside engines: where answers come to `queue` and nobody hears them. Engines that use another queue or
    another broker give their signs of life in the store all the same."""
    try:
        if not (before := await _silences(broker, queue)):
            return None
        await asyncio.sleep(_MOMENT)
        now = await _silences(broker, queue)
    except (OraculoError, TimeoutError):  # which is told as the broker's own trouble
        return None
    if not (both := [silence for place, silence in now.items() if place in before]):
        return None
    return f"{'; '.join(both)}: see whether the engines have the same ORACULO_BROKER_URL and ORACULO_BROKER_PREFIX"


async def _silences(broker: Broker, queue: str) -> dict[str, str]:
    """By each of several brokers that works, or by the queue alone."""
    async with asyncio.timeout(_PATIENCE):
        states = await broker.queues([queue])
    at = {f"{queue} at broker {name}": part for state in states for name, part in state.at.items()}
    at = at or {state.queue: state for state in states}
    found = {place: _silence(place, state) for place, state in at.items()}
    return {place: silence for place, silence in found.items() if silence is not None}


def _silence(place: str, state: QueueState) -> str | None:
    waiting, them = ("1 message waits", "it") if state.ready == 1 else (f"{state.ready} messages wait", "them")
    if state.consumers == 0:
        there = f", and {waiting} there" if state.ready else ""
        return f"nobody listens on queue {place}, where answers come{there}"
    if state.consumers is None and state.ready and state.unacked == 0:
        return f"{waiting} in queue {place}, where answers come, and nobody seems to take {them}"
    return None


def _link_trouble(link: Link) -> str | None:
    if link.trouble is None and link.deaf:
        failure = _last_failure(why for _, why in link.unread)
        return f"heard nothing on {', '.join(link.deaf)}: the consumer is being made again{failure}"
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
