"""`oraculo pipelines`: the definitions on a server, and the validation of files without one."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from oraculo.cli import output
from oraculo.cli.client import Refused, ServerClient, Unreachable
from oraculo.cli.options import DEFAULT_URL, ApiKey, AsJson, GivenUrl, Url
from oraculo.cli.table import Column, print_table
from oraculo.errors import Fault, InvalidInput, InvalidPipeline

if TYPE_CHECKING:
    from oraculo.pipeline.definition import Definition

_NONE: Mapping[str, int | None] = {}
_ORIGINS = {"embutido": "built in", "pasta": "folder", "api": "API"}

app = typer.Typer(no_args_is_help=True, help="Pipelines: list, show, validate, put, delete.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="As `pipelines list` shows it.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML or JSON file; its `name` is the pipeline's.")]
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="YAML or JSON files, or folders of them.")]


@app.command("list")
def list_pipelines(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the pipelines that the server knows."""
    with ServerClient(url, api_key) as server:
        answer = _all_pipelines(server)
        if as_json:
            output.print_json(answer)
            return
        rows = [
            (each["name"], _ORIGINS.get(each["origem"], each["origem"]), each["description"])
            for each in answer["pipelines"]
        ]
        columns = (Column("name"), Column("from"), Column("description", prose=True))
        print_table(columns, rows, empty="no pipelines")
        for bad in answer.get("arquivos_invalidos", ()):
            output.complain(_bad_file(bad))


def _all_pipelines(server: ServerClient) -> dict[str, Any]:
    answer: dict[str, Any] = server.get("/pipelines")
    while cursor := answer.pop("cursor", None):
        page = server.get("/pipelines", cursor=cursor)
        answer["pipelines"] += page["pipelines"]
        answer["cursor"] = page["cursor"]
    return answer


def _bad_file(bad: dict[str, Any]) -> str:
    state = "its last good version is used" if bad["versao_anterior_em_uso"] else "not used"
    reason = "; ".join(str(Fault(fault["campo"], fault["motivo"])) for fault in bad["erros"])
    return f"{bad['arquivo'] or 'the pipelines folder'} (pipeline {bad['pipeline']}, {state}): {reason}"


@app.command()
def show(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show a pipeline's definition, as YAML that can be put again, or as JSON."""
    with ServerClient(url, api_key) as server:
        document = server.get(f"/pipelines/{quote(name, safe='')}")
        if as_json:
            output.print_json(document)
            return
        import yaml

        about = {key: document.pop(key) for key in ("origem", "hash") if key in document}
        typer.echo(f"# {', '.join(f'{key}: {value}' for key, value in about.items())}")
        for warning in document.pop("avisos", ()):
            typer.echo(f"# warning: {Fault(warning['campo'], warning['motivo'])}")
        typer.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip())


@app.command()
def put(file: File, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Define or replace a pipeline on the server, from a YAML or JSON file.

    Warns of types that look mistyped, and of queues that nobody serves now.
    """
    from oraculo.engine.pipeline_folder import pipeline_bytes
    from oraculo.pipeline.text import read_pipeline

    try:
        text = pipeline_bytes(file)
    except OSError as error:
        raise InvalidInput.at(str(file), f"cannot be read: {error.strerror}") from None
    definition = read_pipeline(text)
    kind = "application/json" if file.suffix == ".json" else "application/yaml"
    with ServerClient(url, api_key) as server:
        document = server.put(f"/pipelines/{quote(definition.name, safe='')}", text, kind)
        if as_json:
            output.print_json(document)
            return
        output.print_line(f"pipeline {document['name']} is in use: {output.counted(len(document['steps']), 'step')}")
        for warning in document["avisos"]:
            output.note(f"warning: {Fault(warning['campo'], warning['motivo'])}")


@app.command()
def delete(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Delete a pipeline that was put. One of the folder or built in, of that name, is used again."""
    with ServerClient(url, api_key) as server:
        server.delete(f"/pipelines/{quote(name, safe='')}")
    if as_json:
        output.print_json({"name": name, "apagado": True})
    else:
        output.print_line(f"pipeline {name} deleted")


@app.command()
def validate(files: Files, url: GivenUrl = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Check definitions without a server, and show the queue of each step.

    Each fault is named with its step; exit status 2 when there is one. Warns of types that look mistyped and, with
    --url, of queues that nobody serves now.
    """
    findings = list(check_files(files, {} if url is None else _consumers(url, api_key)))
    if as_json:
        output.print_json({"arquivos": findings})
    else:
        _print(findings)
    if any(finding["erros"] for finding in findings):
        raise typer.Exit(output.BAD_USAGE)


def _consumers(url: str, api_key: str | None) -> dict[str, int | None]:
    """Return the number of consumers of each queue, as far as the server's brokers count them."""
    try:
        with ServerClient(url, api_key) as server:
            return {queue["fila"]: queue["consumidores"] for queue in server.get("/filas")["filas"]}
    except (Refused, Unreachable) as error:
        output.note(f"oraculo: nobody says which queues are served: {error}")
        return {}


def check_files(paths: Sequence[Path], consumers: Mapping[str, int | None] = _NONE) -> Iterator[dict[str, Any]]:
    """Yield one finding for each file, with every fault. `consumers` gives warnings of queues that nobody serves."""
    names: dict[str, Path] = {}
    for path in _expanded(paths):
        definition, faults = _check(path)
        name = None if definition is None else definition.name
        if name is not None and (first := names.setdefault(name, path)) != path:
            faults.append(Fault("name", f"'{name}' is the name of {first} already"))
        finding = {"arquivo": str(path), "pipeline": name, "valido": not faults, "erros": _written(faults)}
        yield finding | ({} if definition is None else _what_it_does(definition, consumers))


def _what_it_does(definition: "Definition", consumers: Mapping[str, int | None]) -> dict[str, Any]:
    from oraculo.pipeline.advice import mistyped_types, unserved_queues
    from oraculo.wire.naming import is_own_queue

    queues = {step.id: step.queue if step.bridge is None else step.bridge.url for step in definition.steps}
    warnings = mistyped_types(definition)
    if any(count is not None for count in consumers.values()):  # else the brokers do not count consumers
        served = [queue for queue, count in consumers.items() if count and not is_own_queue(queue)]
        known = {**dict.fromkeys((step.queue for step in definition.steps), 0), **consumers}
        warnings += unserved_queues(definition, known, served)
    return {"filas": queues, "avisos": _written(warnings)}


def _written(faults: Sequence[Fault]) -> list[dict[str, str]]:
    return [{"campo": fault.field, "motivo": fault.problem} for fault in faults]


def _expanded(paths: Sequence[Path]) -> Iterator[Path]:
    from oraculo.engine.pipeline_folder import pipeline_files

    for path in paths:
        if path.is_dir():
            yield from pipeline_files(path)
        else:
            yield path


def _check(path: Path) -> tuple["Definition | None", list[Fault]]:
    from oraculo.engine.pipeline_folder import pipeline_bytes
    from oraculo.pipeline.text import read_pipeline

    try:
        return read_pipeline(pipeline_bytes(path)), []
    except InvalidPipeline as error:
        return None, list(error.faults)
    except OSError as error:
        return None, [Fault("", f"cannot be read: {error.strerror}")]


def _print(findings: Sequence[dict[str, Any]]) -> None:
    if not findings:
        output.note("no pipeline files there (.yaml, .yml, .json)")
    for finding in findings:
        if finding["valido"]:
            output.print_line(f"{finding['arquivo']}: ok, pipeline {finding['pipeline']}")
            for step, queue in finding["filas"].items():
                output.print_line(f"  {step} → {queue}")
        for warning in finding.get("avisos", ()):
            output.note(f"warning: {finding['arquivo']}: {Fault(warning['campo'], warning['motivo'])}")
        for fault in finding["erros"]:
            output.complain(f"{finding['arquivo']}: {Fault(fault['campo'], fault['motivo'])}")
