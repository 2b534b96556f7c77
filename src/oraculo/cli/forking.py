"""What a signal means to a process that a handler forks, as `multiprocessing` does: what it would mean without us.

Such a child is a copy of this process. With our handlers it would take a SIGTERM for the wish to stop what it has not,
and go on; and it would wake the event loop of this process, whose descriptor it shares. A child that runs another
program instead, as those of `subprocess`, needs none of this.
"""

import functools
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_before_us: dict[signal.Signals, Any] = {}  # what handled each signal; empty while we handle none
_forking = threading.local()


@contextmanager
def children_spared(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Entered before we handle `signals`: a child that is forked until the end has their handlers of now."""
    _look_after_forks()
    _before_us.update({sig: signal.getsignal(sig) for sig in signals})
    try:
        yield
    finally:
        _before_us.clear()


@functools.cache
def _look_after_forks() -> None:
    """Once: what is registered stays for as long as the process lives."""
    if hasattr(os, "register_at_fork"):  # Windows has no forks
        os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_in, after_in_child=_give_signals_back)


def _hold_signals() -> None:
    # A child may be told to end as soon as it is there; our handlers would swallow that.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _before_us)


def _let_signals_in() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _give_signals_back() -> None:
    if _before_us:
        signal.set_wakeup_fd(-1)
        for sig, handler in _before_us.items():
            signal.signal(sig, handler)
        _before_us.clear()  # what the child makes of its signals is for its own children
    _let_signals_in()
