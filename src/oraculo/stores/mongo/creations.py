"""New runs. A run is there from the moment its own document is: what it keeps apart is written before.

Side documents whose run may never come to be are noted as doubtful first, so that they are found and deleted when this
process does not live to do it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from oraculo.errors import StoreUnavailable
from oraculo.ports.store import Created, CreationOutcome
from oraculo.stores.mongo.housekeeping import Housekeeping
from oraculo.stores.mongo.portions import insert_missing
from oraculo.stores.mongo.server import Server
from oraculo.stores.mongo.writes import Birth

_ROUNDS = 20


class _Stored(NamedTuple):
    run_id: str
    fingerprint: str


class Creations:
    """Those of one commit: an id, or a key, that two of them have goes to the first."""

    def __init__(self, server: Server, keeper: Housekeeping, births: Sequence[Birth]) -> None:
        self._server = server
        self._keeper = keeper
        self._births = births
        self._outcomes: dict[int, Created] = {}
        self._by_id: dict[str, _Stored] = {}
        self._by_key: dict[str, _Stored] = {}

    async def write(self) -> list[Created]:
        waiting = list(enumerate(self._births))
        for _ in range(_ROUNDS):
            if not waiting:
                return [self._outcomes[place] for place in range(len(self._births))]
            now, waiting = self._part(waiting)
            losers = await self._insert(now)
            await self._look_up(birth for _, birth in losers)
            waiting = sorted([*losers, *waiting], key=lambda one: one[0])
        raise StoreUnavailable(f"MongoDB at {self._server.place}: ids and keys changed hands too often to tell whose")

    def _part(self, waiting: list[tuple[int, Birth]]) -> tuple[list[tuple[int, Birth]], list[tuple[int, Birth]]]:
        """Those to be tried now, and those behind another of the same id or key. The rest is decided."""
        now, later = [], []
        ids: set[str] = set()
        keys: set[str | None] = set()
        for place, birth in waiting:
            if (created := self._known(birth)) is not None:
                self._outcomes[place] = created
            elif birth.run_id in ids or birth.key in keys:
                later.append((place, birth))
            else:
                now.append((place, birth))
                ids.add(birth.run_id)
                keys |= {birth.key} - {None}
        return now, later

    def _known(self, birth: Birth) -> Created | None:
        if birth.key is not None and (stored := self._by_key.get(birth.key)):
            return _again(birth, stored, CreationOutcome.KEY_REUSED)
        if stored := self._by_id.get(birth.run_id):
            return _again(birth, stored, CreationOutcome.ID_IN_USE)
        return None

    async def _insert(self, now: list[tuple[int, Birth]]) -> list[tuple[int, Birth]]:
        """Returns those that found another in their place."""
        with_sides = [birth for _, birth in now if birth.has_sides]
        if with_sides:
            await self._keeper.doubt(birth.run_key for birth in with_sides)
            blocks = [block for birth in with_sides for block in birth.blocks]
            await insert_missing(self._server, self._server.blocks, blocks)
            parts = [part for birth in with_sides for part in birth.attachments]
            await insert_missing(self._server, self._server.attachments, parts)
        refused = await insert_missing(self._server, self._server.runs, [birth.document for _, birth in now])
        if with_sides:
            self._keeper.settle(birth.run_key for birth in with_sides)
        for number, (place, birth) in enumerate(now):
            if number not in refused:
                self._outcomes[place] = Created(CreationOutcome.CREATED, birth.run_id)
                self._note(_Stored(birth.run_id, birth.fingerprint), birth.key)
        return [now[number] for number in sorted(refused)]

    async def _look_up(self, losers: Iterable[Birth]) -> None:
        births = list(losers)
        if not births:
            return
        keys = [birth.key for birth in births if birth.key is not None]
        either = [
            {"correlation_id": {"$in": [birth.run_id for birth in births]}},
            {"chave_idempotencia": {"$in": keys}},
        ]
        wanted = {"correlation_id": 1, "chave_idempotencia": 1, "origem.fingerprint": 1}
        with self._server.limit():
            async for found in self._server.runs.find({"$or": either}, wanted):
                stored = _Stored(found["correlation_id"], found["origem"]["fingerprint"])
                self._note(stored, found.get("chave_idempotencia"))

    def _note(self, stored: _Stored, key: str | None) -> None:
        self._by_id[stored.run_id] = stored
        if key is not None:
            self._by_key[key] = stored


def _again(birth: Birth, stored: _Stored, otherwise: CreationOutcome) -> Created:
    return Created(CreationOutcome.SAME if stored.fingerprint == birth.fingerprint else otherwise, stored.run_id)
