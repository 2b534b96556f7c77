"""`oraculo runs`: list, show, watch, explain, cancel and retry runs."""

import sys
from contextlib import nullcontext, redirect_stdout
from typing import Annotated, NamedTuple

import typer

from oraculo.cli import output
from oraculo.cli.bulk import Yes, bulk, confirm
from oraculo.cli.client import ServerClient, run_path
from oraculo.cli.interrupts import goes_on
from oraculo.cli.options import DEFAULT_URL, ApiKey, AsJson, RunId, Url
from oraculo.cli.prefixes import each_run, with_run
from oraculo.cli.run_table import print_run, print_runs
from oraculo.cli.times import localized, moment_option
from oraculo.cli.tracebacks import print_tracebacks, traced_attempts
from oraculo.cli.watch import watch_run
from oraculo.errors import InvalidInput

app = typer.Typer(no_args_is_help=True, help="Runs: list, show, watch, explain, cancel, retry.")


Status = Annotated[
    str | None, typer.Option(metavar="STATUS[,STATUS]", help="Only runs in one of these statuses, as erro,timeout.")
]
Pipeline = Annotated[str | None, typer.Option(help="Only runs of this pipeline or route.")]
Text = Annotated[str | None, typer.Option("--query", "-q", help="Only runs with this text in their id or name.")]
Since = Annotated[
    str | None,
    typer.Option(metavar="WHEN", help="Only runs begun since then: 2h (ago), 14:30, 2026-01-31, or ISO 8601."),
]
Until = Annotated[str | None, typer.Option(metavar="WHEN", help="Only runs begun before then, written as for --since.")]


def _filter(
    status: str | None, pipeline: str | None, text: str | None, since: str | None, until: str | None
) -> dict[str, str]:
    """Return the query of the API. Raises InvalidInput for an empty value or an unreadable moment."""
    options = {"--status": status, "--pipeline": pipeline, "--query": text, "--since": since, "--until": until}
    for option, value in options.items():
        if value is not None and not value.strip():  # an unset shell variable must not mean every run
            raise InvalidInput.at(option, "is empty; give it a value, or leave it out")
    given = {
        "status": status,
        "pipeline": pipeline,
        "q": text,
        "desde": moment_option("--since", since),
        "ate": moment_option("--until", until),
    }
    return {name: value for name, value in given.items() if value is not None}


OptionalRunId = Annotated[
    str | None, typer.Argument(metavar="[ID]", help="The run's correlation_id, or its unique beginning.")
]
_PREVIEWED = 10


@app.command("list")
def list_runs(
    status: Status = None,
    pipeline: Pipeline = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, help="Most runs to list.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Go on where the previous list ended.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    wanted = _filter(status, pipeline, text, since, until)
    with ServerClient(url, api_key) as server:
        page = server.get("/orquestracoes", **wanted, limit=limit, cursor=cursor)
        if as_json:
            output.print_json(page)
            return
        print_runs(page["orquestracoes"])
        if page.get("cursor"):
            output.note(f"there are more: add --cursor {page['cursor']}")


@app.command()
def show(
    run_id: RunId,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show the tracebacks of failed attempts, too, where workers sent them."),
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show a run, its tasks and its results."""
    with ServerClient(url, api_key) as server:
        run = with_run(server, run_id, lambda whole: server.get(run_path(whole)))
        traced = list(traced_attempts(server, run["correlation_id"])) if verbose else None
        if as_json:
            output.print_json(run if traced is None else run | {"rastreamentos": traced})
            return
        print_run(run)
        if traced is not None:
            print_tracebacks(traced)


@app.command()
def watch(
    context: typer.Context, run_id: RunId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Follow a run live until it ends.

    It draws a table on a terminal, and prints a line for each event elsewhere; with --json one JSON object a line.
    Exit status 0 when the run succeeded (concluida), else 1.
    """
    with ServerClient(url, api_key) as server:
        run = with_run(server, run_id, lambda whole: server.get(run_path(whole)))
        with goes_on(run["correlation_id"], context):
            status = watch_run(server, run, as_json=as_json)
    raise typer.Exit(output.exit_status(status))


@app.command()
def explain(run_id: RunId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Say in one sentence what a run waits for."""
    with ServerClient(url, api_key) as server:
        answer = with_run(server, run_id, lambda whole: server.get(run_path(whole, "/explicacao")))
        if as_json:
            output.print_json(answer)
        else:
            output.print_line(localized(answer["explicacao"]))


@app.command()
def cancel(
    run_id: OptionalRunId = None,
    status: Status = None,
    pipeline: Pipeline = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Cancel an open run, or all that fit a filter."""
    wanted = _filter(status, pipeline, text, since, until)
    with ServerClient(url, api_key) as server:
        _act(server, _CANCEL, run_id, wanted, yes=yes, as_json=as_json)


@app.command()
def retry(
    run_id: OptionalRunId = None,
    status: Status = None,
    pipeline: Pipeline = None,
    text: Text = None,
    since: Since = None,
    until: Until = None,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Run again what did not succeed, in one run or in all that fit a filter."""
    wanted = _filter(status, pipeline, text, since, until)
    with ServerClient(url, api_key) as server:
        _act(server, _RETRY, run_id, wanted, yes=yes, as_json=as_json)


class _Action(NamedTuple):
    verb: str
    doing: str
    path: str
    statuses: str  # of the runs that it can be done to


_CANCEL = _Action("Cancel", "cancelling", "/cancelar", "em_execucao")
_RETRY = _Action("Retry what failed of", "retrying", "/repetir", "parcial,erro,timeout,cancelada")


def _act(
    server: ServerClient, action: _Action, run_id: str | None, wanted: dict[str, str], *, yes: bool, as_json: bool
) -> None:
    if (run_id is None) == (not wanted):
        raise InvalidInput.at("ID", "give the id of a run, or a filter as --status or --pipeline, and not both")
    if run_id is None:
        _act_on_all(server, action, {"status": action.statuses} | wanted, yes=yes, as_json=as_json)
        return
    run = with_run(server, run_id, lambda whole: server.post(run_path(whole, action.path)))
    if as_json:
        output.print_json(run)
    else:
        output.print_line(f"run {run['correlation_id']} {run['status']}")


def _act_on_all(server: ServerClient, action: _Action, wanted: dict[str, str], *, yes: bool, as_json: bool) -> None:
    runs = list(each_run(server, **wanted))
    if runs and not yes:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            print_runs(runs[:_PREVIEWED])
        if len(runs) > _PREVIEWED:
            output.note(f"… and {output.counted(len(runs) - _PREVIEWED, 'more run')}")
        confirm(f"{action.verb} {output.counted(len(runs), 'run')}?", yes)
    ids = [run["correlation_id"] for run in runs]
    done = bulk(action.doing, ids, lambda each: server.post(run_path(each, action.path)))
    if as_json:
        output.print_json({"orquestracoes": done.succeeded, "recusadas": done.refused})
    else:
        output.print_line(
            f"{action.doing}: {output.counted(len(done.succeeded), 'run')} done, {len(done.refused)} refused"
        )
    done.end()
