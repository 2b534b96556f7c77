"""`oraculo asyncapi`: the AsyncAPI document, from a server or made from the settings."""

from typing import Annotated, Any

import typer

from oraculo.cli import output
from oraculo.cli.client import ServerClient
from oraculo.cli.options import ApiKey, GivenUrl
from oraculo.errors import Fault, InvalidPipeline

AlwaysJson = Annotated[bool, typer.Option("--json", help="No effect: the document is always JSON.")]


def asyncapi(url: GivenUrl = None, api_key: ApiKey = None, _as_json: AlwaysJson = False) -> None:
    """Print the AsyncAPI 3 document of the queues and messages.

    Without --url it describes the routes of the settings, the built-in pipelines and those of the pipelines folder.
    """
    output.print_json(_fetch(url, api_key) if url else _make())


def _fetch(url: str, api_key: str | None) -> Any:
    with ServerClient(url, api_key) as server:
        return server.get("/asyncapi.json")


def _make() -> dict[str, Any]:
    """Raises InvalidSettings and InvalidPipeline."""
    from oraculo.api.asyncapi import document_of
    from oraculo.engine.pipelines import PipelineCatalogue, built_in_pipelines
    from oraculo.settings import load_settings

    settings = load_settings()
    runs = settings.runs
    of_folder = PipelineCatalogue(settings)
    of_folder.read_folder()
    if of_folder.bad_files:
        raise InvalidPipeline([Fault(bad.file, bad.reason) for bad in of_folder.bad_files])
    known = {**built_in_pipelines(runs.retry, runs.timeout), **of_folder.pipelines}
    return document_of(settings, known.values())
