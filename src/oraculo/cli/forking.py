"""What a signal means to a process that a handler forks, as `multiprocessing` does.

Such a child is a copy of this process. With our handlers it would take a SIGTERM for the wish to stop what it has not,
and go on; and it would wake the event loop of this process, whose descriptor it shares. So SIGTERM means to it what it
would mean without us. A terminal sends its SIGINT to all of them at once: we finish what is in work, for which we need
the children, so they let it pass. A child that runs another program instead, as those of `subprocess`, needs none of
this.
"""

import functools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_of_children: dict[signal.Signals, Any] = {}  # what handles each signal there; empty while we handle none
_forking = threading.local()


@contextmanager
def children_spared() -> Iterator[None]:
    """Entered before we handle signals; for the children that are forked until the end."""
    _look_after_forks()
    _of_children.update({signal.SIGTERM: signal.getsignal(signal.SIGTERM), signal.SIGINT: _let_pass})
    try:
        yield
    finally:
        _of_children.clear()


def _let_pass(*_: object) -> None:
    """The first, for the second ends us at once. Not SIG_IGN, which a program that the child starts would inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def _look_after_forks() -> None:
    """Once: what is registered stays for as long as the process lives."""
    if hasattr(os, "register_at_fork"):  # Windows has no forks
        os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_in, after_in_child=_give_signals_back)


def _hold_signals() -> None:
    # A child may be told to end as soon as it is there; our handlers would swallow that.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _of_children)


def _let_signals_in() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _give_signals_back() -> None:
    if _of_children:
        signal.set_wakeup_fd(-1)
        for sig, handler in _of_children.items():
            signal.signal(sig, handler)
        _of_children.clear()  # what the child makes of its signals is for its own children
    _let_signals_in()
