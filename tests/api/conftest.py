from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .service import Service, running


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with running(tmp_path) as service:
        yield service
