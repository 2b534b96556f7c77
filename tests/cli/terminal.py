"""A real terminal of 80 columns for the command line: what it shows, and the keys that a user presses."""

import fcntl
import os
import pty
import re
import signal
import struct
import termios
import threading
from pathlib import Path

from tests.cli.processes import environment, until
from tests.servers.prepared import Oraculo

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")
COLUMNS = 80


class Terminal:
    """One command on a terminal of its own. Use it as a context manager."""

    def __init__(self, *args: str, cwd: Path, url: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
        self._shown = ""
        self._popen = Oraculo(
            args,
            cwd=cwd,
            env=environment(ORACULO_URL=url, TERM="xterm", TZ="UTC"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                some = os.read(self._ours, 65536)
            except OSError:  # the other side was closed
                return
            if not some:
                return
            self._shown += some.decode(errors="replace")

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait(timeout=30)
        self._reader.join(timeout=5)
        os.close(self._ours)

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self._shown).replace("\r", "")

    def says(self, text: str) -> None:
        until(lambda: text in self.text, saying=f"{text!r} on the terminal, which shows {self.text!r}")

    def types(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._popen.send_signal(signal.SIGINT)

    def ends(self) -> int:
        code = self._popen.wait(timeout=30)
        self._reader.join(timeout=5)
        return code


def shown(*args: str, cwd: Path, url: str) -> list[str]:
    """Return the lines that a command which succeeds leaves on the terminal."""
    with Terminal(*args, cwd=cwd, url=url) as terminal:
        assert terminal.ends() == 0, terminal.text
        return terminal.text.splitlines()
