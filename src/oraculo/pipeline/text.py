"""Pipelines as text: reading YAML or JSON within limits."""

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
# Smaller, because YAML is read some twenty times slower than JSON.
MAX_YAML = 1024 * 1024
MAX_YAML_VALUES = 100_000
MAX_DEPTH = 100
# With aliases a few lines of YAML can stand for millions of values. This bounds the values that they expand to, and
# MAX_TEXT bounds the characters.
MAX_VALUES = 1_000_000
# Python reads as many digits of a number in JSON. A number to the base of 60 (`1:30`) takes the square of the time.
MAX_NUMBER = 4_300
# Longer numbers can be chosen with one hash, and then a dict takes the square of the time.
_MAX_NUMBER_AS_KEY = 18

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
# The tags of YAML that are read, each with its name in error messages. Every other tag is refused.
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


class _Loader(_Base):  # type: ignore[misc]  # its base is known only at run time
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Turn the odd errors that PyYAML raises for a value such as `!!bool x` or `2025-99-99` into a YAML error."""
        try:
            return super().construct_object(node, deep)
        except _ODD:
            kind = _SCALARS.get(node.tag.removeprefix(_TAG))
            problem = "cannot be read" if kind is None else _unreadable(naming.shown(node.value), kind)
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def _unreadable(shown: str, kind: str) -> str:
    return f"{shown} cannot be read as {kind}; put it in quotes if it is a text"


def expect_length(length: int) -> None:
    """Raise InvalidPipeline for a text of more bytes than MAX_TEXT."""
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
    """Return the definition in a text. Raises InvalidPipeline with the line of bad YAML, or with every fault."""
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
    """Return the values of a text. JSON is tried first, because YAML does not read JSON's escapes of emoji."""
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
        except ValueError:  # json raises it only for a number that is too long
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
    """Refuse YAML that is too deep or has too many values, before libyaml builds a tree of it.

    libyaml builds the tree by recursion, so a deep text would end the process. Many values would take seconds.
    """
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
    """Refuse a tree with odd tags, long numbers, repeated keys, or merges (`<<`) that make too many keys.

    This comes before values are made of it. YAML would silently keep the last of two equal keys.
    """
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
        number = f"{naming.shown(node.value)} of {len(node.value)} characters"
        problem = _unreadable(number, _SCALARS[node.tag.removeprefix(_TAG)])
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
    """Return how many keys a mapping has, with the keys that it merges."""
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
    """Return a hint about the character that stopped libyaml, which libyaml does not name."""
    if character == "\t":
        return ": a tab; indent with spaces"
    return f": {character!r}; put the text in quotes" if character else ""


def _bound(source: object) -> None:
    """Raise ValueError for too many or too long values, a value that JSON cannot hold, or a structure in itself."""
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
    """Return at most the characters that the value takes in a text. JSON within its limit thus always passes."""
    if isinstance(value, str):
        return len(value)
    return value.bit_length() // 4 if isinstance(value, int) else 0


class _Unfit(ValueError):
    """A value at this depth is one that JSON cannot hold."""

    def __init__(self, problem: str, depth: int) -> None:
        super().__init__(problem)
        self.depth = depth


def _json_problem(value: object) -> str | None:
    """Return why JSON cannot hold this text or number, or None when it can."""
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
    """Return the place of the first unfit value, as `steps[0].config.n`, or of the object that has an unfit key.

    It looks `levels` deep, because a structure of YAML can hold itself. Returns None when every value fits.
    """
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
