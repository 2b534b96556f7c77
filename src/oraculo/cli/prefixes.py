"""Ids of runs and dead letters that users shorten to a unique prefix."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from oraculo.cli.client import Refused, ServerClient
from oraculo.errors import InvalidInput

T = TypeVar("T")

_PAGE = 500
_MOST_RUNS = 10_000  # with the prefix anywhere in id or name
_NAMED = 3


def with_run(server: ServerClient, run_id: str, call: Callable[[str], T]) -> T:
    """Call with the id, or with that of the only run whose id begins so. Raises InvalidInput and Refused."""
    try:
        return call(run_id)
    except Refused as error:
        if error.status != 404 or not run_id:  # every id begins with an empty one
            raise
        ids = [run["correlation_id"] for run in islice(each_run(server, q=run_id), _MOST_RUNS)]
        if len(ids) == _MOST_RUNS:
            raise InvalidInput.at("ID", f"'{run_id}' is in {_MOST_RUNS} runs or more; give more of it") from None
        found = only_one(run_id, ids)
        if found is None:
            raise
    return call(found)


def only_one(prefix: str, ids: Iterable[str]) -> str | None:
    """Return the only id with the prefix, or None. Raises InvalidInput when several have it."""
    found = [each for each in ids if each.startswith(prefix)]
    if len(found) > 1:
        named = ", ".join(found[:_NAMED]) + (", …" if len(found) > _NAMED else "")
        raise InvalidInput.at("ID", f"'{prefix}' is the beginning of {len(found)} ids: {named}; give more of it")
    return found[0] if found else None


def whole_dead_letter_id(given: str, ids: Iterable[str]) -> str:
    """Return the whole id of a dead letter. A number is never a prefix: 8 does not mean 81."""
    known = list(ids)
    if given in known:
        return given
    return only_one(given, (each for each in known if not _is_number(each))) or given


def _is_number(each: str) -> bool:
    return each.rpartition(":")[2].replace("-", "").isdecimal()


def each_run(server: ServerClient, **wanted: str) -> Iterator[dict[str, Any]]:
    """Yield every run that fits the query of the API, newest first."""
    cursor: str | None = None
    while True:
        page = server.get("/orquestracoes", **wanted, limit=_PAGE, cursor=cursor)
        yield from page["orquestracoes"]
        cursor = page["cursor"]
        if not cursor:
            return
