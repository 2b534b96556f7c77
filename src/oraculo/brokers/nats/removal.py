"""Removing queues."""

from collections.abc import Sequence

from oraculo.brokers.nats.connection import Connection
from oraculo.brokers.nats.layout import stream_of
from oraculo.brokers.nats.replies import ApiError
from oraculo.wire.naming import dlq_name


async def delete(connection: Connection, sources: Sequence[str]) -> None:
    """Delete queues with their dead letters. Raises BrokerError for the first that NATS does not let us delete."""
    names = [name for source in sources for name in (source, dlq_name(source))]
    connection.queues.forget_made(names)
    answers = await connection.ask_each({name: (f"STREAM.DELETE.{stream_of(name)}", None) for name in names})
    for name, answer in answers.items():
        if isinstance(answer, ApiError) and not answer.is_missing:
            raise connection.refusal(answer, f"to delete the stream {stream_of(name)}")
