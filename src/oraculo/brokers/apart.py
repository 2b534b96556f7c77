"""Publishing message by message, after a broker refused a whole call because of one of them."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from oraculo.errors import BrokerError, BrokerUnavailable
from oraculo.ports.broker import Receipt

Item = TypeVar("Item")


async def published_apart_if_refused(
    publish: Callable[[Sequence[Item]], Awaitable[Sequence[Receipt]]], items: Sequence[Item]
) -> Sequence[Receipt]:
    """Publish all together.

    If the broker refuses that, publish each alone, so that one refusal does not hold up the others.
    """
    try:
        return await publish(items)
    except BrokerUnavailable:
        raise
    except BrokerError as error:
        if len(items) == 1:
            return [Receipt(error=error)]
    receipts: list[Receipt] = []
    for item in items:
        try:
            receipts += await publish([item])
        except BrokerUnavailable as error:
            return [*receipts, *[Receipt(error=error)] * (len(items) - len(receipts))]
        except BrokerError as error:
            receipts.append(Receipt(error=error))
    return receipts
