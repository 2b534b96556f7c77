"""Debian's packages: installed when a test needs one that is missing, and the tests run as root."""

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.process import ServerMissing


@contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """The processes of a test run install it once."""
    with (Path(tempfile.gettempdir()) / f"oraculo-{name}-{os.geteuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(package: str, otherwise: str) -> None:
    """Install a package through apt. Raise ServerMissing, with what to do `otherwise`, when it cannot be had."""
    run(["apt-get", "update"], otherwise)
    command = ["apt-get", "install", "-y", "--no-install-recommends", package]
    run(command, otherwise, DEBIAN_FRONTEND="noninteractive")


def run(command: list[str], otherwise: str, cwd: Path | None = None, **environment: str) -> str:
    """Return what it prints. Raise ServerMissing, with what to do `otherwise`, when it fails."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise ServerMissing(f"there is no {command[0]} here; {otherwise}") from None
    if done.returncode != 0:
        raise ServerMissing(f"{' '.join(command[:3])} failed: {(done.stderr or done.stdout)[-500:]}; {otherwise}")
    return done.stdout
