"""Tells every record to every subscriber, and keeps their failures away from the engine."""

import logging

from oraculo.ports.telemetry import Record, Subscriber

_log = logging.getLogger(__name__)


class Hub:
    """A `ports.telemetry.Telemetry`."""

    def __init__(self, *subscribers: Subscriber) -> None:
        self._subscribers = subscribers
        self._failed: set[int] = set()  # which subscribers, by position, were complained about

    def emit(self, record: Record) -> None:
        for number, subscriber in enumerate(self._subscribers):
            try:
                subscriber(record)
            except Exception:  # noqa: BLE001 - whatever it is, a listener must not hurt the work
                self._complain_once(number, record)

    def _complain_once(self, number: int, record: Record) -> None:
        """Once, because what fails for one record fails for thousands a second."""
        if number not in self._failed:
            self._failed.add(number)
            _log.exception(
                "telemetry subscriber %r failed on %s; later failures of it are not told",
                self._subscribers[number],
                type(record).__name__,
            )
