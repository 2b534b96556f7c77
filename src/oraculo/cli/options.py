"""Options that several commands share."""

import math
from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"


def finite(number: float | None) -> float | None:
    """For the callback of an option: a range lets nan through, and JSON has no word for it nor for inf."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"must be a number, as 30; got {number}")
    return number


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
