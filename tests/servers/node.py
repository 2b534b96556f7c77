"""Node.js, which is expected of the machine: it is not installed from here."""

import os
import shutil

import pytest

from tests.servers.fleet import Fleet


def expect_node(fleet: Fleet) -> None:
    if "node" in os.environ.get("ORACULO_TEST_SKIP", "").split(","):
        fleet.skipped.add("node")
        pytest.skip("node is named in ORACULO_TEST_SKIP")
    if missing := [name for name in ("node", "npm") if shutil.which(name) is None]:
        told = f"{' and '.join(missing)} cannot be found: install Node.js 18 or newer, with npm"
        pytest.fail(f"{told}; ORACULO_TEST_SKIP=node goes without it.", pytrace=False)
