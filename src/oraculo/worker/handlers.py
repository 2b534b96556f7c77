"""The inspection of a function when it is decorated as a handler: its parameters, its payload's type, its context."""

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from oraculo.errors import Fault, InvalidInput
from oraculo.wire.message import fault_of
from oraculo.worker.context import Context

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
    """Return the handler. Raises InvalidInput when the function does not take a payload and perhaps a context."""
    name = _name_of(function)
    try:
        parameters = _positional(function)
        annotation = _resolved(parameters[0].annotation, function)
        decoder = _decoder_of(annotation)
        optional = _optional_context(function) if len(parameters) == 1 else None
    except (TypeError, ValueError, NameError) as error:
        raise InvalidInput.at(f"handler {name} of queue '{queue}'", str(error)) from error
    return Handler(
        queue=queue,
        function=_with_context_as(optional, function) if optional else function,
        name=name,
        is_async=_is_async(function),
        wants_context=len(parameters) == 2 or optional is not None,
        payload=decoder,
        concurrency=concurrency,
    )


def payload_fault(error: msgspec.DecodeError) -> str:
    """Return why a payload does not fit the type that its handler declares."""
    if not isinstance(error, msgspec.ValidationError):
        return f"payload: {error}"
    fault = fault_of(error)
    return str(Fault(f"payload.{fault.field}".rstrip("."), fault.problem))


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the one or two parameters without a default, which the runner fills."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("it is a generator; a handler returns its answer")
    given = list(inspect.signature(function).parameters.values())
    if len(given) > 1 and given[0].name in ("self", "cls"):
        raise TypeError(
            f"its first parameter is {given[0].name}, and nobody gives it that; decorate a function outside of classes "
            "or register the method of an object, as app.queue(name)(thing.method)"
        )
    needed = [each for each in given if _is_needed(each)]
    if any(each.kind is inspect.Parameter.KEYWORD_ONLY for each in needed):
        raise TypeError(f"it has a keyword-only parameter without a default; {_RIGHT}")
    if not 1 <= len(needed) <= 2:
        raise TypeError(f"it needs {len(needed)} arguments; {_RIGHT}")
    return needed


def _is_needed(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.kind not in variadic and parameter.default is inspect.Parameter.empty


def _optional_context(function: Callable[..., Any]) -> str | None:
    """Return the name of a parameter with a default that takes the context.

    A parameter that a functools.partial fills, or that a decorator does not pass on, is left alone.
    """
    try:
        given = inspect.signature(function, follow_wrapped=False).parameters.values()
    except ValueError:
        return None
    bound = getattr(function, "keywords", {})
    return next((each.name for each in given if each.name not in bound and _takes_context(each, function)), None)


def _takes_context(parameter: inspect.Parameter, function: Callable[..., Any]) -> bool:
    """Return whether a parameter is annotated as a Context, or is `ctx=None` without an annotation."""
    if parameter.default is inspect.Parameter.empty or parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        return False
    try:
        kind = _resolved(parameter.annotation, function)
    except Exception:  # noqa: BLE001 - an annotation for type checkers may not resolve
        kind = Any
    return kind in (Context, Context | None) or (kind is Any and parameter.name == "ctx" and parameter.default is None)


def _with_context_as(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda payload, ctx: function(payload, **{name: ctx})


def _resolved(annotation: object, function: Callable[..., Any]) -> Any:
    """Return a parameter's type. Only this one is resolved: others may be imported for type checkers only."""
    if annotation is inspect.Parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={"payload": annotation})
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    return typing.get_type_hints(holder, globalns=scope, include_extras=True)["payload"]


def _decoder_of(annotation: Any) -> msgspec.json.Decoder[Any]:
    if not _reads_objects(msgspec.inspect.type_info(annotation)):
        raise TypeError(
            f"its payload is annotated {annotation!r}, and a payload is a JSON object: "
            "use dict, Any, a msgspec.Struct without array_like, a dataclass or a TypedDict"
        )
    return msgspec.json.Decoder(annotation)


def _reads_objects(info: msgspec.inspect.Type) -> bool:
    if isinstance(info, msgspec.inspect.UnionType):
        return any(map(_reads_objects, info.types))
    if isinstance(info, msgspec.inspect.Metadata):
        return _reads_objects(info.type)
    is_list = isinstance(info, msgspec.inspect.StructType) and info.array_like
    return isinstance(info, _OBJECTS) and not is_list
