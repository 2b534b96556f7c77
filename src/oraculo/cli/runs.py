"""`oraculo runs`: looking at runs, following them, stopping them and trying again what failed."""

from typing import Annotated, Any

import typer

from oraculo.cli import output
from oraculo.cli.client import Server, run_path
from oraculo.cli.options import DEFAULT_URL, ApiKey, AsJson, RunId, Url
from oraculo.cli.submit import print_aggregate
from oraculo.cli.watch import watch_run

app = typer.Typer(no_args_is_help=True, help="Runs: list, show, watch, explain, cancel, retry.")


@app.command("list")
def list_runs(
    status: Annotated[str | None, typer.Option(help="Only those in this status, as parcial.")] = None,
    pipeline: Annotated[str | None, typer.Option(help="Only those of this pipeline or route.")] = None,
    text: Annotated[str | None, typer.Option("--query", "-q", help="Only those with this in id or name.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    cursor: Annotated[str | None, typer.Option(help="Go on where a list before ended.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first."""
    with Server(url, api_key) as server:
        page = server.get("/orquestracoes", status=status, pipeline=pipeline, q=text, limit=limit, cursor=cursor)
        if as_json:
            output.print_json(page)
            return
        columns = ("correlation_id", "status", "pipeline", "tarefas", "iniciada em", "duração")
        output.print_table(columns, [_row(run) for run in page["orquestracoes"]], empty="no runs")
        if page.get("cursor"):
            output.note(f"there are more: add --cursor {page['cursor']}")


def _row(run: dict[str, Any]) -> output.Row:
    return (
        run["correlation_id"],
        run["status"],
        run["pipeline"],
        output.tally(run["resumo"]),
        output.moment(run["iniciada_em"]),
        output.seconds(run["duracao_ms"]),
    )


@app.command()
def show(run_id: RunId, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show a run, its tasks and what came of it."""
    with Server(url, api_key) as server:
        run = server.get(run_path(run_id))
        if as_json:
            output.print_json(run)
            return
        name = f" ({run['pipeline']})" if run["pipeline"] else ""
        output.print_line(
            f"run {run['correlation_id']}{name} {run['status']}: {output.tally(run['resumo'])}; "
            f"started {output.moment(run['iniciada_em'])}, deadline {output.moment(run['prazo'])}"
        )
        columns = ("tarefa", "status", "fila", "tentativa", "progresso", "depende de", "motivo")
        output.print_table(columns, [_task_row(task) for task in run["tarefas"]], empty="it has no tasks")
        if run["concluida_em"]:
            print_aggregate(run)


def _task_row(task: dict[str, Any]) -> output.Row:
    progress = task["progresso"] or {}
    percent = progress.get("percentual")
    told = [None if percent is None else f"{percent:g} %", progress.get("mensagem")]
    return (
        task["id"],
        task["status"],
        task["fila"],
        f"{task['tentativas']} of {task['max_tentativas']}",
        " ".join(part for part in told if part) or None,
        ", ".join(task["depende_de"]) or None,
        task["motivo"],
    )


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
            output.print_line(answer["explicacao"])


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
