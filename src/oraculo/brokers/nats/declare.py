"""The streams and consumers of queues are made, or those that others made are looked at: will they do?"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import structlog

from oraculo.brokers.nats.births import Births
from oraculo.brokers.nats.connection import MOST_KNOWN, Connection
from oraculo.brokers.nats.layout import (
    CLOSED,
    consumer_config,
    consumer_fault,
    is_closed,
    loss_in,
    mended_consumer,
    opened,
    stream_config,
    stream_fault,
    stream_of,
)
from oraculo.brokers.nats.replies import UNANSWERED, ApiError
from oraculo.errors import BrokerError
from oraculo.ports.broker import MAY_LOSE
from oraculo.wire.naming import dlq_name, is_dlq, source_name

MAKE_SHARE = 0.6  # of the time of a call, for streams to be made
LOOK_SHARE = 0.4  # of it, for a stream or a consumer to tell of itself
_LOOKS_AT_CLOSED = 10  # before streams that somebody closed to remove them are opened again
_NAME_IN_USE = 10058
_SUBJECT_IN_USE = 10065
_CONSUMER_IN_THE_WAY = 10099

_log = structlog.get_logger("oraculo.brokers.nats")


class Maker:
    """`patience`: seconds that a call may take."""

    def __init__(
        self, births: Births, *, replicas: int, lease: float, leases: Mapping[str, float], patience: float
    ) -> None:
        self._births = births
        self._replicas = replicas
        self._lease = lease
        self._leases = leases
        self._make_patience = patience * MAKE_SHARE
        self._look_patience = patience * LOOK_SHARE
        self._warned_of: set[str] = set()  # streams, made by others, that may lose messages

    async def make(
        self, connection: Connection, sources: Sequence[str], for_replies: Collection[str] = ()
    ) -> dict[str, BrokerError]:
        """Streams for the queues and their quarantines, and a consumer for each queue. Those `for_replies` have no
        quarantine, which would outlive them: their clients delete them as they like. Returns why some could not be
        made; the others are."""
        streams = [*for_replies, *(name for source in sources for name in (source, dlq_name(source)))]
        faults = await self._make_streams(connection, streams, for_replies)
        queues = [queue for queue in (*sources, *for_replies) if queue not in faults]
        faults |= await self.make_consumers(connection, queues)
        ready = [*map(dlq_name, sources), *for_replies]
        connection.note_made(name for name in ready if source_name(name) not in faults)
        return faults

    async def remove(self, connection: Connection, sources: Sequence[str]) -> None:
        """Raises BrokerError for the first that NATS does not let us delete; the others are gone."""
        names = [name for source in sources for name in (source, dlq_name(source))]
        connection.forget_made(names)
        self._births.forget(names)
        calls = ((f"STREAM.DELETE.{stream_of(name)}", None) for name in names)
        answers = await connection.ask_many(calls, self._make_patience)
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, ApiError) and not answer.is_missing:
                raise connection.refusal(answer, f"to delete the stream {stream_of(name)}")

    async def is_removed_unused(self, connection: Connection, source: str) -> bool:
        """Return whether the queue is gone, which it is when nothing is in it and nobody waits at it."""
        names = [source, dlq_name(source)]
        there = await self._unused_streams(connection, names)
        if there is None:
            return False
        clock = asyncio.get_running_loop().time
        until = clock() + self._look_patience / 4  # long before anybody takes it for given up: see `_reopen`
        closed = await self._update(connection, {name: config | CLOSED for name, config in there.items()})
        is_closed_now = not any(isinstance(answer, ApiError) for answer in closed.values())
        if is_closed_now and await self._unused_streams(connection, names) is not None and clock() < until:
            await self.remove(connection, [source])
            return True
        await self._update(connection, there)
        return False

    async def _unused_streams(self, connection: Connection, names: Sequence[str]) -> dict[str, dict[str, Any]] | None:
        """The settings of those streams that are there. None when something is in one of them, or somebody waits at
        one, or nobody can tell."""
        told = await self._streams_there(connection, names)
        looks = ((f"CONSUMER.INFO.{stream_of(name)}.{stream_of(name)}", None) for name in names)
        consumers = await connection.ask_many(looks, self._look_patience)
        for seen in (*told.values(), *consumers):
            if isinstance(seen, ApiError) and not seen.is_missing:
                return None
        there = {name: seen for name, seen in told.items() if isinstance(seen, dict)}
        if any(seen["state"]["messages"] or stream_fault(name, seen["config"]) for name, seen in there.items()):
            return None
        if any(isinstance(seen, dict) and seen["num_waiting"] for seen in consumers):
            return None
        return {name: seen["config"] for name, seen in there.items()}

    async def _update(
        self, connection: Connection, configs: Mapping[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any] | ApiError]:
        """Return what each of the streams, by the names of their queues, says of itself with its new settings."""
        calls = ((f"STREAM.UPDATE.{stream_of(name)}", config) for name, config in configs.items())
        return dict(zip(configs, await connection.ask_many(calls, self._look_patience), strict=True))

    async def _reopen(self, connection: Connection, names: Sequence[str]) -> dict[str, dict[str, Any] | ApiError]:
        """Return what closed streams say of themselves, after those that nobody removes any more were opened again.

        A message that came into an open stream before its removal ends would be lost. So the removal has its time
        first: a stream that is still there, and closed, belongs to one that was killed or cut off half way.
        """
        told, closed = dict[str, dict[str, Any] | ApiError](), dict[str, dict[str, Any]]()
        for _ in range(_LOOKS_AT_CLOSED):
            await asyncio.sleep(self._look_patience / _LOOKS_AT_CLOSED)
            told = await self._streams_there(connection, names)
            if not (closed := _closed_among(told)):
                break
        return told | await self._update(connection, {name: opened(config) for name, config in closed.items()})

    async def _make_streams(
        self, connection: Connection, names: Sequence[str], for_replies: Collection[str]
    ) -> dict[str, BrokerError]:
        """They are looked for first: one that is to be made is compared with all that the server has, also when it is
        there already, and with thousands of streams that takes ten times as long."""
        told = await self._streams_there(connection, names)
        if closed := _closed_among(told):
            told |= await self._reopen(connection, list(closed))
        missing = [name for name, seen in told.items() if isinstance(seen, ApiError) and seen is not UNANSWERED]
        calls = ((f"STREAM.CREATE.{stream_of(name)}", stream_config(name, self._replicas)) for name in missing)
        made = dict(zip(missing, await connection.ask_many(calls, self._make_patience), strict=True))
        taken = [name for name, seen in made.items() if isinstance(seen, ApiError) and seen.err_code == _NAME_IN_USE]
        told |= made | await self._streams_there(connection, taken)  # somebody was quicker, and made it otherwise
        faults = {
            source_name(name): fault
            for name, seen in told.items()
            if not (is_dlq(name) and seen is UNANSWERED)  # a queue does its work while its quarantine has no leader
            and (fault := _stream_fault(connection, name, seen))
        }
        ours = {name: seen for name, seen in told.items() if isinstance(seen, dict) and source_name(name) not in faults}
        reborn = [
            name
            for name, seen in ours.items()
            if name not in for_replies and self._births.is_reborn(name, seen["created"])
        ]
        self._warn_of_losses({name: seen["config"] for name, seen in ours.items() if name not in for_replies})
        connection.note_working(reborn)
        self._births.losses += bool(reborn)
        return faults

    def _warn_of_losses(self, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Once for each. What its client reads there, or not, is the client's own."""
        for queue, config in configs.items():
            if queue not in self._warned_of and (why := loss_in(config)):
                if len(self._warned_of) >= MOST_KNOWN:
                    self._warned_of.clear()
                self._warned_of.add(queue)
                _log.warning(MAY_LOSE, queue=queue, reason=f"its stream {why}")

    async def _streams_there(
        self, connection: Connection, names: Sequence[str]
    ) -> dict[str, dict[str, Any] | ApiError]:
        """What each tells of itself."""
        calls = ((f"STREAM.INFO.{stream_of(name)}", None) for name in names)
        looks = await connection.ask_many(calls, self._look_patience)
        return dict(zip(names, looks, strict=True))

    async def make_consumers(self, connection: Connection, queues: Sequence[str]) -> dict[str, BrokerError]:
        """Returns why some could not be made."""
        looks = ((f"CONSUMER.INFO.{stream}.{stream}", None) for stream in map(stream_of, queues))
        found = await connection.ask_many(looks, self._look_patience)
        faults: dict[str, BrokerError] = {}
        wanted: dict[str, dict[str, Any]] = {}
        for queue, told in zip(queues, found, strict=True):
            try:
                config = self._wanted_consumer(connection, queue, told)
            except BrokerError as error:
                faults[queue] = error
            else:
                wanted |= {} if config is None else {queue: config}
        calls = (
            (f"CONSUMER.CREATE.{stream}.{stream}", {"stream_name": stream, "config": config})
            for stream, config in ((stream_of(queue), config) for queue, config in wanted.items())
        )
        answers = await connection.ask_many(calls, self._look_patience)
        for queue, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, ApiError):
                faults[queue] = connection.refusal(answer, f"to make the consumer of {queue}", _needed(queue, answer))
        return faults

    def lease_of(self, queue: str) -> float:
        return self._leases.get(queue, self._lease)

    def _wanted_consumer(
        self, connection: Connection, queue: str, found: dict[str, Any] | ApiError
    ) -> dict[str, Any] | None:
        """What has to be made or changed; None when all is well."""
        if isinstance(found, ApiError):
            if not found.is_missing:
                raise connection.refusal(found, f"to tell of the consumer of {queue}")
            return consumer_config(queue, self.lease_of(queue))
        config = found["config"]
        if fault := consumer_fault(queue, config):
            raise BrokerError(f"the consumer {stream_of(queue)} at {connection.place} cannot serve: it {fault}")
        mended = mended_consumer(config, self.lease_of(queue))
        return None if mended == config else mended


def _closed_among(told: Mapping[str, dict[str, Any] | ApiError]) -> dict[str, dict[str, Any]]:
    """Return the settings of those streams that somebody closed to remove them."""
    there = {name: seen["config"] for name, seen in told.items() if isinstance(seen, dict)}
    return {name: config for name, config in there.items() if is_closed(config)}


def _needed(queue: str, error: ApiError) -> str:
    """What NATS does not say where something else is in the way."""
    stream = stream_of(queue)
    if error.err_code == _SUBJECT_IN_USE:
        right = f"a stream {stream} with that one subject, which no other stream has"
        return f"; the queue {queue} needs {right}: delete the other, or take the subject from it"
    if error.err_code == _CONSUMER_IN_THE_WAY:
        right = f"one durable consumer, with the name {stream} and no filter"
        return f"; the queue {queue} needs {right}: delete the others of its stream"
    return ""


def _stream_fault(connection: Connection, queue: str, seen: dict[str, Any] | ApiError) -> BrokerError | None:
    """Why there is no stream that could be the queue, not even one that others made."""
    stream = stream_of(queue)
    if isinstance(seen, ApiError):
        return connection.refusal(seen, f"to make the stream {stream}", _needed(queue, seen))
    if fault := stream_fault(queue, seen["config"]):
        return BrokerError(f"the stream {stream} at {connection.place} cannot be the queue {queue}: it {fault}")
    return None
