"""The routing of one publish: each message is offered to one broker after the other until one takes it."""

from collections import Counter
from collections.abc import Collection, Sequence

from oraculo.brokers.failover.member import Member
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge, QueueFull
from oraculo.ports.broker import Outgoing, Receipt


class Routing:
    """The messages of one publish by their place, and the best receipt of each so far."""

    def __init__(self, messages: Sequence[Outgoing]) -> None:
        self._messages = messages
        self._receipts: list[Receipt | None] = [None] * len(messages)
        self._too_large = Counter[int]()  # place -> how many brokers refused it as too large

    def by_preference(self) -> dict[str | None, list[int]]:
        """Return the places of the messages by the broker that they prefer."""
        groups: dict[str | None, list[int]] = {}
        for place, message in enumerate(self._messages):
            groups.setdefault(message.prefer, []).append(place)
        return groups

    def stuck_at(self, member: Member, places: Sequence[int]) -> Collection[int]:
        """Return the places whose queue is known to be stuck at this broker."""
        queues = {queue for queue, _ in member.status().stuck}
        messages = self._messages
        return {place for place in places if messages[place].reason is None and messages[place].queue in queues}

    async def offer(self, member: Member, places: Sequence[int]) -> list[int]:
        """Publish to one broker. Return the places that another broker may take."""
        if not places:
            return []
        try:
            receipts = await member.attempt(member.broker.publish([self._messages[place] for place in places]))
        except BrokerUnavailable:
            return list(places)
        except BrokerError as error:
            receipts = [Receipt(error=error)] * len(places)
        for place, receipt in zip(places, receipts, strict=True):
            self._too_large[place] += isinstance(receipt.error, MessageTooLarge)
            before = self._receipts[place]
            self._receipts[place] = receipt if before is None else min(before, receipt, key=_rank)
        # Another broker must not get round a limit that the queue's owner set.
        return [
            place
            for place, receipt in zip(places, receipts, strict=True)
            if receipt.error is not None and not isinstance(receipt.error, QueueFull)
        ]

    def receipts(self, brokers: int, none_works: BrokerUnavailable) -> Sequence[Receipt]:
        """Return a receipt for each message. Raises `none_works` when no broker said anything."""
        if not any(self._receipts):
            raise none_works
        return [self._final(place, brokers) or Receipt(error=none_works) for place in range(len(self._receipts))]

    def _final(self, place: int, brokers: int) -> Receipt | None:
        receipt = self._receipts[place]
        if receipt is not None and isinstance(receipt.error, MessageTooLarge) and self._too_large[place] < brokers:
            return Receipt(error=BrokerError(str(receipt.error)))  # brokers that were not reached may take it
        return receipt


def _rank(receipt: Receipt) -> int:
    """Return the order of a receipt: taken, worth a retry, refused for a reason that may end, too large."""
    if receipt.error is None:
        return 0
    if isinstance(receipt.error, BrokerUnavailable):
        return 1 if isinstance(receipt.error, QueueFull) else 2
    return 4 if isinstance(receipt.error, MessageTooLarge) else 3
