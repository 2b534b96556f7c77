"""A real `oraculo` process, and the command line as a user would call it."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from typer.testing import CliRunner

from oraculo.cli.app import app
from tests.servers.prepared import Oraculo

_ADDRESS = re.compile(r"ORÁCULO \S+ at (http://\S+)")

T = TypeVar("T")


def environment(**extra: str) -> dict[str, str]:
    """Ours, without what would steer the command line."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ORACULO_")}
    return clean | {"PYTHONUNBUFFERED": "1"} | extra


def run(
    *args: str, cwd: Path, env: Mapping[str, str] | None = None, stdout: IO[str] | int = subprocess.PIPE
) -> "subprocess.CompletedProcess[str]":
    given = environment(**(env or {}))
    with Oraculo(args, cwd=cwd, env=given, stdout=stdout, stderr=subprocess.PIPE, text=True) as process:
        try:
            written, errors = process.communicate(timeout=60)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, written, errors)


def until(ask: Callable[[], T | None], *, within: float = 30.0, saying: str) -> T:
    deadline = time.monotonic() + within
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"{saying} did not come in {within} s: {answer!r}"
        time.sleep(0.02)
    return answer


class Process:
    """`oraculo dev` or `serve` on a port of its own, with all that it writes kept."""

    def __init__(
        self,
        *args: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        port: int = 0,
        program: Sequence[str] = (),
    ) -> None:
        """`program`: another one than `oraculo`."""
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._popen = (subprocess.Popen if program else Oraculo)(
            [*program, *args, "--port", str(port)],
            cwd=cwd,
            env=environment(**(env or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._readers = [
            threading.Thread(target=self._keep, args=(self._popen.stdout, self.lines), daemon=True),
            threading.Thread(target=self._keep, args=(self._popen.stderr, self.errors), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _keep(stream: Any, lines: list[str]) -> None:
        with stream:
            lines.extend(iter(stream.readline, ""))

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def url(self) -> str:
        return until(self._found_url, saying=f"the address of the server; it wrote {self.errors}")

    def _found_url(self) -> str | None:
        assert self._popen.poll() is None or self.lines, f"it ended: {self.errors}"
        found = _ADDRESS.search("".join(self.lines))
        return found[1] if found else None

    def says(self, text: str) -> None:
        until(lambda: text in "".join([*self.lines, *self.errors]), saying=f"{text!r} on its output")

    def send(self, number: int) -> None:
        self._popen.send_signal(number)

    def wait(self, within: float = 30.0) -> int:
        code = self._popen.wait(timeout=within)
        self._read_to_end()
        return code

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.send(number)
        return self.wait()

    def end(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait(timeout=30)
        self._read_to_end()

    def _read_to_end(self) -> None:
        for reader in self._readers:
            reader.join(timeout=5)


class Cli:
    """The client commands, called in this process against a server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._env = {"ORACULO_URL": url, "ORACULO_API_KEY": ""}

    def __call__(self, *args: str, input: str | None = None, env: Mapping[str, str] | None = None) -> Any:  # noqa: A002
        return CliRunner().invoke(app, list(args), input=input, env={**self._env, **(env or {})})

    def ok(self, *args: str, input: str | None = None) -> str:  # noqa: A002
        result = self(*args, input=input)
        assert result.exit_code == 0, (result.stdout, result.stderr)
        return str(result.stdout)

    def json(self, *args: str) -> Any:
        return json.loads(self.ok(*args, "--json"))

    def submitted(self, *args: str) -> str:
        return str(self.json("submit", *args)["correlation_id"])

    def status(self, run_id: str) -> str:
        return str(self.json("runs", "show", run_id)["status"])

    def ended(self, run_id: str, status: str) -> None:
        until(lambda: self.status(run_id) == status, saying=f"run {run_id} to be {status}")
