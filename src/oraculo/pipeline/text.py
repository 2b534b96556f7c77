"""Pipelines as text: reading YAML or JSON within limits."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from oraculo.errors import Fault, InvalidJson, InvalidPipeline
from oraculo.pipeline.definition import DEFAULT_TIMEOUT, Definition, QueueFault, parse_pipeline
from oraculo.pipeline.retry import DEFAULT_RETRY, RetryPolicy
from oraculo.wire import naming
from oraculo.wire.json_guard import check_json_text

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
    _TAG + "str": "a text",
    _TAG + "int": "a whole number",
    _TAG + "float": "a number",
    _TAG + "bool": "true or false",
    _TAG + "null": "null",
    _TAG + "timestamp": "a date",
}
_NUMBERS = frozenset({_TAG + "int", _TAG + "float"})
_ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _Loader(_Base):  # type: ignore[misc]  # its base is known only at run time
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Turn the odd errors that PyYAML raises for a value such as `!!bool x` or `2025-99-99` into a YAML error."""
        try:
            return super().construct_object(node, deep)
        except _ODD:
            raise _unreadable(node) from None


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
    except yaml.YAMLError as error:
        raise InvalidPipeline(Fault("", f"not valid YAML or JSON: {_one_line(error)}")) from None
    except (InvalidJson, *_ODD) as error:
        raise InvalidPipeline(Fault("", f"not a valid pipeline: {error}")) from None
    return parse_pipeline(
        source, name=name, default_retry=default_retry, default_timeout=default_timeout, queue_fault=queue_fault
    )


def _load(text: bytes) -> object:
    """Return the values of a text. JSON is tried first, because YAML does not read JSON's escapes of emoji."""
    not_json = ""
    if text.lstrip().startswith(b"{"):
        check_json_text(text, MAX_DEPTH)
        try:
            return json.loads(text, object_pairs_hook=_without_repeats, parse_int=_whole)
        except json.JSONDecodeError as error:
            not_json = f"; as JSON it is broken at line {error.lineno}, column {error.colno}"
    if len(text) > MAX_YAML:
        raise ValueError(f"{len(text)} bytes of YAML, over the limit of {MAX_YAML}; JSON may have {MAX_TEXT}{not_json}")
    _refuse_shape(text)
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _measure(root, {})
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _whole(digits: str) -> int:
    if len(digits) > MAX_NUMBER:
        raise ValueError("a number has thousands of digits; put it in quotes, as a text")
    return int(digits)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {naming.shown(next(n for n in names if names.count(n) > 1))} is given twice")
    return found


def _refuse_shape(text: bytes) -> None:
    """Refuse YAML that is too deep or has too many values, before libyaml builds a tree of it.

    libyaml builds the tree by recursion, so a deep text would end the process. Many values would take seconds.
    """
    depth = count = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            continue
        count += 1
        depth += isinstance(event, yaml.CollectionStartEvent)
        if depth > MAX_DEPTH:
            raise _marked(f"nested deeper than {MAX_DEPTH} levels", event)
        if count > MAX_YAML_VALUES:
            raise _marked(f"more than {MAX_YAML_VALUES} values, too many for YAML; write it as JSON", event)


class _Size(NamedTuple):
    """The size of a value once its aliases are replaced by what they stand for."""

    values: int
    characters: int
    depth: int


def _measure(node: yaml.Node, known: dict[int, _Size | None]) -> _Size:
    """Check a node and what is in it, before values are made of it. Each node is checked once, and counted each time.

    An alias comes after what it stands for, so the recursion is no deeper than the text.
    """
    if id(node) in known:
        if (size := known[id(node)]) is None:
            raise _marked("a value holds itself", node)
        return size
    known[id(node)] = None
    _check(node)
    below = [_measure(child, known) for child in _children(node)]
    size = _Size(
        1 + sum(each.values for each in below),
        (len(node.value) if isinstance(node, yaml.ScalarNode) else 0) + sum(each.characters for each in below),
        1 + max((each.depth for each in below), default=0),
    )
    if size.values > MAX_VALUES:
        raise _marked(f"more than {MAX_VALUES} values, with what aliases repeat", node)
    if size.characters > MAX_TEXT:
        raise _marked(f"texts and numbers of more than {MAX_TEXT} characters, with what aliases repeat", node)
    if size.depth > MAX_DEPTH + 1:  # a text or number in the innermost list is no level
        raise _marked(f"nested deeper than {MAX_DEPTH} levels, with what aliases repeat", node)
    known[id(node)] = size
    return size


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag != _MERGE:
                yield key
            yield value


def _check(node: yaml.Node) -> None:
    """Refuse odd tags, long numbers and repeated keys, of which YAML would silently keep the last."""
    if isinstance(node, yaml.ScalarNode):
        is_known = node.tag in _SCALARS
    else:
        is_known = node.tag == _TAG + ("seq" if isinstance(node, yaml.SequenceNode) else "map")
    if not is_known:
        tag = naming.shown(node.tag.replace(_TAG, "!!", 1))
        raise _marked(f"the tag {tag} cannot be used here; leave it out, or put the text in quotes", node)
    if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER:
        raise _unreadable(node)
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)


def _check_keys(node: yaml.MappingNode) -> None:
    keys: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _marked("a key must be a text", key)
        if key.tag in _NUMBERS and len(key.value) > _MAX_NUMBER_AS_KEY:
            raise _marked(f"the key {naming.shown(key.value)} must be a text; put it in quotes", key)
        if key.value in keys:
            raise _marked(f"the key {naming.shown(key.value)} is given twice", key)
        keys.add(key.value)


def _unreadable(node: yaml.Node) -> yaml.MarkedYAMLError:
    kind = _SCALARS.get(node.tag, "a value")
    return _marked(f"{naming.shown(node.value)} cannot be read as {kind}; put it in quotes if it is a text", node)


def _marked(problem: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark, problem = error.problem_mark, str(error.problem or error.context)
        if "cannot start any token" in problem:  # libyaml does not name the character
            problem += "; indent with spaces and not with a tab, or put the text in quotes"
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    return " ".join(str(error).split())
