"""The parameters that routes share, as FastAPI checks and documents them."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Path, Query
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from oraculo.core.run import RunStatus
from oraculo.errors import NotFound
from oraculo.wire.timestamps import from_iso

_MAX_SEQ = 2**31 - 1
BLANKS = " \t"  # stripped from the value of a header; other latin-1 blanks may be a part of a UTF-8 character


def _none_if_empty(value: Any) -> Any:
    """Return None for an empty parameter, as forms send it (`?status=`)."""
    return None if value == "" else value


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise PydanticCustomError("nul", "must not hold a NUL character")
    return value


def when_empty(default: int) -> BeforeValidator:
    """Return a validator that replaces an empty parameter by its default.

    Write it after the bounds, because FastAPI leaves bounds that follow a validator out of the OpenAPI document.
    """
    return BeforeValidator(lambda value: default if value == "" else value)


WhenGiven = BeforeValidator(_none_if_empty)
_Name = Annotated[str, StringConstraints(max_length=128), AfterValidator(_without_nul)]
_CursorText = Annotated[str, StringConstraints(max_length=1024), AfterValidator(_without_nul)]
Seq = Annotated[int, Field(ge=0, le=_MAX_SEQ)]

MOMENT = "ISO 8601 with `Z` or an offset (its `+` is written `%2B`), as `2026-01-31T12:00:00Z`"


def _moment(value: str) -> str:
    if from_iso(value) is None:
        raise PydanticCustomError("moment", f"must be {MOMENT}".replace("`", "'"))
    return value


def _each_listed(value: Any) -> Any:
    """Read `status=a,b` as `status=a&status=b`, and drop empty values."""
    if not isinstance(value, list):
        return value
    return [part for text in value for part in (text.split(",") if isinstance(text, str) else [text]) if part != ""]


Statuses = Annotated[
    Sequence[RunStatus],
    BeforeValidator(_each_listed),
    Query(description="Only runs in one of these statuses: `status=erro,timeout`, or `status=erro&status=timeout`."),
]
OptionalMoment = Annotated[Annotated[str, AfterValidator(_moment)] | None, WhenGiven]
OptionalName = Annotated[_Name | None, WhenGiven]
OptionalSeq = Annotated[Seq | None, WhenGiven]
Cursor = Annotated[_CursorText | None, WhenGiven, Query(description="`cursor` of the page before.")]


def _existing(value: str) -> str:
    """Raise NotFound for a NUL: no id holds one, and not every store accepts one."""
    if "\0" in value:
        raise NotFound("there is nothing whose name holds a NUL character")
    return value


RunId = Annotated[str, Path(description="`correlation_id` of the run."), AfterValidator(_existing)]
TaskId = Annotated[str, Path(description="Id of the subtask."), AfterValidator(_existing)]
Name = Annotated[str, Path(description="Name of the pipeline."), AfterValidator(_existing)]
Queue = Annotated[str, Path(description="Name of the queue, without the prefix."), AfterValidator(_existing)]
LetterId = Annotated[str, Path(description="`id` of the dead letter."), AfterValidator(_existing)]


# -- unknown parameters ------------------------------------------------------------------------------------------


class ExactQuery(BaseModel, extra="forbid"):
    """The query of one call: a parameter that it does not name is refused."""


async def _take_none(_: Annotated[ExactQuery, Query()]) -> None:
    """Have FastAPI check that the query is empty."""


NoQuery = Depends(_take_none)
