"""A real browser: Debian's Chromium, without a window, installed when root and missing."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.servers.debian import install, one_at_a_time
from tests.servers.fleet import Fleet
from tests.servers.process import ServerMissing

_SKIP = "ORACULO_TEST_SKIP=chromium goes without it."
_HELP = "install Debian's chromium, or set ORACULO_TEST_SKIP=chromium"


def expect_chromium(fleet: Fleet) -> str:
    """Return the program. Fail the test when it cannot be had, unless it was named as skipped."""
    if "chromium" in os.environ.get("ORACULO_TEST_SKIP", "").split(","):
        fleet.skipped["chromium"] = "left out by ORACULO_TEST_SKIP"
        pytest.skip(f"chromium: {fleet.skipped['chromium']}")
    try:
        return _program()
    except ServerMissing as missing:
        pytest.fail(f"{missing}\nTests need a real chromium; {_SKIP}", pytrace=False)


def _program() -> str:
    with one_at_a_time("chromium"):
        if shutil.which("chromium") is None and os.geteuid() == 0:
            install("chromium", _HELP)
    if (found := shutil.which("chromium")) is None:
        raise ServerMissing(f"no chromium here; {_HELP}")
    return found


def options(profile: Path) -> list[str]:
    return [
        "--headless=new",
        "--no-sandbox",  # which root cannot have
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={profile}",
    ]


@contextmanager
def browsing(program: str, url: str, profile: Path, *, names: dict[str, str]) -> Iterator[None]:
    """Show the page at `url` until the block ends. `names` are hosts that the browser finds at another address."""
    rules = ", ".join(f"MAP {name} {address}" for name, address in names.items())
    command = [program, *options(profile), f"--host-resolver-rules={rules}", url]
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            yield
        finally:
            os.killpg(process.pid, 9)  # its many processes too
            process.wait()
