"""Pipelines as text: YAML or JSON."""

import codecs
import json
from math import isfinite
from typing import Any

import yaml

from oraculo.errors import Fault, InvalidPipeline
from oraculo.pipeline.definition import DEFAULT_TIMEOUT, Definition, QueueFault, parse_pipeline
from oraculo.pipeline.retry import DEFAULT_RETRY, RetryPolicy
from oraculo.wire import naming

MAX_TEXT = 4 * 1024 * 1024
# YAML is read some twenty times slower than JSON.
MAX_YAML = 1024 * 1024
MAX_YAML_VALUES = 100_000
MAX_DEPTH = 100
# An alias repeats what it names, so a few lines can stand for millions of values; what they expand to is bounded, and
# by MAX_TEXT the characters of its texts and numbers.
MAX_VALUES = 1_000_000
# As many digits as Python reads of a number in JSON. Numbers to the base of 60 (`1:30`) take it the square of the time.
MAX_NUMBER = 4_300
# Longer ones can be chosen to look alike to a dict, and then it takes the square of the time. A key is to be a text.
_MAX_NUMBER_AS_KEY = 18

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
# What YAML may mean by a value that JSON can hold too; a tag for anything else is refused.
_SCALARS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "timestamp": "a date",
}
_NUMBERS = frozenset({_TAG + "int", _TAG + "float"})
_ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _Loader(_Base):  # type: ignore[misc]  # which of the two it is shows only when it runs
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """PyYAML raises whatever a value that is not of its kind leads to, as for `!!bool x` or `2025-99-99`."""
        try:
            return super().construct_object(node, deep)
        except _ODD:
            kind = _SCALARS.get(node.tag.removeprefix(_TAG))
            # None: a list or an object, which the tree's check has passed; nothing is known to lead here.
            problem = "cannot be read" if kind is None else _unreadable(naming.shown(node.value), kind)
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def _unreadable(shown: str, kind: str) -> str:
    return f"{shown} cannot be read as {kind}; put it in quotes if it is a text"


def expect_length(length: int) -> None:
    """Of a text in bytes. Raises InvalidPipeline."""
    if length > MAX_TEXT:
        raise InvalidPipeline(Fault("", f"{length} bytes, over the limit of {MAX_TEXT}"))


def read_pipeline(
    text: bytes,
    *,
    name: str | None = None,
    default_retry: RetryPolicy = DEFAULT_RETRY,
    default_timeout: float = DEFAULT_TIMEOUT,
    queue_fault: QueueFault | None = None,
) -> Definition:
    """Reads one definition. Raises InvalidPipeline: for bad YAML with the line, for the rest with step and fault."""
    expect_length(len(text))
    try:
        source = _load(text)
        _bound(source)
    except _Unfit as unfit:
        raise InvalidPipeline(Fault(_place_of_unfit(source, unfit.depth) or "", str(unfit))) from None
    except yaml.YAMLError as error:
        raise InvalidPipeline(Fault("", f"not valid YAML or JSON: {_one_line(error, text)}")) from None
    except RecursionError:
        raise InvalidPipeline(Fault("", f"not a valid pipeline: nested deeper than {MAX_DEPTH} levels")) from None
    except _ODD as error:
        raise InvalidPipeline(Fault("", f"not a valid pipeline: {error}")) from None
    return parse_pipeline(
        source, name=name, default_retry=default_retry, default_timeout=default_timeout, queue_fault=queue_fault
    )


def _load(text: bytes) -> object:
    """JSON is tried first: YAML is all but a superset of it (it does not know JSON's escape of an emoji)."""
    not_json = ""
    if text.lstrip().startswith(b"{"):
        try:
            return json.loads(text, object_pairs_hook=_without_repeats)
        except json.JSONDecodeError as error:
            not_json = f"; as JSON it is broken at line {error.lineno}, column {error.colno}"
        except UnicodeDecodeError:
            pass
        except _Repeated:
            raise
        except ValueError:  # the one other that it raises
            raise ValueError("a number has thousands of digits; put it in quotes, as a text") from None
    if len(text) > MAX_YAML:
        raise ValueError(f"{len(text)} bytes of YAML, over the limit of {MAX_YAML}; JSON may have {MAX_TEXT}{not_json}")
    _refuse_shape(text)
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_tree(root)
        return loader.construct_document(root)
    finally:
        loader.dispose()


class _Repeated(ValueError):
    pass


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Repeated(f"the key {naming.shown(key)} is given twice")
        found[key] = value
    return found


def _refuse_shape(text: bytes) -> None:
    """Before a tree is made of the text: libyaml makes it by recursion, and one too deep would end the process; one of
    too many values would take seconds."""
    depth = count = 0
    for event in yaml.parse(text, _Loader):
        count += 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            count -= 1
        at: Any = event.start_mark
        if depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {MAX_DEPTH} levels", problem_mark=at)
        if count > MAX_YAML_VALUES:
            problem = f"more than {MAX_YAML_VALUES} values, too many for YAML; write it as JSON"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=at)


def _check_tree(root: yaml.Node) -> None:
    """Before values are made of the tree: refuses tags for what JSON cannot hold, numbers that would take long to make,
    a key given twice, of which YAML would keep the last in silence, and merges (`<<`) that would make too many keys."""
    seen: set[int] = set()
    widths: dict[int, int] = {}
    total = 0
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        _refuse_tag(node)
        _refuse_long_number(node)
        if isinstance(node, yaml.SequenceNode):
            stack.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            stack.extend(value for _, value in node.value)
            stack.extend(key for key, _ in node.value if key.tag != _MERGE)
            _refuse_repeats(node)
            total += _width(node, widths)
        if total > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} keys")


def _refuse_tag(node: yaml.Node) -> None:
    if isinstance(node, yaml.ScalarNode):
        is_known = node.tag.startswith(_TAG) and node.tag.removeprefix(_TAG) in _SCALARS
    else:
        is_known = node.tag == _TAG + ("seq" if isinstance(node, yaml.SequenceNode) else "map")
    if not is_known:
        tag = naming.shown(node.tag.replace(_TAG, "!!", 1))
        problem = f"the tag {tag} is not one that can be used here; leave it out, or put the text in quotes"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _refuse_long_number(node: yaml.Node) -> None:
    if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER:
        told = f"{naming.shown(node.value)} of {len(node.value)} characters"
        problem = _unreadable(told, _SCALARS[node.tag.removeprefix(_TAG)])
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _refuse_repeats(node: yaml.MappingNode) -> None:
    keys: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key must be a text", problem_mark=key.start_mark)
        if key.tag in _NUMBERS and len(key.value) > _MAX_NUMBER_AS_KEY:
            problem = f"the key {naming.shown(key.value)} must be a text; put it in quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        if key.value in keys:
            problem = f"the key {naming.shown(key.value)} is given twice"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
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


def _one_line(error: yaml.YAMLError, text: bytes) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        hint = _hint(_character(text, mark.line, mark.column)) if "cannot start any token" in str(error.problem) else ""
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}{hint}"
    return " ".join(str(error).split())


def _character(text: bytes, line: int, column: int) -> str:
    encoding = "utf-16" if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    lines = text.decode(encoding, errors="replace").splitlines()
    return lines[line][column : column + 1] if line < len(lines) else ""


def _hint(character: str) -> str:
    """libyaml does not say which character it was."""
    if character == "\t":
        return ": a tab; indent with spaces"
    return f": {character!r}; put the text in quotes" if character else ""


def _bound(source: object) -> None:
    """Raises ValueError when the values are too many or too long, JSON cannot hold one, or a structure holds itself."""
    count = length = depth = 0
    level: list[object] = [source]
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        count += len(level)
        below: list[object] = []
        for value in level:
            length += _length(value)
            if length > MAX_TEXT:
                raise ValueError(f"texts and numbers of more than {MAX_TEXT} characters, with what aliases repeat")
            if isinstance(value, dict):
                below.extend(value)
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif (problem := _json_problem(value)) is not None:
                raise _Unfit(problem, depth)
            if count + len(below) > MAX_VALUES:
                raise ValueError(f"more than {MAX_VALUES} values")
        level = below
        depth += 1


def _length(value: object) -> int:
    """No more characters than whoever wrote it without an alias needed, so that JSON within its limit always passes."""
    if isinstance(value, str):
        return len(value)
    return value.bit_length() // 4 if isinstance(value, int) else 0


class _Unfit(ValueError):
    """JSON cannot hold a value that stands so deep."""

    def __init__(self, problem: str, depth: int) -> None:
        super().__init__(problem)
        self.depth = depth


def _json_problem(value: object) -> str | None:
    """Why JSON, or what reads it, cannot hold this text or number."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "a text holds half a surrogate pair (\\ud800 to \\udfff)"
        return "a text holds a NUL character" if "\0" in value else None
    if isinstance(value, float) and not isfinite(value):
        return f"{value} is not a number that JSON can hold"
    return None


def _place_of_unfit(value: object, levels: int) -> str | None:
    """Where in `value` the first stands, as `steps[0].config.n`; of a key, where its object is. None: it is all right.
    Looks no deeper than `_bound` did: by its aliases, YAML can go on for ever."""
    if not isinstance(value, dict | list):
        return None if _json_problem(value) is None else ""
    if not levels:
        return None
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if _json_problem(key) is not None:
            return ""
        if (below := _place_of_unfit(item, levels - 1)) is not None:
            here = f"[{key}]" if isinstance(value, list) else _key(key)
            return f"{here}{'.' if below and not below.startswith('[') else ''}{below}"
    return None


def _key(key: object) -> str:
    return key[:40] if isinstance(key, str) else naming.shown(key)
