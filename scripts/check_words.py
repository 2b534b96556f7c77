"""Refuses docstrings whose first line does not stand alone, and two public classes of one name.

PYTHONPATH=src python -m scripts.check_words
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parent.parent / "src" / "oraculo"
ADAPTERS = ("bridges", "brokers", "stores")  # each adapter has its own Server, Connection and Address
_STARTS = (
    "Of|What|Those|Whether|As|It|By|Not|Who|Which|How|Why|Where|When|Whoever|Whatever|They|In|On|At|For|From|With|To|So|"
    "But|And|Or|If|While|Until|All|Also|Each|Since|Without|Before|After|Because|Once|Than|That|There|Here|None|Neither|Nor"
)
_IN_MID_AIR = re.compile(rf"({_STARTS})\b")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    path: str
    line: int
    text: str


def in_mid_air(path: str, tree: ast.AST) -> Iterator[Place]:
    """Yield the docstrings that begin in the middle of a thought."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (docstring := ast.get_docstring(node)) and _IN_MID_AIR.match(docstring):
            yield Place(path, getattr(node, "lineno", 1), docstring.splitlines()[0])


def same_names(trees: Mapping[str, ast.Module]) -> Iterator[Place]:
    """Yield the public classes outside the adapters that share their name with another."""
    found: defaultdict[str, list[Place]] = defaultdict(list)
    for path, tree in trees.items():
        if not path.startswith(ADAPTERS):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(Place(path, node.lineno, f"class {node.name}"))
    for places in found.values():
        if len(places) > 1:
            yield from places


def main(source: Path = SOURCE) -> int:
    trees = {path.relative_to(source).as_posix(): ast.parse(path.read_text("utf-8")) for path in source.rglob("*.py")}
    docstrings = [place for path, tree in trees.items() for place in in_mid_air(path, tree)]
    names = list(same_names(trees))
    for place in docstrings:
        print(f"{place.path}:{place.line}: the first line does not stand alone: {place.text}", file=sys.stderr)
    for place in names:
        print(f"{place.path}:{place.line}: another {place.text} exists; give one of them its own name", file=sys.stderr)
    return 1 if docstrings or names else 0


if __name__ == "__main__":
    sys.exit(main())
