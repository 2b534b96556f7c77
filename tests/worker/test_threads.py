import threading
from concurrent.futures import wait

import pytest

from oraculo.worker.threads import DaemonThreads


def test_results_and_errors_come_back() -> None:
    threads = DaemonThreads(2, "t")
    assert threads.submit(divmod, 7, 2).result(5) == (3, 1)
    with pytest.raises(SystemExit):
        threads.submit(exit).result(5)
    assert threads.submit(int, "ff", base=16).result(5) == 255
    threads.shutdown()


def test_threads_are_daemons_started_as_needed_up_to_the_limit() -> None:
    threads, go_on, begun = DaemonThreads(2, "t"), threading.Event(), threading.Semaphore(0)
    seen: set[threading.Thread] = set()

    def work() -> None:
        seen.add(threading.current_thread())
        begun.release()
        go_on.wait(5)

    calls = [threads.submit(work) for _ in range(4)]
    assert begun.acquire(timeout=5)
    assert begun.acquire(timeout=5)
    assert not begun.acquire(timeout=0.05), "two are the limit"
    go_on.set()
    assert not wait(calls, 5).not_done
    assert len(seen) == 2
    assert all(thread.daemon for thread in seen)
    threads.shutdown()
    assert not any(thread.is_alive() for thread in seen)


def test_one_that_is_idle_is_used_again() -> None:
    threads = DaemonThreads(10, "t")
    names: set[str] = set()
    for _ in range(20):
        threads.submit(lambda: names.add(threading.current_thread().name)).result(5)
    assert len(names) <= 2
    threads.shutdown()


def test_after_the_shutdown_nothing_begins() -> None:
    threads, begun, go_on = DaemonThreads(1, "t"), threading.Event(), threading.Event()
    threads.submit(lambda: begun.set() or go_on.wait(5))
    waiting = threads.submit(int)
    assert begun.wait(5)
    threads.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    with pytest.raises(RuntimeError):
        threads.submit(int)
    go_on.set()
    threads.shutdown()
