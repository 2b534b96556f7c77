"""Writes the files that are made from the code. With `--check` it writes nothing, and exits 1 naming what is stale.

PYTHONPATH=src python -m scripts.generate_docs [--check]
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from oraculo.wire.message import message_schema
from scripts.cli_page import cli_page
from scripts.layers_drawing import layers_picture
from scripts.metrics_page import metrics_page
from scripts.settings_page import settings_page
from scripts.state_machine_page import state_machine_page, state_machine_pictures

ROOT = Path(__file__).resolve().parent.parent


def generated() -> Mapping[str, str]:
    """Return each file's path from the project's root, and what should be in it."""
    schema = json.dumps(message_schema(), ensure_ascii=False, indent=2) + "\n"
    return {
        "docs/reference/cli.md": cli_page(),
        "docs/reference/metrics.md": metrics_page(),
        "docs/reference/settings.md": settings_page(),
        "docs/explanation/state-machine.md": state_machine_page(),
        **state_machine_pictures(),
        "docs/images/whole.svg": layers_picture(ROOT / "pyproject.toml"),
        "mensagem_schema.json": schema,
        "src/oraculo/mensagem_schema.json": schema,
    }


def stale(root: Path) -> list[str]:
    return [path for path, text in generated().items() if _content(root / path) != text]


def _content(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None


def write(root: Path) -> None:
    for path, text in generated().items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, "utf-8")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when something is stale")
    if not parser.parse_args(arguments).check:
        write(root)
        return 0
    for path in (found := stale(root)):
        print(f"{path} is stale; run: make docs", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
