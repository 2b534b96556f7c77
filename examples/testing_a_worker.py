"""Testing your own workers with the whole product around them, in one process and with nothing to start.

Run this file, or copy the function into your tests.
"""

import asyncio

from oraculo.testing.harness import Harness
from worker_app import app


async def test_what_is_collected_is_reported() -> None:
    async with Harness(app) as oraculo:
        aggregate = await oraculo.run(
            {"destinos": ["escavador_youtube"], "payload": {"parametros": {"termo": "gatos"}}}
        )
        assert aggregate["status"] == "concluida"
        assert len(aggregate["resultados"]["escavador_youtube"]["dados"]) == 3

        refused = await oraculo.run({"destinos": ["escavador_youtube"], "payload": {}})
        assert refused["status"] == "erro"
        assert "parametros.termo is missing" in refused["falhas"]["escavador_youtube"]["motivo"]


if __name__ == "__main__":
    asyncio.run(test_what_is_collected_is_reported())
    print("the worker does what it should")
