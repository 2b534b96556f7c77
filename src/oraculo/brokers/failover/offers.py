"""Who takes which messages of one call."""

from collections.abc import Collection, Sequence

from oraculo.brokers.failover.branch import Branch
from oraculo.errors import BrokerError, BrokerUnavailable, MessageTooLarge
from oraculo.ports.broker import NotTaken, Outgoing


class Outcome:
    """What became of the messages of one call, each known by its place among them."""

    def __init__(self, messages: Sequence[Outgoing]) -> None:
        self._messages = messages
        self._vias: list[str | None] = [None] * len(messages)
        self._down: set[int] = set()
        self._told: list[str] = []

    def messages_at(self, places: Sequence[int]) -> list[Outgoing]:
        return [self._messages[place] for place in places]

    def is_for(self, place: int, queues: Collection[str]) -> bool:
        message = self._messages[place]
        return message.reason is None and message.queue in queues

    def took(self, places: Sequence[int], vias: Sequence[str | None]) -> None:
        for place, via in zip(places, vias, strict=True):
            self._vias[place] = via

    def took_some(self, places: Sequence[int], refusal: NotTaken) -> list[int]:
        """Returns those that another broker may take: a limit that its owner set is not gone round."""
        self.took(places, refusal.vias)
        self.refused(refusal)
        left = [places[number] for number in sorted(refusal.down)]
        self._down |= set(left)
        return left

    @property
    def has_any(self) -> bool:
        return any(via is not None for via in self._vias)

    def refused(self, error: BrokerError) -> None:
        self._told.append(str(error))

    def vias(self) -> Sequence[str]:
        """Raises NotTaken when one is missing."""
        vias = [via for via in self._vias if via is not None]
        if len(vias) == len(self._vias):
            return vias
        down = {place for place in self._down if self._vias[place] is None}
        raise NotTaken("; ".join(dict.fromkeys(self._told)), self._vias, down)


class Group:
    """Messages of one call that prefer the same broker, offered to one broker after the other."""

    def __init__(self, outcome: Outcome, places: Sequence[int]) -> None:
        self._outcome = outcome
        self.left = list(places)  # those that another broker may take
        self.was_answered = False  # for each of them, by somebody
        self.refusal: BrokerError | None = None
        self.too_large_for: set[str] = set()  # the brokers that said so
        self.said: dict[str, str] = {}  # by those that could not be reached

    def known_to_be_down_at(self, branch: Branch) -> Collection[int]:
        queues = {queue for queue, _ in branch.link().stuck}
        return {place for place in self.left if self._outcome.is_for(place, queues)} if queues else ()

    async def offer(self, branch: Branch, places: Sequence[int]) -> None:
        if not places:
            return
        try:
            left = await self._offered(branch, places)
        except BrokerUnavailable as error:
            self.said[branch.name] = str(error)
            self._outcome.refused(error)
            return
        except BrokerError as error:
            if len(places) > 1 and not self.was_answered:
                raise  # which of them it does not want will be found out one by one
            if isinstance(error, MessageTooLarge):
                self.too_large_for.add(branch.name)
            if self.refusal is None or isinstance(self.refusal, MessageTooLarge):  # of others it may be mended
                self.refusal = error
            self._outcome.refused(error)
            left = await self._offered_singly(branch, places) if len(places) > 1 else places
        else:
            self.was_answered = True
        gone = set(places).difference(left)
        self.left = [place for place in self.left if place not in gone]

    async def _offered(self, branch: Branch, places: Sequence[int]) -> Sequence[int]:
        """Returns those that it did not take and another may."""
        try:
            self._outcome.took(places, await branch.attempt(branch.broker.publish(self._outcome.messages_at(places))))
        except NotTaken as error:
            return self._outcome.took_some(places, error)
        return ()

    async def _offered_singly(self, branch: Branch, places: Sequence[int]) -> Sequence[int]:
        """One of them it will never take; the others are taken already, or will be."""
        left: list[int] = []
        for number, place in enumerate(places):
            try:
                left += await self._offered(branch, [place])
            except BrokerUnavailable:
                return [*left, *places[number:]]
            except BrokerError as error:
                self._outcome.refused(error)
                left.append(place)
        return left
