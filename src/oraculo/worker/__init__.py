"""The worker SDK: handlers that answer commands, and a client that starts runs.

    from oraculo.worker import App

    app = App("coletores")

    @app.escavador("youtube")
    async def collect(payload: dict[str, Any]) -> list[str]:
        return ["…"]

The SDK loads without the server: no FastAPI, no store, no engine.
"""

from oraculo.worker.answers import Answer, DoNotRetry
from oraculo.worker.app import App
from oraculo.worker.client import Client
from oraculo.worker.context import Context
from oraculo.worker.runner import Worker

__all__ = ["Answer", "App", "Client", "Context", "DoNotRetry", "Worker"]
