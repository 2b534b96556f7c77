"""The seven built-in video pipelines run unchanged on BullMQ, with the example's own five workers and application."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from oraculo.settings import Settings
from tests.bridges.node.processes import NodeProcess, expect_node, installed
from tests.bridges.node.stage import BullStage, bull_settings, working
from tests.servers.fleet import BROKERS, Fleet
from tests.video_pipelines import VIDEO_PIPELINES

EXAMPLE = Path(__file__).parents[2] / "examples" / "bullmq_workers"
QUEUES = ("images-queue", "text-queue", "voiceover-queue", "captions-queue", "video-queue")
COPY = "Compre já! (instagram)"
MADE: dict[str, Any] = {
    "ENHANCED_IMAGES": {"images": [f"6710a2-{n}.png" for n in range(5)]},
    "VIRAL_COPY": {"copy": COPY},
    "VOICE_OVER": {"audio": "voz.mp3", "says": COPY},
    "CAPTIONS": {"captions": [COPY]},
}


_LONG = [pytest.param(name, marks=pytest.mark.long) for name in BROKERS[1:]]


@pytest.fixture(params=[BROKERS[0], *_LONG])
async def settings(request: pytest.FixtureRequest, fleet: Fleet, tmp_path: Path) -> AsyncIterator[Settings]:
    expect_node(fleet)
    entry = "orchestrator-queue"
    settings = bull_settings(fleet.url(request.param), fleet.url("redis"), entry=entry, queues=QUEUES)
    folder = await asyncio.to_thread(installed, EXAMPLE)
    arguments = (settings.bullmq.url, settings.bullmq.prefix)
    async with working(NodeProcess(folder / "workers.mjs", *arguments, log=tmp_path / "workers.log")):
        yield settings


@pytest.mark.timeout(180)
async def test_the_seven_pipelines_run_unchanged(settings: Settings, tmp_path: Path) -> None:
    folder, bullmq = installed(EXAMPLE), settings.bullmq
    async with BullStage(settings):
        apps = {
            name: NodeProcess(folder / "app.mjs", bullmq.url, name, bullmq.prefix, log=tmp_path / f"{name}.log")
            for name in VIDEO_PIPELINES
        }
        for app in apps.values():
            app.start()
        for name, app in apps.items():
            [aggregate] = await app.ended(within=90)
            check(name, aggregate)


def check(name: str, aggregate: dict[str, Any]) -> None:
    steps = VIDEO_PIPELINES[name]
    sources = {step: MADE[step] for step in steps if step != "PROMOTIONAL_VIDEO"}
    made = {**MADE, "PROMOTIONAL_VIDEO": {"video": "promocional.mp4", "from": sources}}
    assert aggregate["status"] == "concluida", aggregate
    assert aggregate["resultados"] == {step: {"status": "ok", "resultado": made[step]} for step in steps}, name
