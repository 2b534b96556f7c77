"""A worker loads without the server, and the shipped example works."""

import runpy
import subprocess
import sys
from pathlib import Path

from .stage import Stage

EXAMPLE = Path(__file__).parents[2] / "examples" / "worker_app.py"
SERVER_SIDE = ("fastapi", "starlette", "uvicorn", "sqlite3", "oraculo.engine", "oraculo.stores", "oraculo.api")


def test_importing_the_sdk_loads_no_server() -> None:
    code = f"import sys, oraculo.worker; print([name for name in {SERVER_SIDE} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_the_example_answers(stage: Stage) -> None:
    app = runpy.run_path(str(EXAMPLE))["app"]
    async with stage.worker(app):
        await stage.send("escavador_youtube", {"parametros": {"termo": "gatos"}}, tipo_evento="iniciar_coleta")
        assert (await stage.payload())["dados"][0]["titulo"] == "gatos 1"
        await stage.send("executador_relatorio", {"titulo": "Gatos", "itens": ["a", "b"]})
        told = [await stage.payload()]
        while "resultado" not in told[-1]:
            told.append(await stage.payload())
    assert told[-2] == {"percentual": 100.0, "mensagem": "wrote b"}
    assert told[-1] == {"resultado": "ok", "arquivo": "relatorio-gatos.pdf"}


def test_the_example_runs_by_itself() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True, timeout=30)
    assert "relatorio-gatos.pdf" in done.stdout
