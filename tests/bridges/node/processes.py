"""Runs Node programs with the real npm packages: as processes of their own, or many in one process, the hub."""

import atexit
import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.servers import node
from tests.servers.fleet import Fleet
from tests.waiting import until

HERE = Path(__file__).parent


def expect_node(fleet: Fleet) -> None:
    node.expect_node(fleet)
    installed()  # now: it takes its time, and nothing else must wait for it


@functools.cache
def installed(source: Path = HERE) -> Path:
    """Copy a folder of Node programs, put the packages that it needs beside them, and return the copy."""
    folder = Path(tempfile.mkdtemp(prefix="oraculo-node-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for file in (*source.glob("*.mjs"), *source.glob("*.cjs"), source / "package.json"):
        shutil.copy(file, folder)
    (folder / "node_modules").symlink_to(_packages(source / "package.json"))
    return folder


def _packages(wanted: Path) -> Path:
    """Install the packages once for each content of the file, and keep them for the next session."""
    kept = Path(tempfile.gettempdir()) / f"oraculo-npm-{hashlib.sha256(wanted.read_bytes()).hexdigest()[:16]}"
    if not kept.exists():
        folder = Path(tempfile.mkdtemp(prefix="oraculo-npm-"))
        shutil.copy(wanted, folder)
        node.install_packages(folder)
        with contextlib.suppress(OSError):  # another session was faster
            folder.rename(kept)
    return kept / "node_modules"


class NodeProcess:
    """A process `node SCRIPT ARGUMENT…` that writes into a file. It can start again after a kill."""

    def __init__(self, script: Path, *arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._command = [node.node(), str(script), *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=output, env=self._environment)

    async def ready(self, word: str = "ready") -> None:
        """Start it, and wait until it says that it is ready."""
        before = self.output().count(word)
        self.start()
        await until(lambda: self._says(word, before), within=30, saying=f"{self._command} to be ready")

    def _says(self, word: str, before: int) -> bool:
        assert not self._has_ended(), f"it ended:\n{self.output()[-3000:]}"
        return self.output().count(word) > before

    def _has_ended(self) -> bool:
        """Return whether it ended by itself; a failure is shown."""
        assert self._process is not None
        return self._process.poll() is not None

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def lines(self) -> list[dict[str, Any]]:
        """Return the whole lines of JSON that it has written."""
        whole = self.output().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in whole if line.startswith("{")]

    def kill(self) -> None:
        """Kill it with kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    async def ended(self, within: float = 60) -> list[dict[str, Any]]:
        """Wait until it ends by itself, and return what it wrote."""
        try:
            await until(self._has_ended, within=within, saying=f"the end of {self._command}")
        except AssertionError:
            self.kill()  # else it would knock at the port of the next test's server for ever
            raise
        assert self._code() == 0, self.output()[-3000:]
        return self.lines()

    def _code(self) -> int | None:
        return None if self._process is None else self._process.returncode


class HubProgram(NodeProcess):
    """A program in the hub: the packages take a second to load, and are loaded once for all tests."""

    def __init__(self, script: str, *arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(Path(script), *arguments, log=log, environment=environment)
        self._request = {"script": script, "arguments": arguments, "environment": environment or {}, "log": str(log)}
        self._number: int | None = None

    def start(self) -> None:
        self._number = next(_numbers)
        _hub().send({"n": self._number, **self._request})

    def _has_ended(self) -> bool:
        _hub().expect_running()
        return self.output().endswith("\nended\n")

    def _code(self) -> int | None:
        self.kill()
        return 0

    def kill(self) -> None:
        """Disconnect it at once, whatever it does. Its process lives on."""
        if self._number is not None:
            _hub().send({"n": self._number})
            self._number = None


class _Hub:
    def __init__(self) -> None:
        folder = installed()
        self._log = folder / "hub.log"
        with self._log.open("ab") as output:
            command = [node.node(), str(folder / "hub.mjs")]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, text=True)
        atexit.register(self._process.kill)

    def send(self, request: Mapping[str, Any]) -> None:
        self.expect_running()
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def expect_running(self) -> None:
        assert self._process.poll() is None, f"the hub ended:\n{self._log.read_text()[-3000:]}"


_hub = functools.cache(_Hub)
_numbers = itertools.count()
