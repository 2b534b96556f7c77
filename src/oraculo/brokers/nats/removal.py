"""Removing queues: at once, or only those that nobody uses.

JetStream cannot look and delete in one step. So an unused stream is closed, looked at once more, and then deleted. A
message that comes meanwhile is refused as if the queue were full, and its sender tries again.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from oraculo.brokers.nats.connection import Connection
from oraculo.brokers.nats.layout import stream_fault, stream_of
from oraculo.brokers.nats.replies import ApiAnswer, ApiError
from oraculo.wire.naming import dlq_name

REMOVAL = 0.5  # seconds from the closing of a stream to its deletion; after that the removal is given up
_REOPENED_AFTER = 1.5  # seconds until a closed stream is opened that somebody was killed over
_LOOK = 0.2  # seconds between the looks at it
_CLOSED = {"discard": "new", "max_bytes": 1}  # settings of a stream that takes nothing more
_OPEN = {"max_bytes": -1}


async def delete(connection: Connection, sources: Sequence[str]) -> None:
    """Delete queues with their dead letters. Raises BrokerError for the first that NATS does not let us delete."""
    names = [name for source in sources for name in (source, dlq_name(source))]
    connection.queues.forget_made(names)
    answers = await connection.ask_each({name: (f"STREAM.DELETE.{stream_of(name)}", None) for name in names})
    for name, answer in answers.items():
        if isinstance(answer, ApiError) and not answer.is_missing:
            raise connection.refusal(answer, f"to delete the stream {stream_of(name)}")


async def delete_unused(connection: Connection, source: str) -> bool:
    """Delete a queue if nothing is in it and nobody waits at it. Return whether it is gone."""
    names = [source, dlq_name(source)]
    unused = await _unused_streams(connection, names)
    if unused is None:
        return False
    clock = asyncio.get_running_loop().time
    until = clock() + REMOVAL
    closed = await _update(connection, {name: config | _CLOSED for name, config in unused.items()})
    is_closed = not any(isinstance(answer, ApiError) for answer in closed.values())
    if is_closed and await _unused_streams(connection, names) is not None and clock() < until:
        await delete(connection, [source])
        return True
    await _update(connection, unused)
    return False


async def reopen_closed(connection: Connection, streams: Mapping[str, ApiAnswer]) -> dict[str, ApiAnswer]:
    """Return what closed streams become: deleted by their removal, or opened again when that was killed half way.

    The removal has its time first. A message that came into an open stream before its deletion would be lost.
    """
    found = dict[str, ApiAnswer]()
    clock = asyncio.get_running_loop().time
    until = clock() + _REOPENED_AFTER
    closed = _closed_among(streams)
    while closed and clock() < until:
        await asyncio.sleep(_LOOK)
        found |= await connection.streams(closed)
        closed = _closed_among(found)
    return found | await _update(connection, {name: config | _OPEN for name, config in closed.items()})


def _closed_among(streams: Mapping[str, ApiAnswer]) -> dict[str, dict[str, Any]]:
    """Return the settings of the closed streams. Nobody else has a use for a queue of one byte."""
    configs = {name: stream["config"] for name, stream in streams.items() if isinstance(stream, dict)}
    return {name: config for name, config in configs.items() if config | _CLOSED == config}


async def _unused_streams(connection: Connection, names: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """Return the settings of the streams that are there. None when one is used, or JetStream does not say so."""
    streams, consumers = await connection.streams(names), await connection.consumers(names)
    for answer in (*streams.values(), *consumers.values()):
        if isinstance(answer, ApiError) and not answer.is_missing:
            return None
    there = {name: stream for name, stream in streams.items() if isinstance(stream, dict)}
    if any(stream["state"]["messages"] or stream_fault(name, stream["config"]) for name, stream in there.items()):
        return None
    if any(isinstance(consumer, dict) and consumer["num_waiting"] for consumer in consumers.values()):
        return None
    return {name: stream["config"] for name, stream in there.items()}


async def _update(connection: Connection, configs: Mapping[str, dict[str, Any]]) -> dict[str, ApiAnswer]:
    return await connection.ask_each(
        {name: (f"STREAM.UPDATE.{stream_of(name)}", config) for name, config in configs.items()}
    )
