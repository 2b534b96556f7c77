"""Signal handling in the processes that a handler forks, as `multiprocessing` does.

A forked child copies our signal handlers and the descriptor that wakes our event loop. With them it would ignore a
SIGTERM, so `Pool` and `Process.terminate` would wait for ever. Ctrl-C in a terminal reaches every process at once. The
children let the first one pass, because the work in progress still needs them.
"""

import functools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_is_serving = False


@contextmanager
def children_spared() -> Iterator[None]:
    """Give the children that are forked inside this block signal handlers of their own."""
    global _is_serving
    _look_after_forks()
    _is_serving = True
    try:
        yield
    finally:
        _is_serving = False


@functools.cache  # a registration cannot be undone
def _look_after_forks() -> None:
    if hasattr(os, "register_at_fork"):  # Windows has no forks
        os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_in, after_in_child=_take_handlers_away)


def _hold_signals() -> None:
    """Hold signals back during the fork: our handlers would swallow a SIGTERM that reaches the child in it."""
    if _is_serving:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _let_signals_in() -> None:
    if _is_serving:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _take_handlers_away() -> None:
    global _is_serving
    if _is_serving:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, _pass_once)
        _let_signals_in()
        _is_serving = False  # the child's own children keep the handlers that the child sets


def _pass_once(*_: object) -> None:
    """Restore Python's handler. SIG_IGN would be inherited by programs that the child starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
