"""Receipts of `publish`, as tests make and read them."""

from collections.abc import Awaitable, Callable, Sequence

from oraculo.errors import BrokerError, QueueFull
from oraculo.ports.broker import Outgoing, Receipt

NO_ROOM = QueueFull("no room")


def takers(receipts: Sequence[Receipt]) -> list[str | None]:
    """Return the broker that took each message, or None."""
    return [receipt.broker for receipt in receipts]


def reasons(receipts: Sequence[Receipt]) -> str:
    """Return why messages were not taken, each reason once."""
    return "; ".join(dict.fromkeys(str(receipt.error) for receipt in receipts if receipt.error is not None))


async def publish_but(
    publish: Callable[[Sequence[Outgoing]], Awaitable[Sequence[Receipt]]],
    messages: Sequence[Outgoing],
    fault_of: Callable[[Outgoing], BrokerError | None],
) -> list[Receipt]:
    """Publish the messages for which there is no fault, and return a receipt for each message."""
    faults = [fault_of(message) for message in messages]
    taken = [message for message, fault in zip(messages, faults, strict=True) if fault is None]
    receipts = iter(await publish(taken))
    return [next(receipts) if fault is None else Receipt(error=fault) for fault in faults]


def places_down(receipts: Sequence[Receipt]) -> set[int]:
    """Return the places of the messages that another broker may take: no limit of the queue's owner is the reason."""
    errors = enumerate(receipt.error for receipt in receipts)
    return {place for place, error in errors if error is not None and not isinstance(error, QueueFull)}
