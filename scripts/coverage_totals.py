"""Prints how many lines and branches the tests reached, by package; `coverage report` says which they did not."""

import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path, PurePath
from typing import Any

from coverage import Coverage

_FIRST = ("core", "wire", "pipeline")
_ALL = "all of src"


def totals() -> dict[str, Counter[str]]:
    """Return the counts of coverage's JSON report, added up by package."""
    added: dict[str, Counter[str]] = defaultdict(Counter)
    for path, file in _report()["files"].items():
        parts = PurePath(path).parts
        below = parts[parts.index("oraculo") + 1 :]
        for name in {below[0] if len(below) > 1 else _ALL, _ALL}:
            added[name].update(file["summary"])
    return added


def _report() -> Any:
    measured = Coverage()
    measured.load()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "coverage.json"
        measured.json_report(outfile=str(report))
        return json.loads(report.read_text())


def main() -> None:
    found = totals()
    others = sorted(set(found) - {*_FIRST, _ALL})
    for name in (*_FIRST, *others, _ALL):
        print(f"{name:<12}{_share(found[name], 'lines', 'statements')}{_share(found[name], 'branches', 'branches')}")


def _share(counts: Counter[str], kind: str, whole: str) -> str:
    return f"{100 * counts[f'covered_{kind}'] / (counts[f'num_{whole}'] or 1):6.1f} % of {kind}"


if __name__ == "__main__":
    main()
