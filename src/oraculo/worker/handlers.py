"""What a function must look like to be a handler, found out once, when it is decorated."""

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from oraculo.core.message import fault_of
from oraculo.errors import Fault, InvalidInput

_RIGHT = "a handler takes (payload) or (payload, ctx)"
_OBJECTS = (
    msgspec.inspect.AnyType,
    msgspec.inspect.DictType,
    msgspec.inspect.StructType,
    msgspec.inspect.DataclassType,
    msgspec.inspect.TypedDictType,
)


class Handler(msgspec.Struct, frozen=True, eq=False):
    queue: str
    function: Callable[..., Any]
    name: str  # for people
    is_async: bool
    wants_context: bool
    payload: msgspec.json.Decoder[Any]  # reads straight into the type that the function asks for
    concurrency: int | None = None


def inspect_handler(function: Callable[..., Any], queue: str, concurrency: int | None) -> Handler:
    """Raises InvalidInput, naming the function, when it cannot be called with a payload and perhaps a context."""
    name = _name_of(function)
    try:
        parameters = _positional(function)
        annotation = _resolved(parameters[0].annotation, function)
        decoder = _decoder_of(annotation)
    except (TypeError, ValueError, NameError) as error:
        raise InvalidInput.at(f"handler {name} of queue '{queue}'", str(error)) from error
    return Handler(
        queue=queue,
        function=function,
        name=name,
        is_async=_is_async(function),
        wants_context=len(parameters) == 2,
        payload=decoder,
        concurrency=concurrency,
    )


def payload_fault(error: msgspec.DecodeError) -> str:
    """Why a payload is not what its handler asks for."""
    if not isinstance(error, msgspec.ValidationError):
        return f"payload: {error}"
    fault = fault_of(error)
    return str(Fault(f"payload.{fault.field}".rstrip("."), fault.problem))


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that the runner fills: those that have no default, one or two of them."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("it is a generator; a handler returns its answer")
    needed = [each for each in inspect.signature(function).parameters.values() if _is_needed(each)]
    if any(each.kind is inspect.Parameter.KEYWORD_ONLY for each in needed):
        raise TypeError(f"it has a keyword-only parameter without a default; {_RIGHT}")
    if not 1 <= len(needed) <= 2:
        raise TypeError(f"it needs {len(needed)} arguments; {_RIGHT}")
    return needed


def _is_needed(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.kind not in variadic and parameter.default is inspect.Parameter.empty


def _resolved(annotation: object, function: Callable[..., Any]) -> Any:
    """The payload's type. Only this one is resolved: the others may be imported for type checkers alone."""
    if annotation is inspect.Parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={"payload": annotation})
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    return typing.get_type_hints(holder, globalns=scope, include_extras=True)["payload"]


def _decoder_of(annotation: Any) -> msgspec.json.Decoder[Any]:
    if not _reads_objects(msgspec.inspect.type_info(annotation)):
        raise TypeError(
            f"its payload is annotated {annotation!r}, but a payload is always a JSON object: "
            "use dict, Any, a msgspec.Struct, a dataclass or a TypedDict"
        )
    return msgspec.json.Decoder(annotation)


def _reads_objects(info: msgspec.inspect.Type) -> bool:
    if isinstance(info, msgspec.inspect.UnionType):
        return any(map(_reads_objects, info.types))
    if isinstance(info, msgspec.inspect.Metadata):
        return _reads_objects(info.type)
    return isinstance(info, _OBJECTS)
