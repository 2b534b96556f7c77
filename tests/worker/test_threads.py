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


def let_none_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_a_call_that_no_thread_can_be_started_for_is_left_to_those_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, begun, go_on = DaemonThreads(10, "t"), threading.Event(), threading.Event()
    first = threads.submit(lambda: begun.set() or go_on.wait(5))
    assert begun.wait(5)
    with monkeypatch.context() as limited:
        let_none_start(limited)
        others = [threads.submit(threading.get_ident) for _ in range(3)]
    go_on.set()
    assert first.result(5)
    assert len({other.result(5) for other in others}) == 1
    threads.shutdown()  # hangs when a thread is counted that is not there


def test_a_call_without_any_thread_fails_and_does_not_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, ran = DaemonThreads(10, "t"), list[int]()
    with monkeypatch.context() as limited:
        let_none_start(limited)
        for n in range(3):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                threads.submit(ran.append, n)
    assert threads.submit(divmod, 7, 2).result(5) == (3, 1)
    assert ran == []
    threads.shutdown()
