"""Lists of runs, newest first. An index is read in slices, so that a long search does not block the server."""

from collections.abc import Iterable
from math import inf

from oraculo.core.run import RunHead
from oraculo.ports.browse import Page, RunQuery
from oraculo.stores.cursor import make_cursor, read_cursor
from oraculo.stores.redis.server import Server
from oraculo.stores.redis.values import head_of

LOOKED_AT = 500  # runs that one script reads
FOUND = 100  # heads that one script returns

Numbered = tuple[int, RunHead]  # the number orders every list


async def list_runs(server: Server, query: RunQuery) -> Page:
    walk = _Walk(server, query, read_cursor(query.cursor))
    found: list[Numbered] = []
    while not walk.is_over and len(found) <= query.limit:
        missing = query.limit + 1 - len(found)  # one more shows that there is another page
        found += await (walk.search(query.text, missing) if query.text else walk.take(missing))
    page = found[: query.limit]
    more = len(found) > query.limit and bool(page)
    return Page([head for _, head in page], make_cursor(page[-1][0]) if more else None)


class _Walk:
    """A walk along the runs with the wanted status and name."""

    def __init__(self, server: Server, query: RunQuery, before: int) -> None:
        layout = server.layout
        groups = [
            [layout.with_status(status) for status in sorted(query.statuses)],
            [] if query.name is None else [layout.with_name(query.name)],
        ]
        walked, others = (*(group for group in groups if group), [], [])[:2]
        self._server = server
        self._query = query
        self._indexes = [b"%d" % len(walked or [layout.runs]), *(walked or [layout.runs]), *others]
        self._looks_further = bool(others) or query.since is not None or query.until is not None
        self._place = b"%d" % before

    @property
    def is_over(self) -> bool:
        return not self._place

    async def take(self, missing: int) -> list[Numbered]:
        most = min(missing, FOUND)
        rows = await self._next(LOOKED_AT if self._looks_further else most, most, "head")
        return self._wanted((n, head_of(value)) for n, _, value in rows)

    async def search(self, text: str, missing: int) -> list[Numbered]:
        """Return runs that contain the text. It is compared here, because the server lowercases only ASCII."""
        text = text.casefold()
        rows = await self._next(LOOKED_AT, LOOKED_AT, "name")
        matching = [
            (n, run_id) for n, run_id, name in rows if text in run_id.casefold() or text in name.decode().casefold()
        ]
        found: list[Numbered] = []
        while matching and len(found) < missing:
            some, matching = matching[:missing], matching[missing:]
            found += await self._heads(some)
        return found

    async def _heads(self, runs: list[tuple[int, str]]) -> list[Numbered]:
        keys = [self._server.layout.run(run_id) for _, run_id in runs]
        values = await self._server.ask_all([("HGET", key, "head") for key in keys])
        # A run may have been pruned, or have ended, since it was found.
        return self._wanted(
            (n, head_of(value)) for (n, _), value in zip(runs, values, strict=True) if value is not None
        )

    def _wanted(self, heads: Iterable[Numbered]) -> list[Numbered]:
        query = self._query
        since, until = -inf if query.since is None else query.since, inf if query.until is None else query.until
        return [
            (n, head)
            for n, head in heads
            if since <= head.created_at < until and (not query.statuses or head.status in query.statuses)
        ]

    async def _next(self, looked_at: int, most: int, field: str) -> list[tuple[int, str, bytes]]:
        """Return number, id and one field of each next run."""
        reply = await self._server.run("list_runs", self._place, looked_at, most, field, *self._indexes)
        self._place = reply[0]
        rows = zip(reply[1::3], reply[2::3], reply[3::3], strict=True)
        return [(int(n), run_id.decode(), value) for n, run_id, value in rows if value is not None]
