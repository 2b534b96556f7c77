"""Threads for plain handlers, which may hang without keeping the process."""

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Call = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads(Executor):
    """An executor of daemon threads, started as needed up to `limit`, and kept.

    The interpreter joins the threads of ThreadPoolExecutor at its end, so a hanging call would keep the process.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._idle = 0  # threads that wait for a call
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Run a call. Raises RuntimeError after `shutdown`, and when no thread exists and none can be started."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads were shut down")
            self._calls.put((future, functools.partial(function, *args, **kwargs)))
            if self._idle:
                self._idle -= 1
            elif len(self._threads) < self._limit:
                self._start_thread()
        return future

    def _start_thread(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        try:
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
        except (RuntimeError, MemoryError):  # at a limit the call is left to the threads that exist
            if not self._threads:
                self._calls.get_nowait()  # the call failed, so no thread may take it
                raise
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        while (call := self._next_call()) is not None:
            _perform(*call)
            del call  # frees what it holds before the next one comes

    def _next_call(self) -> _Call | None:
        with self._lock:
            try:
                return self._calls.get_nowait()
            except queue.Empty:
                self._idle += 1
        return self._calls.get()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End idle threads at once, and busy ones after their call. Idempotent."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                self._cancel_waiting()
            for _ in self._threads:
                self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _cancel_waiting(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None:
                call[0].cancel()


def _perform(future: "Future[Any]", call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - the future carries any error
        future.set_exception(error)
    else:
        future.set_result(result)
