"""The queues in trouble, as brokers, outbox and consumers know them, in words for health, explanations and timeouts."""

from collections.abc import Iterable, Mapping

from oraculo.core.events import Untaken
from oraculo.engine.consumers import EngineConsumers
from oraculo.engine.queues.unheard_answers import UnheardAnswers
from oraculo.engine.send.outbox import Outbox
from oraculo.ports.broker import Broker, BrokerStatus
from oraculo.wire.naming import QueueNames

_UNKNOWN_WHY = "its consumer gets nothing, and is made again"


class QueueTrouble:
    """The one place that collects what is wrong with queues. `unheard`: an API's look at the answers of engines."""

    def __init__(
        self,
        broker: Broker,
        names: QueueNames,
        outbox: Outbox,
        consumers: EngineConsumers,
        unheard: UnheardAnswers | None = None,
    ) -> None:
        self.broker = broker
        self._names = names
        self._outbox = outbox
        self._consumers = consumers
        self._unheard = unheard

    # -- sending ------------------------------------------------------------------------------------------------

    @property
    def no_queue_takes(self) -> str | None:
        """The reason why no queue takes commands now."""
        return self._outbox.trouble

    @property
    def refusing(self) -> Mapping[str, str]:
        """The queues that do not take commands now, and why."""
        return {self._names.logical(queue): why for queue, why in self._outbox.refusing.items()}

    @property
    def stuck(self) -> Mapping[str, str]:
        """The queues that fail on a broker that works, and why."""
        return {self._names.logical(queue): why for status in self.broker.statuses() for queue, why in status.stuck}

    def untaken(self) -> Untaken:
        found: dict[str | None, str] = dict(self.refusing.items())
        return found if self.no_queue_takes is None else found | {None: self.no_queue_takes}

    # -- hearing ------------------------------------------------------------------------------------------------

    @property
    def unheard_answers(self) -> str | None:
        """The reason why an API beside engines believes that they hear no answers."""
        return None if self._unheard is None else self._unheard.trouble

    @property
    def deaf(self) -> str | None:
        """The reason why this engine hears no answers. An API beside engines awaits none."""
        answers = self._names.answers
        if answers not in self._consumers.names:
            return None
        failure, statuses, found = self._consumers.unread.get(answers), self.broker.statuses(), list[str]()
        for status in statuses:
            if status.trouble is None and answers in status.deaf:
                why = dict(status.unread + status.paused).get(answers) or failure or _UNKNOWN_WHY
                found.append(f"of {status.name}: {why}" if len(statuses) > 1 else why)
        return "; ".join(found) or failure

    @property
    def hears_badly(self) -> bool:
        """Return whether a consumer of some broker hears nothing."""
        return any(status.deaf for status in self.broker.statuses())

    @property
    def own_without_consumer(self) -> str | None:
        """The own queues that nobody reads, in words."""
        if not (missing := self._consumers.without_consumer):
            return None
        failures = _last_failure(self._consumers.unread.values())
        return f"nobody reads {', '.join(missing)}: a consumer is being made{failures}"

    def of_brokers(self, broken: str | None) -> dict[str, str | None]:
        """Return what is wrong with each broker. `broken`: why none works."""
        statuses = self.broker.statuses()
        found = {f"broker {status.name}": _status_trouble(status) for status in statuses}
        if len(statuses) == 1 and broken:
            return dict.fromkeys(found, broken)
        return found


def _status_trouble(status: BrokerStatus) -> str | None:
    if status.trouble is None and status.deaf:
        failure = _last_failure(why for _, why in status.unread)
        pauses = "".join(f"; {queue}: {why}" for queue, why in status.paused)
        return f"heard nothing on {', '.join(status.deaf)}: the consumer is being made again{failure}{pauses}"
    return status.trouble


def _last_failure(reasons: Iterable[str]) -> str:
    found = "; ".join(dict.fromkeys(reasons))
    return f"; the last one failed: {found}" if found else ""
