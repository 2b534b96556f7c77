"""The hub that passes each record to every subscriber, and keeps their failures away from the engine."""

import logging

from oraculo.ports.telemetry import Record, Subscriber

_log = logging.getLogger(__name__)


class Hub:
    """A Telemetry that passes each record on."""

    def __init__(self, *subscribers: Subscriber) -> None:
        self._subscribers = subscribers
        self._failed: set[int] = set()  # positions of subscribers whose failure was logged

    def emit(self, record: Record) -> None:
        for number, subscriber in enumerate(self._subscribers):
            try:
                subscriber(record)
            except Exception:  # noqa: BLE001 - a subscriber must not hurt the work
                self._complain_once(number, record)

    def _complain_once(self, number: int, record: Record) -> None:
        """Log the first failure only: a subscriber that fails once fails thousands of times a second."""
        if number not in self._failed:
            self._failed.add(number)
            _log.exception(
                "telemetry subscriber %r failed on %s; later failures of it are not logged",
                self._subscribers[number],
                type(record).__name__,
            )
