"""Which servers a measurement starts, and on which it is made."""

import json
import os
from pathlib import Path

import pytest
from benchmarks import __main__ as benchmarks


class Ships:
    """A fleet that starts nothing."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.stopped = 0

    def url(self, name: str) -> str:
        self.started.append(name)
        return f"{name}://started"

    def stop(self) -> None:
        self.stopped += 1


@pytest.mark.parametrize(
    ("options", "started", "broker", "store"),
    [
        ((), [], "nats://given", None),  # as the whole table runs each of its workloads: its servers are there already
        (("--broker", "redis"), ["redis"], "redis://started", None),
        (("--broker", "redis", "--store", "postgres"), ["redis", "postgres"], "redis://started", "postgres://started"),
    ],
)
def test_one_workload_is_measured_on_the_servers_that_were_asked_for(
    options: tuple[str, ...],
    started: list[str],
    broker: str,
    store: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def measure(name: str, folder: str, engines: int) -> dict[str, str | None]:
        return {server: os.environ.get(f"ORACULO_{server.upper()}_URL") for server in ("broker", "store")}

    fleet = Ships()
    monkeypatch.setattr(os, "environ", {**os.environ, "ORACULO_BROKER_URL": "nats://given"})
    monkeypatch.setattr(benchmarks, "Fleet", lambda: fleet)
    monkeypatch.setattr(benchmarks, "_measure", measure)
    monkeypatch.setattr(benchmarks, "collect_garbage_less_often", lambda: None)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--only", "W2", "--plain", "--folder", str(tmp_path), *options])
    benchmarks.main()
    assert json.loads(capsys.readouterr().out) == {"broker": broker, "store": store}
    assert (fleet.started, fleet.stopped) == (started, bool(started))
