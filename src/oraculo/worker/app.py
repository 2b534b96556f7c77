"""`App`: which function answers which queue."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from oraculo.errors import Conflict, InvalidInput
from oraculo.wire import naming
from oraculo.worker.handlers import Handler, inspect_handler

Function = TypeVar("Function", bound=Callable[..., Any])


class App:
    """The handlers of one worker process, by queue. A `Worker` runs it; by itself it does nothing.

    Each decorator returns the function as it was, so that it stays callable and typed. A handler takes
    `(payload)` or `(payload, ctx)`, is `async` or plain (plain ones run in threads), and what it returns becomes the
    answer. Parameters with defaults are left alone, but for one named `ctx` or annotated as a `Context`. `concurrency`
    bounds how many commands of that queue are worked on at once.

    A handler that is not done a second after its command's deadline is given up: the run is told `deadline passed`, an
    async handler is cancelled, and a plain one, which cannot be, runs on beside the next without being counted.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._handlers: dict[str, Handler] = {}

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return MappingProxyType(self._handlers)

    def escavador(self, name: str, *, concurrency: int | None = None) -> Callable[[Function], Function]:
        """A collector: `youtube` and `escavador_youtube` both mean the queue `escavador_youtube`."""
        return self.queue(naming.with_kind(naming.COLLECTOR_PREFIX, name), concurrency=concurrency)

    def executador(self, name: str, *, concurrency: int | None = None) -> Callable[[Function], Function]:
        """A processor: `relatorio` and `executador_relatorio` both mean the queue `executador_relatorio`."""
        return self.queue(naming.with_kind(naming.PROCESSOR_PREFIX, name), concurrency=concurrency)

    def queue(self, name: str, *, concurrency: int | None = None) -> Callable[[Function], Function]:
        """Any queue, by its own name, as `images-queue`.

        Raises InvalidInput for a name that no destination can have; the decoration itself raises InvalidInput for a
        function that cannot be a handler, and Conflict when the queue has a handler already.
        """
        if fault := naming.queue_fault(name):
            raise InvalidInput.at("queue", fault)
        if concurrency is not None and not _is_count(concurrency):
            raise InvalidInput.at("concurrency", f"must be a whole number, at least 1; got {concurrency!r}")

        def register(function: Function) -> Function:
            self._register(inspect_handler(function, name, concurrency))
            return function

        return register

    def _register(self, handler: Handler) -> None:
        if (present := self._handlers.get(handler.queue)) is not None:
            raise Conflict(
                f"queue '{handler.queue}' is answered by {present.name} already; {handler.name} cannot be too"
            )
        self._handlers[handler.queue] = handler


def _is_count(value: object) -> bool:
    """No annotation keeps a worker's author from `concurrency=cores / 2`, which no broker takes as a prefetch."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
