"""Making the streams and consumers of queues, or checking those that others made."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import structlog

from oraculo.brokers.nats.connection import Connection
from oraculo.brokers.nats.known_queues import MOST_KNOWN
from oraculo.brokers.nats.layout import (
    consumer_config,
    consumer_fault,
    loss_in,
    mended_consumer,
    stream_config,
    stream_fault,
    stream_of,
)
from oraculo.brokers.nats.replies import UNANSWERED, ApiAnswer, ApiError
from oraculo.errors import BrokerError
from oraculo.ports.broker import MAY_LOSE
from oraculo.wire.naming import dlq_name, is_dlq, source_name

_NAME_IN_USE = 10058
_SUBJECT_IN_USE = 10065
_CONSUMER_IN_THE_WAY = 10099

_log = structlog.get_logger("oraculo.brokers.nats")


class QueueMaker:
    """Makes queues. `lease` is the seconds of their consumers; `leases`, of queues that have another."""

    def __init__(self, *, replicas: int, lease: float, leases: Mapping[str, float]) -> None:
        self._replicas = replicas
        self._lease = lease
        self._leases = leases
        self._warned_of: set[str] = set()  # queues whose stream may lose messages

    def lease_of(self, queue: str) -> float:
        return self._leases.get(queue, self._lease)

    async def make(
        self, connection: Connection, sources: Sequence[str], replies: Collection[str] = ()
    ) -> dict[str, BrokerError]:
        """Make queues with their dead letters, and `replies` alone. Return why some could not be made.

        The queue of a client's replies has no dead letters: they would stay behind when the client deletes it.
        """
        names = [*replies, *(name for source in sources for name in (source, dlq_name(source)))]
        streams = await self._make_streams(connection, names)
        faults = {
            source_name(name): fault
            for name, stream in streams.items()
            if not (is_dlq(name) and stream is UNANSWERED)  # a queue works while its dead letters have no leader
            and (fault := _stream_fault(connection, name, stream))
        }
        for name, stream in streams.items():
            if isinstance(stream, dict) and name not in replies:
                self._warn_of_losses(name, stream["config"])
        faults |= await self.make_consumers(connection, [name for name in (*sources, *replies) if name not in faults])
        ready = [*map(dlq_name, sources), *replies]
        connection.queues.note_made(name for name in ready if source_name(name) not in faults)
        return faults

    async def _make_streams(self, connection: Connection, names: Sequence[str]) -> dict[str, ApiAnswer]:
        """Look for the streams first: JetStream compares a new one with all that it has, which takes long."""
        streams = await connection.streams(names)
        calls = {
            name: (f"STREAM.CREATE.{stream_of(name)}", stream_config(name, self._replicas))
            for name, stream in streams.items()
            if isinstance(stream, ApiError) and stream is not UNANSWERED
        }
        made = await connection.ask_each(calls)
        connection.queues.note_working(name for name, stream in made.items() if isinstance(stream, dict))
        raced = [name for name, stream in made.items() if _err_code(stream) == _NAME_IN_USE]
        return streams | made | await connection.streams(raced)

    async def make_consumers(self, connection: Connection, queues: Sequence[str]) -> dict[str, BrokerError]:
        """Make the consumers of queues, or take the traps out of those that others made. Return what went wrong."""
        faults: dict[str, BrokerError] = {}
        wanted: dict[str, dict[str, Any]] = {}
        for queue, consumer in (await connection.consumers(queues)).items():
            if isinstance(consumer, dict):
                config = consumer["config"]
                mended = mended_consumer(config, self.lease_of(queue))
                if fault := consumer_fault(queue, config):
                    place = f"the consumer {stream_of(queue)} at {connection.place}"
                    faults[queue] = BrokerError(f"{place} cannot serve: it {fault}")
                elif mended != config:
                    wanted[queue] = mended
            elif consumer.is_missing:
                wanted[queue] = consumer_config(queue, self.lease_of(queue))
            else:
                faults[queue] = connection.refusal(consumer, f"to show the consumer of {queue}")
        calls = {
            queue: (f"CONSUMER.CREATE.{stream}.{stream}", {"stream_name": stream, "config": config})
            for queue, config in wanted.items()
            if (stream := stream_of(queue))
        }
        for queue, answer in (await connection.ask_each(calls)).items():
            if isinstance(answer, ApiError):
                faults[queue] = connection.refusal(answer, f"to make the consumer of {queue}", _remedy(queue, answer))
        return faults

    def _warn_of_losses(self, queue: str, config: Mapping[str, Any]) -> None:
        if queue not in self._warned_of and (why := loss_in(config)):
            if len(self._warned_of) >= MOST_KNOWN:
                self._warned_of.clear()
            self._warned_of.add(queue)
            _log.warning(MAY_LOSE, queue=queue, reason=f"its stream {why}")


def _err_code(answer: ApiAnswer) -> int:
    return answer.err_code if isinstance(answer, ApiError) else 0


def _stream_fault(connection: Connection, queue: str, seen: ApiAnswer) -> BrokerError | None:
    """Return why there is no stream that could be the queue."""
    stream = stream_of(queue)
    if isinstance(seen, ApiError):
        return connection.refusal(seen, f"to make the stream {stream}", _remedy(queue, seen))
    if fault := stream_fault(queue, seen["config"]):
        return BrokerError(f"the stream {stream} at {connection.place} cannot be the queue {queue}: it {fault}")
    return None


def _remedy(queue: str, error: ApiError) -> str:
    """Return what NATS does not say when something else is in the way of a queue."""
    stream = stream_of(queue)
    if error.err_code == _SUBJECT_IN_USE:
        right = f"a stream {stream} with that one subject, which no other stream has"
        return f"; the queue {queue} needs {right}: delete the other, or take the subject from it"
    if error.err_code == _CONSUMER_IN_THE_WAY:
        right = f"one durable consumer, with the name {stream} and no filter"
        return f"; the queue {queue} needs {right}: delete the others of its stream"
    return ""
