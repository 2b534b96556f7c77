"""Installs each built distribution into a fresh environment and runs one orchestration with it.

python -m scripts.try_release dist/*
"""

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUEST = {"destinos": ["escavador_youtube", "executador_relatorio"], "payload": {"fonte": "x"}, "timeout": 30}
_STARTING = 60.0  # seconds


def try_distribution(distribution: Path, port: int) -> str:
    """Return the version that a fresh environment runs. Raises CalledProcessError or AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        environment, constraints = Path(folder) / "venv", Path(folder) / "constraints.txt"
        constraints.write_text(_pins((ROOT / "requirements" / "run.txt").read_text("utf-8")))
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", constraints]
        subprocess.run([*pip, f"{distribution.resolve()}[speed]"], check=True)
        command = environment / "bin" / "oraculo"
        version = subprocess.run([command, "--version"], check=True, capture_output=True, text=True).stdout.strip()
        with (Path(folder) / "log").open("w+b") as log:
            server = subprocess.Popen([command, "dev", "--port", str(port)], cwd=folder, stdout=log, stderr=log)
            try:
                _run_one(port)
            except OSError:
                log.seek(0)
                sys.stderr.buffer.write(log.read())
                raise
            finally:
                server.terminate()
                server.wait(30)
        return version


def _pins(requirements: str) -> str:
    """Return the pinned versions without their hashes: pip would else want the hash of the distribution, too."""
    return "\n".join(re.findall(r"^[\w.-]+==[^\\\n]+", requirements, re.MULTILINE))


def _run_one(port: int) -> None:
    address = f"http://127.0.0.1:{port}/orquestracoes"
    headers = {"Content-Type": "application/json", "Prefer": "wait=30"}
    request = urllib.request.Request(address, json.dumps(REQUEST).encode(), headers)
    deadline = time.monotonic() + _STARTING
    while True:
        try:
            with urllib.request.urlopen(request, timeout=40) as reply:
                aggregate = json.load(reply)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    assert aggregate["status"] == "concluida", aggregate


def main(paths: list[str]) -> int:
    for number, path in enumerate(paths):
        print(f"{Path(path).name}: {try_distribution(Path(path), 18_080 + number)} ran one orchestration")
    return 0 if paths else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
