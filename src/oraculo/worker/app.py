"""`App`: the handlers of a worker, by queue."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from oraculo.errors import Conflict, InvalidInput
from oraculo.wire import naming
from oraculo.worker.handlers import Handler, inspect_handler

Function = TypeVar("Function", bound=Callable[..., Any])


class App:
    """A set of handlers, each of which serves one queue.

    A decorator connects a function to a queue and returns the function unchanged, so that you can still call it.
    `oraculo worker MODULE:APP` serves an app over a broker; `oraculo dev --app MODULE:APP` does so in one process.

    A handler takes `(payload)` or `(payload, ctx)`. An `async` handler runs on the event loop, a plain one in a thread.
    Other parameters need defaults, and keep them; only `ctx: Context | None = None` is filled, too.

    **Payload.** Annotate it as `dict[str, Any]`, a `msgspec.Struct`, a dataclass or a `TypedDict`. A payload that
    does not fit the type fails the task at once, with a reason that names the field.

    **Answer.** A collector sends the returned value as `{"status": "ok", "dados": value}`, any other handler with
    `resultado` for `dados`. To send another payload, return an `Answer`.

    **Failure.** An exception fails the attempt, and the engine plans the next one. Raise
    `DoNotRetry` if another attempt would fail, too.

    **Deadline.** One second after its command's deadline, a handler is given up and its task fails. An `async`
    handler is cancelled. A thread cannot be cancelled, so a plain handler runs on, but no longer counts.

    **Repeats.** A command that arrives again is answered from memory, not handled again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._handlers: dict[str, Handler] = {}

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers, by the name of their queue."""
        return MappingProxyType(self._handlers)

    def escavador(self, name: str, *, concurrency: int | None = None) -> Callable[[Function], Function]:
        """Serve a collector's queue: `youtube` and `escavador_youtube` both mean `escavador_youtube`.

        `concurrency` limits how many commands of this queue are in work at once. All queues of a worker also share
        `ORACULO_WORKER_CONCURRENCY`.
        """
        return self.queue(naming.with_kind(naming.COLLECTOR_PREFIX, name), concurrency=concurrency)

    def executador(self, name: str, *, concurrency: int | None = None) -> Callable[[Function], Function]:
        """Serve a processor's queue: `relatorio` and `executador_relatorio` both mean `executador_relatorio`.

        `concurrency` works as for `escavador`.
        """
        return self.queue(naming.with_kind(naming.PROCESSOR_PREFIX, name), concurrency=concurrency)

    def queue(self, name: str, *, concurrency: int | None = None) -> Callable[[Function], Function]:
        """Serve a queue of any name, such as `images-queue`. `concurrency` works as for `escavador`.

        Raises:
            InvalidInput: if no queue can have this name, or the function cannot be a handler.
            Conflict: if the queue has a handler already.
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
    # `concurrency=cores / 2` is a float, which no broker accepts as a prefetch.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
