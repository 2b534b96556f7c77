"""Pipelines as text: YAML, of which JSON is a part."""

from typing import Any

import yaml

from oraculo.core.pipeline import Definition, parse_pipeline
from oraculo.core.retry import DEFAULT_RETRY, RetryPolicy
from oraculo.errors import Fault, InvalidPipeline

MAX_TEXT = 4 * 1024 * 1024
# An alias repeats what it names, so a few lines can stand for millions of values; what they expand to is bounded.
MAX_VALUES = 1_000_000

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _PipelineLoader(_Loader):  # type: ignore[misc]
    """Refuses a key that is given twice: YAML would keep the last in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark)
            if isinstance(key.value, str):
                seen.add(key.value)
        result: dict[Any, Any] = super().construct_mapping(node, deep)
        return result


def read_pipeline(text: bytes, *, name: str | None = None, default_retry: RetryPolicy = DEFAULT_RETRY) -> Definition:
    """Reads one definition. Raises InvalidPipeline: for bad YAML with the line, for the rest with step and fault."""
    if len(text) > MAX_TEXT:
        raise InvalidPipeline(Fault("", f"{len(text)} bytes, over the limit of {MAX_TEXT}"))
    try:
        source = yaml.load(text, _PipelineLoader)  # noqa: S506  it is a SafeLoader
        _bound(source)
    except yaml.YAMLError as error:
        raise InvalidPipeline(Fault("", f"not valid YAML or JSON: {_one_line(error)}")) from None
    except (RecursionError, ValueError, OverflowError, TypeError) as error:
        raise InvalidPipeline(Fault("", f"not a valid pipeline: {error}")) from None
    return parse_pipeline(source, name=name, default_retry=default_retry)


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
    return " ".join(str(error).split())


def _bound(source: object) -> None:
    """Raises ValueError when the values are too many, NUL is in a text, or a structure holds itself."""
    count = 0
    stack: list[tuple[object, int]] = [(source, 0)]
    while stack:
        value, depth = stack.pop()
        count += 1
        if count > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        if depth > 100:
            raise ValueError("nested deeper than 100 levels")
        if isinstance(value, dict):
            stack.extend((item, depth + 1) for pair in value.items() for item in pair)
        elif isinstance(value, list):
            stack.extend((item, depth + 1) for item in value)
        elif isinstance(value, str) and "\0" in value:
            raise ValueError("a text holds a NUL character")
