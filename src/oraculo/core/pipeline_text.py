"""Pipelines as text: YAML or JSON."""

import json
from math import isfinite
from typing import Any

import yaml

from oraculo.core.pipeline import Definition, parse_pipeline
from oraculo.core.retry import DEFAULT_RETRY, RetryPolicy
from oraculo.errors import Fault, InvalidPipeline

MAX_TEXT = 4 * 1024 * 1024
MAX_DEPTH = 100
# An alias repeats what it names, so a few lines can stand for millions of values; what they expand to is bounded.
MAX_VALUES = 1_000_000

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE = "tag:yaml.org,2002:merge"


def read_pipeline(text: bytes, *, name: str | None = None, default_retry: RetryPolicy = DEFAULT_RETRY) -> Definition:
    """Reads one definition. Raises InvalidPipeline: for bad YAML with the line, for the rest with step and fault."""
    if len(text) > MAX_TEXT:
        raise InvalidPipeline(Fault("", f"{len(text)} bytes, over the limit of {MAX_TEXT}"))
    try:
        source = _load(text)
        _bound(source)
    except yaml.YAMLError as error:
        raise InvalidPipeline(Fault("", f"not valid YAML or JSON: {_one_line(error)}")) from None
    except (RecursionError, ValueError, OverflowError, TypeError) as error:
        raise InvalidPipeline(Fault("", f"not a valid pipeline: {error}")) from None
    return parse_pipeline(source, name=name, default_retry=default_retry)


def _load(text: bytes) -> object:
    """JSON is tried first: YAML is all but a superset of it (it does not know JSON's escape of an emoji)."""
    if text.lstrip().startswith(b"{"):
        try:
            return json.loads(text, object_pairs_hook=_without_repeats)
        except (json.JSONDecodeError, UnicodeDecodeError):
            pass
    _refuse_depth(text)
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_tree(root)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


def _refuse_depth(text: bytes) -> None:
    """Before a tree is made of the text: libyaml makes it by recursion, and one too deep would end the process."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                at: Any = event.start_mark
                raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=at)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _check_tree(root: yaml.Node) -> None:
    """Before values are made of the tree: refuses a key given twice, of which YAML would keep the last in silence, and
    merges (`<<`) that would make too many keys."""
    seen: set[int] = set()
    widths: dict[int, int] = {}
    total = 0
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        stack.extend(part for item in node.value for part in (item if isinstance(item, tuple) else (item,)))
        if isinstance(node, yaml.MappingNode):
            _refuse_repeats(node)
            total += _width(node, widths)
        if total > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} keys")


def _refuse_repeats(node: yaml.MappingNode) -> None:
    keys: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key must be a text", problem_mark=key.start_mark)
        if key.value in keys:
            raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
        keys.add(key.value)


def _width(node: yaml.MappingNode, widths: dict[int, int]) -> int:
    """How many keys the mapping has when those that it merges are counted in."""
    if id(node) not in widths:
        widths[id(node)] = 0  # one that merges itself adds nothing
        widths[id(node)] = sum(
            sum(_width(merged, widths) for merged in _merged(value)) if key.tag == _MERGE else 1
            for key, value in node.value
        )
    return widths[id(node)]


def _merged(node: yaml.Node) -> list[yaml.MappingNode]:
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return [merged for merged in nodes if isinstance(merged, yaml.MappingNode)]


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
    return " ".join(str(error).split())


def _bound(source: object) -> None:
    """Raises ValueError when the values are too many, JSON cannot hold one, or a structure holds itself."""
    count = 0
    stack: list[tuple[object, int]] = [(source, 0)]
    while stack:
        value, depth = stack.pop()
        count += 1
        if count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            stack.extend((item, depth + 1) for pair in value.items() for item in pair)
        elif isinstance(value, list | tuple | set):
            stack.extend((item, depth + 1) for item in value)
        else:
            _fit_for_json(value)


def _fit_for_json(value: object) -> None:
    if isinstance(value, str):
        value.encode()
        if "\0" in value:
            raise ValueError("a text holds a NUL character")
    elif isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{value} is not a number that JSON can hold")
