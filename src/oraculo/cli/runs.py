"""`oraculo runs`: looking at runs, following them, stopping them and trying again what failed."""

from typing import Annotated

import typer

from oraculo.cli import output
from oraculo.cli.client import Server, run_path
from oraculo.cli.options import DEFAULT_URL, ApiKey, AsJson, RunId, Url
from oraculo.cli.run_table import print_run, print_runs
from oraculo.cli.times import localized, moment_option
from oraculo.cli.watch import watch_run

app = typer.Typer(no_args_is_help=True, help="Runs: list, show, watch, explain, cancel, retry.")


Status = Annotated[
    str | None, typer.Option(metavar="STATUS[,STATUS]", help="Only those in one of these, as erro,timeout.")
]
Pipeline = Annotated[str | None, typer.Option(help="Only those of this pipeline or route.")]
Text = Annotated[str | None, typer.Option("--query", "-q", help="Only those with this in id or name.")]
Since = Annotated[
    str | None, typer.Option(metavar="WHEN", help="Only those begun since: 2h (ago), 14:30, 2026-01-31, or ISO 8601.")
]
Until = Annotated[str | None, typer.Option(metavar="WHEN", help="Only those begun before: written as for --since.")]


def _filter(
    status: str | None, pipeline: str | None, text: str | None, since: str | None, until: str | None
) -> dict[str, str]:
    """Return the query of the API. Raises InvalidInput for a moment that cannot be read."""
    given = {
        "status": status,
        "pipeline": pipeline,
        "q": text,
        "desde": moment_option("--since", since),
        "ate": moment_option("--until", until),
    }
    return {name: value for name, value in given.items() if value is not None}


@app.command("list")
def list_runs(
    status: Status = None,
    pipeline: Pipeline = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Go on where a list before ended.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    wanted = _filter(status, pipeline, text, since, until)
    with Server(url, api_key) as server:
        page = server.get("/orquestracoes", **wanted, limit=limit, cursor=cursor)
        if as_json:
            output.print_json(page)
            return
        print_runs(page["orquestracoes"])
        if page.get("cursor"):
            output.note(f"there are more: add --cursor {page['cursor']}")


@app.command()
def show(run_id: RunId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show a run, its tasks and what came of it."""
    with Server(url, api_key) as server:
        run = server.get(run_path(run_id))
        if as_json:
            output.print_json(run)
            return
        print_run(run)


@app.command()
def watch(run_id: RunId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Follow a run live until it ends.

    On a terminal a table that moves, else a line for each event; with --json one JSON object a line. Exit status 0
    when the run succeeded (concluida), 1 when it did not.
    """
    with Server(url, api_key) as server:
        status = watch_run(server, run_id, as_json=as_json)
    raise typer.Exit(output.exit_status(status))


@app.command()
def explain(run_id: RunId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Say in one sentence what a run waits for."""
    with Server(url, api_key) as server:
        answer = server.get(run_path(run_id, "/explicacao"))
        if as_json:
            output.print_json(answer)
        else:
            output.print_line(localized(answer["explicacao"]))


@app.command()
def cancel(run_id: RunId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Cancel a run that has not ended."""
    _act(run_id, "/cancelar", url, api_key, as_json)


@app.command()
def retry(run_id: RunId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Run again only what failed, keeping what succeeded."""
    _act(run_id, "/repetir", url, api_key, as_json)


def _act(run_id: str, action: str, url: str, api_key: str | None, as_json: bool) -> None:
    with Server(url, api_key) as server:
        run = server.post(run_path(run_id, action))
        if as_json:
            output.print_json(run)
        else:
            output.print_line(f"run {run['correlation_id']} {run['status']}")
