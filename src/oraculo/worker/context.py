"""`Context`: what a handler knows about its command, and how it reports progress."""

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
    """The command behind a call of a handler, and the way to report progress.

    A handler that takes `(payload, ctx)` gets one. To call a handler in a test, make one yourself:
    `Context(correlation_id="test", queue="escavador_blog")`.

    Attributes:
        correlation_id (str): The id of the run.
        queue (str): The queue that the command came from.
        tarefa (str | None): The id of the task within the run.
        tentativa (int | None): The number of this attempt, from 1.
        traceparent (str | None): The W3C trace context that came with the command.
    """

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
        """The time after which the answer is late, or None."""
        return None if self._deadline is None else datetime.fromtimestamp(self._deadline, UTC)

    def remaining(self) -> float | None:
        """Return the seconds until the deadline, never below 0, or None when there is no deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock.now())

    @cached_property
    def log(self) -> FilteringBoundLogger:
        """A logger that names the command in every line."""
        logger: FilteringBoundLogger = structlog.get_logger("oraculo.worker")
        return logger.bind(
            correlation_id=self.correlation_id, tarefa=self.tarefa, tentativa=self.tentativa, fila=self.queue
        )

    def progress(self, percent: float, message: str = "") -> None:
        """Report how far the work is, from 0 to 100.

        Call it as often as you like, from `async` and plain handlers alike; there is nothing to await. The newest
        state is published a few times a second, and once more before the answer. While the broker is away, progress
        is dropped. Progress also shows that the handler is alive: it renews the lease of the command.

        Raises:
            TypeError: if the message is not a string.
        """
        if not isinstance(message, str):
            raise TypeError(f"the message of progress() must be a str, as 'half done'; got {type(message).__name__}")
        self._latest = (min(100.0, max(0.0, float(percent))), message[:MAX_PROGRESS_TEXT])
        if not self._has_news:
            self._has_news = True
            self._announce()

    @property
    def has_news(self) -> bool:
        """True while some progress is not published yet."""
        return self._has_news

    def take_news(self) -> tuple[float, str]:
        """Return the newest progress, and count it as published."""
        # The flag goes down before the state is read: a thread that writes in between announces itself again.
        self._has_news = False
        return self._latest
