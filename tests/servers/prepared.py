"""`oraculo` as a process that starts at once: it is forked from one that has imported the program already.

It is a real process and a child of the test's, with its own folder, environment, output, signals and exit status. Most
of what the tests' processes did was to import the same modules.
"""

import ctypes
import os
import pickle
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

# As the console script does it: `-P` keeps the current folder out of the path.
ORACULO = [sys.executable, "-P", "-c", "from oraculo.cli import main; main()"]
_PROGRAM = Path(__file__).with_name("prepared_program.py")
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of Linux
_AT_THE_START = {"PYTHONIOENCODING", "COVERAGE_PROCESS_CONFIG"}  # what Python heeds only as it starts
_one_at_a_time = threading.Lock()


class Oraculo(subprocess.Popen[Any]):
    """`subprocess.Popen` for the arguments of the command line."""

    def _execute_child(  # type: ignore[override]  # which typeshed does not have
        self,
        args: list[str],
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: dict[str, str] | None,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        *pipes_and_more: Any,
    ) -> None:
        environment = dict(os.environ if env is None else env)
        if sys.platform != "linux" or any(environment.get(name) for name in _AT_THE_START):
            before = (executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            super()._execute_child([*ORACULO, *args], *before, *pipes_and_more)  # type: ignore[misc]
            return
        pipes = pipes_and_more[:6]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        order = {
            "arguments": list(map(str, args)),
            "folder": os.fspath(cwd or os.getcwd()),
            "environment": environment,
            "is_leader": pipes_and_more[11],
        }
        streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = _forked(pickle.dumps(order), streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _forked(order: bytes, streams: list[int]) -> int:
    libc = ctypes.CDLL(None)
    with _one_at_a_time:
        orders, _ = _prepared()
        libc.prctl(_ADOPT_ORPHANS, 1)
        try:
            socket.send_fds(orders, [order], streams)
            pid = int(orders.recv(100))
            assert orders.recv(1) == b"."
            return pid
        finally:
            libc.prctl(_ADOPT_ORPHANS, 0)


@cache
def _prepared() -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """Start the process to fork from. It ends when this one does, and so closes the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-P", str(_PROGRAM), str(theirs.fileno())]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=nothing, stdout=nothing, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours, process
