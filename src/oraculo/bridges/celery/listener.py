"""A thread that keeps one connection to Celery's broker."""

import contextlib
import threading
from collections.abc import Callable

import kombu

from oraculo.bridges.celery.connections import HEARTBEAT, CeleryBroker, CeleryUnavailable, SetupTimeout, close
from oraculo.wire.answers import describe

STOP_GRACE = 5.0  # seconds that a stop waits for what is in work
NOT_YET = "Celery's broker has not been reached yet"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # seconds between two attempts to connect


class Listener(threading.Thread):
    """A thread that connects, calls `listen`, and connects again after a pause whenever the connection breaks.

    `listen` calls `ready` once it reads, and `drain` until `stopping`. `report` gets each trouble, in this thread.
    """

    def __init__(
        self,
        name: str,
        celery_broker: CeleryBroker,
        listen: Callable[["Listener", kombu.Connection], None],
        report: Callable[[str], None],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._celery_broker = celery_broker
        self._listen = listen
        self._report = report
        self._stopping = threading.Event()
        self.trouble: str | None = NOT_YET

    def run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            self._was_ready = False
            self._listen_once()
            pause = _FIRST_PAUSE if self._was_ready else min(pause * 2, _LONGEST_PAUSE)
            self._stopping.wait(pause)

    def _listen_once(self) -> None:
        connection = self._celery_broker.connection(heartbeat=HEARTBEAT)
        try:
            with self._celery_broker.faults(connection), SetupTimeout(connection) as self._timeout:
                self._celery_broker.connect(connection)
                self._listen(self, connection)
        except CeleryUnavailable as error:
            self._note(str(error))
        except Exception as error:  # noqa: BLE001 - the thread must outlive any fault
            self._note(f"listening to Celery's broker failed: {describe(error)}")
        finally:
            close(connection)

    def _note(self, trouble: str) -> None:
        self.trouble = trouble
        self._report(trouble)

    def ready(self) -> None:
        self._timeout.cancel()
        self._was_ready = True
        self.trouble = None

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def drain(self, connection: kombu.Connection, timeout: float) -> None:
        """Handle what arrives within `timeout` seconds, and keep the connection alive."""
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=timeout)
        if self._celery_broker.is_amqp:
            connection.heartbeat_check()

    def end(self) -> None:
        self._stopping.set()
