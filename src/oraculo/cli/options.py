"""Options that several commands share."""

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option("--url", envvar="ORACULO_URL", help="Address of the server.", show_envvar=True)]
GivenUrl = Annotated[
    str | None,
    typer.Option("--url", envvar="ORACULO_URL", show_envvar=True, help="Ask this server, too; none unless given."),
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="ORACULO_API_KEY", help="API key to send with each request.", show_envvar=True),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
RunId = Annotated[str, typer.Argument(metavar="ID", help="The run's correlation_id, or its unique beginning.")]
