"""`Context`: what a handler may know of its command, and how it tells of its progress."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property

import structlog
from structlog.typing import FilteringBoundLogger

from oraculo.ports.clock import Clock, SystemClock
from oraculo.wire.answers import MAX_PROGRESS_TEXT


def _nobody_listens() -> None:
    pass


class Context:
    """Handed to a handler that takes `(payload, ctx)`. Make one yourself to call a handler in a test."""

    def __init__(
        self,
        *,
        correlation_id: str,
        queue: str,
        tarefa: str | None = None,
        tentativa: int | None = None,
        deadline: float | None = None,
        traceparent: str | None = None,
        clock: Clock | None = None,
        announce: Callable[[], None] = _nobody_listens,
    ) -> None:
        self.correlation_id = correlation_id
        self.queue = queue
        self.tarefa = tarefa
        self.tentativa = tentativa
        self.traceparent = traceparent
        self._deadline = deadline
        self._clock = clock or SystemClock()
        self._announce = announce
        self._latest: tuple[float, str] = (0.0, "")
        self._has_news = False

    @cached_property
    def deadline(self) -> datetime | None:
        """When the answer is late, and the handler soon given up; None when nobody set a time."""
        return None if self._deadline is None else datetime.fromtimestamp(self._deadline, UTC)

    def remaining(self) -> float | None:
        """Seconds until the deadline, never below 0; None when there is no deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock.now())

    @cached_property
    def log(self) -> FilteringBoundLogger:
        """A logger that names the command in every line."""
        logger: FilteringBoundLogger = structlog.get_logger("oraculo.worker")
        return logger.bind(
            correlation_id=self.correlation_id, tarefa=self.tarefa, tentativa=self.tentativa, fila=self.queue
        )

    def progress(self, percent: float, message: str = "") -> None:
        """Tells how far the work is (0 to 100), and that it is alive: the broker's lease is renewed too.

        A plain call from async and threaded handlers alike: it only notes the newest state and returns, so it may be
        called as often as one likes. The state is published soon after, several times a second at most, in between
        newer states replace older ones; the last is published before the answer. There is nothing to await, and a
        broker that cannot be reached is not the handler's trouble: such progress is dropped. Raises TypeError for a
        message that is no text.
        """
        if not isinstance(message, str):
            raise TypeError(f"the message of progress() must be a str, as 'half done'; got {type(message).__name__}")
        self._latest = (min(100.0, max(0.0, float(percent))), message[:MAX_PROGRESS_TEXT])
        if not self._has_news:
            self._has_news = True
            self._announce()

    @property
    def has_news(self) -> bool:
        """Is there progress that was not published yet?"""
        return self._has_news

    def take_news(self) -> tuple[float, str]:
        # The flag goes down before the state is read: a thread that writes in between announces itself again.
        self._has_news = False
        return self._latest
