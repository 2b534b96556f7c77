"""Many engines, API processes and workers on one store and one broker, each a process that can be killed."""

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from oraculo.bootstrap import make_store
from oraculo.core.run import RunHead
from oraculo.ports.browse import RunQuery
from oraculo.settings import Settings, StoreSettings
from oraculo.testing.checkers import check_store
from tests.end_to_end.cluster import Program
from tests.servers.process import free_port
from tests.waiting import until

_TOGETHER = 25  # requests that are under way at once


class ManyEngines:
    def __init__(
        self, folder: Path, broker: str, store: str, *, engines: int = 3, apis: int = 2, workers: int = 4
    ) -> None:
        self.store_url = store
        environment = os.environ | {
            "ORACULO_BROKER_URL": broker,
            "ORACULO_BROKER_LEASE": "4",
            "ORACULO_STORE_URL": store,
            "ORACULO_PREFIX": f"t{uuid.uuid4().hex[:10]}.",
            "ORACULO_LOG_LEVEL": "warning",
            "ORACULO_LOG_FORMAT": "json",
            "WORK_SECONDS": "0.05",
        }

        def program(name: str, *arguments: str) -> Program:
            return Program(folder / f"{name}.log", environment, *arguments)

        ports = [free_port() for _ in range(apis)]
        self.engine_ports = [free_port() for _ in range(engines)]
        self.engines = [program(f"engine-{n}", "engine", "--port", str(p)) for n, p in enumerate(self.engine_ports)]
        self.apis = [program(f"api-{n}", "api", "--port", str(port)) for n, port in enumerate(ports)]
        self.workers = [program(f"worker-{n}", "worker", "tests.end_to_end.workers:app") for n in range(workers)]
        self.clients = [httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) for port in ports]

    @property
    def _programs(self) -> Iterator[Program]:
        return chain(self.apis, self.engines, self.workers)

    async def __aenter__(self) -> Self:
        for program in self._programs:
            program.start()
        for client, program in zip(self.clients, self.apis, strict=True):
            await until(lambda c=client, p=program: self._is_up(c, p), within=60, saying="an API to answer")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for client in self.clients:
            await client.aclose()
        for program in self._programs:
            if program.is_running:
                program.kill()

    async def _is_up(self, client: httpx2.AsyncClient, program: Program) -> bool:
        program.expect_running()
        with suppress(httpx2.HTTPError):
            return (await client.get("/health")).status_code == 200
        return False

    # -- work -----------------------------------------------------------------------------------------------------

    async def submit(self, count: int, *, first: int = 0, pause: float = 0.0) -> list[str]:
        """So many runs of three tasks, through all APIs in turn, each with a key of its own: one that was not accepted
        is asked for again."""
        clients = cycle(self.clients)
        gate = asyncio.Semaphore(_TOGETHER)

        async def one(n: int, client: httpx2.AsyncClient) -> str:
            async with gate:
                tasks = [{"id": f"t{k}", "fila": "executador_x", "payload": {"n": k}} for k in range(3)]
                body = {"destinos": tasks, "payload": {}, "timeout": 200}
                for _ in range(20):
                    response = await client.post("/orquestracoes", json=body, headers={"Idempotency-Key": f"key-{n}"})
                    if response.status_code != 503:
                        break
                assert response.status_code == 202, response.text
                return str(response.json()["correlation_id"])

        submitting = []
        for n in range(first, first + count):
            submitting.append(asyncio.create_task(one(n, next(clients))))
            await asyncio.sleep(pause)
        return await asyncio.gather(*submitting)

    async def all_ended(self, count: int, *, within: float = 120) -> None:
        async def open_runs() -> bool:
            return self._count(await self.metrics(self.clients[0]), 'oraculo_runs{status="em_execucao"}') == 0

        try:
            await until(open_runs, within=within, saying="the end of every run")
        except AssertionError:
            page = (await self.clients[0].get("/orquestracoes?status=em_execucao&limit=3")).json()
            ids = [run["correlation_id"] for run in page["orquestracoes"]]
            told = [(await self.clients[0].get(f"/orquestracoes/{one}/explicacao")).text for one in ids]
            raise AssertionError("\n".join([*told, *(program.tail() for program in self.engines)])) from None
        ended = await self.metrics(self.clients[0])
        assert self._count(ended, 'oraculo_runs{status="concluida"}') == count

    async def metrics(self, client: httpx2.AsyncClient) -> str:
        return (await client.get("/metrics")).text

    @staticmethod
    def _count(metrics: str, name: str) -> float:
        return next((float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name)), -1.0)

    async def check(self, run_ids: list[str]) -> None:
        """Every run ended well and once, and the store is sound."""
        for program in self._programs:
            if program.is_running:
                program.kill()
        store = make_store(Settings(store=StoreSettings(url=self.store_url)))
        await store.start()
        try:
            heads: list[RunHead] = []
            cursor: str | None = None
            while True:
                page = await store.runs(RunQuery(limit=500, cursor=cursor))
                heads += page.heads
                cursor = page.cursor
                if cursor is None:
                    break
            assert sorted(head.id for head in heads) == sorted(run_ids)
            assert Counter((head.status.value, head.edition) for head in heads) == {("concluida", 1): len(run_ids)}
            assert await check_store(store) == []
        finally:
            await store.close()


async def ready(client: httpx2.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/health/ready")).json()
    return found
