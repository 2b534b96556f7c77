"""A server as a process: started, stopped, killed, frozen and thawed, always on the same port and data."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import IO, Any

PATIENCE = 60.0
_PAUSE = 0.02


class ServerMissing(Exception):
    """It cannot be had on this machine; the text says what to do."""


class Server(ABC):
    """One server with its own folder. `start` after `kill` finds the data of before."""

    name: str
    _process: "subprocess.Popen[bytes] | ProcessElsewhere | None"

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"oraculo-{self.name}-"))
        self._process = None

    def __getstate__(self) -> dict[str, Any]:
        """For another process of the test run, which uses this server too."""
        return {
            name: _given_away(value) if isinstance(value, subprocess.Popen) else value
            for name, value in self.__dict__.items()
        }

    @abstractmethod
    def command(self) -> list[str]: ...

    @property
    @abstractmethod
    def url(self) -> str: ...

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def is_ready(self) -> bool:
        return answers(self.port)

    @property
    def pid(self) -> int:
        """Of the server itself, not of a shell around it."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns once it answers."""
        with (self.folder / "output.log").open("ab") as output:
            self._process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.is_ready():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / "output.log").read_text(errors="replace")[-2000:]
                raise ServerMissing(f"{self.name} did not start:\n{log}")
            time.sleep(_PAUSE)

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def freeze(self) -> None:
        freeze(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """For good: its data is not needed any more, so it is not asked politely."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "Server":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ProcessElsewhere:
    """A process that another one started: what tests need of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        with suppress(OSError):
            if (Path(f"/proc/{self.pid}/stat").read_text()).rpartition(")")[2].split()[0] not in "ZX":
                return None
        return -signal.SIGKILL

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_PAUSE)
        return code


def _given_away(process: "subprocess.Popen[bytes]") -> ProcessElsewhere:
    process.returncode = 0  # another process stops it; without this Popen warns that nobody did
    return ProcessElsewhere(process.pid)


def freeze(pid: int) -> None:
    """Returns once all its threads stand still: the signal alone leaves them time for one more answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE
    while not all(map(_stands_still, Path(f"/proc/{pid}/task").glob("*/stat"))):
        assert time.monotonic() < deadline, f"the process {pid} does not stop"
        time.sleep(0.001)


def _stands_still(stat: Path) -> bool:
    with suppress(OSError):  # a thread that ended
        return stat.read_text().rpartition(")")[2].split()[0] in "TtZX"
    return True


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _ports() -> Iterator[int]:
    """Below those that the system gives to connections, which might take one before its server does; and a range of
    its own for each process of a test run, and of other runs on the same machine."""
    for block in range(40):
        lock = (Path(tempfile.gettempdir()) / f"oraculo-ports-{os.geteuid()}-{block}.lock").open("w")
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _held.append(lock)
            return cycle(range(12_000 + block * 500, 12_000 + block * 500 + 500))
        lock.close()
    raise AssertionError("forty test runs have all the ports")


_held: list[IO[str]] = []  # for as long as this process lives
_next_port = _ports()


def free_port() -> int:
    for port in _next_port:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("cycle() has no end")
