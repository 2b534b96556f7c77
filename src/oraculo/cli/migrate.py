"""`oraculo migrate`: the update of the store's schema."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from oraculo.cli import output
from oraculo.cli.options import AsJson

if TYPE_CHECKING:
    from oraculo.ports.store import Storage


def migrate(as_json: AsJson = False) -> None:
    """Bring the schema of ORACULO_STORE_URL up to date.

    Safe to run twice, or by several at once. Engines of the version before may go on while it runs; those that use a
    SQLite file are stopped first.
    """
    from oraculo.bootstrap import make_store
    from oraculo.settings import load_settings

    store = make_store(load_settings())
    done = asyncio.run(_migrated(store))
    if as_json:
        output.print_json({"store": store.name, "migracoes": list(done)})
        return
    for step in done:
        typer.echo(f"{store.name}: {step}")
    typer.echo(f"{store.name}: the schema is up to date")


async def _migrated(store: "Storage") -> Sequence[str]:
    try:
        return await store.migrate()
    finally:
        await store.close()
