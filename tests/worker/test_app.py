"""Which function answers which queue, and what is refused when it is decorated."""

import functools
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, get_type_hints

import msgspec
import pytest

from oraculo.errors import Conflict, InvalidInput
from oraculo.worker import App, Context


@pytest.mark.parametrize(
    ("decorator", "name", "queue"),
    [
        ("escavador", "youtube", "escavador_youtube"),
        ("escavador", "escavador_youtube", "escavador_youtube"),
        ("executador", "relatorio", "executador_relatorio"),
        ("executador", "executador_relatorio", "executador_relatorio"),
        ("queue", "images-queue", "images-queue"),
    ],
)
def test_each_decorator_names_its_queue(decorator: str, name: str, queue: str) -> None:
    app = App("a")
    getattr(app, decorator)(name)(lambda payload: None)
    assert list(app.handlers) == [queue]


def test_the_decorated_function_is_returned_as_it_was() -> None:
    app = App("a")

    def double(payload: dict[str, int]) -> int:
        return payload["n"] * 2

    assert app.executador("double")(double) is double
    assert double({"n": 4}) == 8


def test_a_queue_has_one_handler() -> None:
    app = App("a")

    @app.escavador("youtube")
    def first(payload: Any) -> None: ...

    with pytest.raises(Conflict, match=r"escavador_youtube.*first.*already"):
        app.queue("escavador_youtube")(lambda payload: None)
    assert app.handlers["escavador_youtube"].function is first


@pytest.mark.parametrize("name", ["", "with space", "resultados", "orquestrador", "x.dlq", "a" * 129])
def test_a_bad_queue_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="queue"):
        App("a").queue(name)


def test_an_empty_collector_name_is_refused() -> None:
    with pytest.raises(InvalidInput):
        App("a").escavador("")


@pytest.mark.parametrize("concurrency", [0, -1, 2.0, 1.5, True, "2"])
def test_a_concurrency_that_is_no_count_is_refused(concurrency: Any) -> None:
    with pytest.raises(InvalidInput, match="concurrency: must be a whole number, at least 1; got"):
        App("a").queue("q", concurrency=concurrency)


def no_parameters() -> None: ...
def three(payload: Any, ctx: Any, more: Any) -> None: ...
def keyword_only(payload: Any, *, limit: int) -> None: ...
def generator(payload: Any) -> Any:
    yield payload


async def async_generator(payload: Any) -> Any:
    yield payload


def only_variadic(*args: Any) -> None: ...
def takes_a_number(payload: int) -> None: ...
def takes_a_list(payload: list[str]) -> None: ...
def takes_a_custom_class(payload: App) -> None: ...
def takes_what_is_not_there(payload: "Missing") -> None: ...  # type: ignore[name-defined] # noqa: F821


class List(msgspec.Struct, array_like=True):
    n: int


def takes_a_struct_of_lists(payload: List) -> None: ...
def takes_no_struct_of_lists(payload: List | None) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        no_parameters,
        three,
        keyword_only,
        generator,
        async_generator,
        only_variadic,
        takes_a_number,
        takes_a_list,
        takes_a_custom_class,
        takes_a_struct_of_lists,
        takes_no_struct_of_lists,
        takes_what_is_not_there,
    ],
)
def test_a_wrong_signature_is_refused_when_decorated(function: Any) -> None:
    app = App("a")
    with pytest.raises(InvalidInput, match=rf"handler {function.__name__} of queue 'q'"):
        app.queue("q")(function)
    assert not app.handlers


class InAClass:
    def method(self, payload: Any) -> None: ...
    def with_context(self, payload: Any, ctx: Context) -> None: ...
    def of_the_class(cls, payload: Any) -> None: ...  # noqa: N805


@pytest.mark.parametrize("method", [InAClass.method, InAClass.with_context, InAClass.of_the_class])
def test_a_method_is_refused_in_its_class_with_what_to_do(method: Any) -> None:
    app = App("a")
    with pytest.raises(InvalidInput, match=r"first parameter is (self|cls), .*decorate a function.* or register the"):
        app.queue("q")(method)
    assert not app.handlers


class Struct(msgspec.Struct):
    n: int


@dataclass
class Data:
    n: int


class Typed(TypedDict):
    n: int


async def plain(payload): ...  # type: ignore[no-untyped-def]
def with_context(payload: dict[str, Any], ctx: Context) -> None: ...
def with_default(payload: Struct, limit: int = 3) -> None: ...
def with_unknown_default(payload: Struct, limit: "NotImported" = 3) -> None: ...  # type: ignore[name-defined] # noqa: F821
def with_wrong_default(payload: Struct, limit: "msgspec.Missing" = 3) -> None: ...  # type: ignore[name-defined]
def takes_data(payload: Data) -> None: ...
def takes_typed(payload: Typed) -> None: ...
def takes_either(payload: Struct | None) -> None: ...
def takes_annotated(payload: Annotated[dict[str, int], "why"]) -> None: ...
def type_checkers_only(payload: "Struct", ctx: "NotImported") -> "NeitherThis": ...  # type: ignore[name-defined] # noqa: F821


class Callable:
    async def __call__(self, payload: dict[str, Any]) -> None: ...

    def method(self, payload: dict[str, Any], ctx: Context) -> None: ...


@pytest.mark.parametrize(
    ("function", "is_async", "wants_context"),
    [
        (plain, True, False),
        (with_context, False, True),
        (with_default, False, False),
        (with_unknown_default, False, False),
        (with_wrong_default, False, False),
        (takes_data, False, False),
        (takes_typed, False, False),
        (takes_either, False, False),
        (takes_annotated, False, False),
        (type_checkers_only, False, True),
        (Callable(), True, False),
        (Callable().method, False, True),
        (functools.partial(three, more=1), False, True),
        (functools.partial(with_context, ctx=Context(correlation_id="r", queue="q")), False, False),
    ],
)
def test_what_a_handler_may_look_like(function: Any, is_async: bool, wants_context: bool) -> None:
    app = App("a")
    app.queue("q")(function)
    handler = app.handlers["q"]
    assert (handler.is_async, handler.wants_context) == (is_async, wants_context)


CONTEXT = Context(correlation_id="r", queue="q")


def named_ctx(payload: Any, ctx: Any = None) -> Any:
    return ctx


def named_ctx_for_type_checkers(payload: Any, ctx: "NotImported | None" = None) -> Any:  # type: ignore[name-defined] # noqa: F821
    return ctx


def annotated_after_another(payload: Any, limit: int = 3, context: Context | None = None) -> Any:
    return context


def annotated_by_keyword(payload: Any, *, context: "Context | None" = None) -> Any:
    return context


def annotated_alone(payload: Any, context: "Context" = CONTEXT) -> Any:
    return context


@pytest.mark.parametrize(
    "function",
    [named_ctx, named_ctx_for_type_checkers, annotated_after_another, annotated_by_keyword, annotated_alone],
)
def test_a_context_with_a_default_is_given_all_the_same(function: Any) -> None:
    app, context = App("a"), Context(correlation_id="other", queue="q")
    app.queue("q")(function)
    handler = app.handlers["q"]
    assert handler.wants_context
    assert handler.function({}, context) is context


def around(function: Any) -> Any:
    @functools.wraps(function)
    def inner(payload: Any) -> Any:
        return function(payload)

    return inner


def another_ctx(payload: Any, ctx: dict[str, int] = {"a": 1}) -> Any:  # noqa: B006
    return ctx


@pytest.mark.parametrize(
    "function", [around(named_ctx), another_ctx, lambda payload, ctx="mine": ctx, functools.partial(named_ctx, ctx=1)]
)
def test_what_only_looks_like_the_context_is_left_alone(function: Any) -> None:
    app = App("a")
    app.queue("q")(function)
    assert not app.handlers["q"].wants_context
    assert app.handlers["q"].function({}) == function({})


def test_type_checkers_see_through_the_decorator() -> None:
    app = App("a")

    @app.queue("q")
    async def handler(payload: Struct) -> int:
        return payload.n

    assert get_type_hints(handler) == {"payload": Struct, "return": int}
