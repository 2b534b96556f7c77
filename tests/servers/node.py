"""Node.js, which is expected of the machine: it is not installed from here."""

import os
import shutil

import pytest

from tests.servers.fleet import Fleet


def expect_node(fleet: Fleet) -> None:
    if "node" in os.environ.get("ORACULO_TEST_SKIP", "").split(","):
        fleet.skipped["node"] = "left out by ORACULO_TEST_SKIP"
        pytest.skip(f"node: {fleet.skipped['node']}")
    if missing := [name for name in ("node", "npm") if shutil.which(name) is None]:
        told = f"{' and '.join(missing)} cannot be found: install Node.js 18 or newer, with npm"
        pytest.fail(f"{told}; ORACULO_TEST_SKIP=node goes without it.", pytrace=False)
