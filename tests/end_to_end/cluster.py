"""`oraculo serve` and `oraculo worker` as real processes on a real broker, to be killed and started again."""

import asyncio
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from oraculo.stores.sqlite import SqliteStore
from oraculo.testing.checkers import check_store
from tests.servers.prepared import Oraculo
from tests.servers.process import free_port
from tests.waiting import until

ROOT = Path(__file__).parents[2]


FEW_HELD = {"WORK_HELD_FROM": "995"}  # of a thousand tasks: a worker does sixteen at a time


class Program:
    """One process that can be started again and again."""

    def __init__(self, log: Path, environment: dict[str, str], *arguments: str) -> None:
        self.log = log
        self._environment = environment
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = Oraculo(self._arguments, cwd=ROOT, env=self._environment, stdout=log, stderr=log)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        code = self._process.wait(60)
        self._process = None
        return code

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def expect_running(self) -> None:
        assert self.is_running, f"it ended:\n{self.tail()}"


class Cluster:
    """An engine with its API, and `workers` worker processes, over the brokers at `url`. `is_held`: the last tasks of a
    run wait for `check`, so that the run is not over before something has happened to it."""

    def __init__(self, folder: Path, url: str, *, workers: int = 1, is_held: bool = False, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.database = folder / "oraculo.db"
        self.prefix = f"t{uuid.uuid4().hex[:10]}."
        self._held = folder / "held"
        if is_held:
            self._held.touch()
        shared = os.environ | {
            "ORACULO_BROKER_URL": url,
            "ORACULO_BROKER_LEASE": "4",
            "ORACULO_STORE_URL": f"sqlite:///{self.database}",
            "ORACULO_PREFIX": self.prefix,
            "ORACULO_LOG_LEVEL": "warning",
            "WORK_HELD": str(self._held),
            **environment,
        }
        self.engine = Program(folder / "engine.log", shared, "serve", "--port", str(self.port))
        self.workers = [
            Program(folder / f"worker-{n}.log", shared, "worker", "tests.end_to_end.workers:app")
            for n in range(workers)
        ]
        self.client = httpx2.AsyncClient(base_url=self.url, timeout=20)

    async def __aenter__(self) -> Self:
        for program in (self.engine, *self.workers):
            program.start()
        await self.answers()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.client.aclose()
        for program in (self.engine, *self.workers):
            if program.is_running:
                program.kill() if kind is not None else program.stop()

    async def answers(self) -> None:
        """The engine takes requests."""

        async def alive() -> bool:
            self.engine.expect_running()
            try:
                return (await self.client.get("/health")).status_code == 200
            except httpx2.HTTPError:
                return False

        await until(alive, within=30, saying="the engine to answer")

    async def submit(self, tasks: int, **request: Any) -> str:
        destinations = [{"id": f"t{n}", "fila": "executador_x", "payload": {"n": n}} for n in range(tasks)]
        body = {"destinos": destinations, "payload": {}, "timeout": 200, **request}
        response = await self.client.post("/orquestracoes", json=body)
        assert response.status_code == 202, response.text
        return str(response.json()["correlation_id"])

    async def summary(self, run_id: str) -> dict[str, Any]:
        response = await self.client.get(f"/orquestracoes/{run_id}")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def reached(self, run_id: str, tasks: int) -> None:
        """So many tasks of the run are done."""

        async def far_enough() -> bool:
            return bool((await self.summary(run_id))["resumo"]["concluidas"] >= tasks)

        await until(far_enough, within=60, saying=f"{tasks} tasks to be done")

    async def ended(self, run_id: str, *, within: float = 150) -> dict[str, Any]:
        async def over() -> dict[str, Any] | None:
            try:
                found = await self.summary(run_id)
            except httpx2.HTTPError:
                return None
            return found if found["status"] != "em_execucao" else None

        try:
            found = await until(over, within=within, saying="the end of the run")
        except AssertionError:
            told = (await self.client.get(f"/orquestracoes/{run_id}/explicacao")).text
            raise AssertionError(f"{told}\n{self.engine.tail()}\n{self.workers[0].tail()}") from None
        assert found is not None
        return found

    async def health(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get("/health/ready")).json()
        return found

    async def goes_on_elsewhere(self, run_id: str, tasks: int) -> None:
        """Now that a broker works no more: new runs do at once, and so does this one. They need room in a worker beside
        those of its tasks that are held there, each twice perhaps (`FEW_HELD`)."""
        began = time.monotonic()
        for _ in range(3):
            assert (await self.ended(await self.submit(1)))["status"] == "concluida"
        print(f"new runs went on after {time.monotonic() - began:.1f} s")
        await self.check(run_id, tasks)
        print(f"the run was over after {time.monotonic() - began:.1f} s")

    async def check(self, run_id: str, tasks: int) -> dict[str, Any]:
        """The run ended well, with every task answered once, and the file is sound."""
        self._held.unlink(missing_ok=True)
        found = await self.ended(run_id)
        assert found["status"] == "concluida", (found["resumo"], list(found["falhas"].items())[:3], self.engine.tail())
        assert {task: one["resultado"]["n"] for task, one in found["resultados"].items()} == {
            f"t{n}": n for n in range(tasks)
        }
        store = SqliteStore(str(self.database))
        await asyncio.to_thread(self.engine.stop)
        await store.start()
        assert await check_store(store) == []
        await store.close()
        return found
