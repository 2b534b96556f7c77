"""Options that several commands share."""

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"
LOOPBACK = ("127.0.0.1", "::1", "localhost")

Url = Annotated[str, typer.Option("--url", envvar="ORACULO_URL", help="Where the server is.", show_envvar=True)]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="ORACULO_API_KEY", help="Sent with each request.", show_envvar=True),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
RunId = Annotated[str, typer.Argument(metavar="ID", help="The run's correlation_id.")]
