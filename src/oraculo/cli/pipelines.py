"""`oraculo pipelines`: the definitions that a server knows, and the check of files before it does."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from oraculo.cli import output
from oraculo.cli.client import Server
from oraculo.cli.options import DEFAULT_URL, ApiKey, AsJson, Url
from oraculo.errors import Fault, InvalidPipeline

app = typer.Typer(no_args_is_help=True, help="Pipelines: list, show, validate.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="As `pipelines list` shows it.")]
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="YAML or JSON files, or folders of them.")]


@app.command("list")
def list_pipelines(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """List the pipelines that the server knows."""
    with Server(url, api_key) as server:
        answer = server.get("/pipelines")
        if as_json:
            output.print_json(answer)
            return
        rows = [(each["name"], each["origem"], each["description"]) for each in answer["pipelines"]]
        output.print_table(("name", "origem", "description"), rows, empty="no pipelines")


@app.command()
def show(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show a pipeline's definition: as a YAML file that could be put again, or as JSON."""
    with Server(url, api_key) as server:
        document = server.get(f"/pipelines/{quote(name, safe='')}")
        if as_json:
            output.print_json(document)
            return
        import yaml

        about = {key: document.pop(key) for key in ("origem", "hash") if key in document}
        typer.echo(f"# {', '.join(f'{key}: {value}' for key, value in about.items())}")
        yaml.SafeDumper.add_multi_representer(float, yaml.SafeDumper.represent_float)  # also for numbers as written
        typer.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True).rstrip())


@app.command()
def validate(files: Files, as_json: AsJson = False) -> None:
    """Check definitions without a server. Each fault is named with its step; exit status 2 when there is one."""
    findings = list(check_files(files))
    if as_json:
        output.print_json({"arquivos": findings})
    else:
        _tell(findings)
    if any(finding["erros"] for finding in findings):
        raise typer.Exit(output.BAD_USAGE)


def check_files(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """One finding a file, with every fault."""
    names: dict[str, Path] = {}
    for path, is_named in _expanded(paths):
        name, faults = _check(path, is_named)
        if name is not None and (first := names.setdefault(name, path)) != path:
            faults.append(Fault("name", f"'{name}' is the name of {first} already"))
        erros = [{"campo": fault.field, "motivo": fault.problem} for fault in faults]
        yield {"arquivo": str(path), "pipeline": name, "valido": not faults, "erros": erros}


def _expanded(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Each file, and whether it was named itself, and not its folder."""
    from oraculo.engine.catalogue import pipeline_files

    for path in paths:
        if path.is_dir():
            yield from ((file, False) for file in pipeline_files(path))
        else:
            yield path, True


def _check(path: Path, is_named: bool) -> tuple[str | None, list[Fault]]:
    from oraculo.core.pipeline_text import read_pipeline
    from oraculo.engine.catalogue import expect_regular, pipeline_bytes

    try:
        if not is_named:
            expect_regular(path)
        return read_pipeline(pipeline_bytes(path)).name, []
    except InvalidPipeline as error:
        return None, list(error.faults)
    except OSError as error:
        return None, [Fault("", f"cannot be read: {error.strerror}")]


def _tell(findings: Sequence[dict[str, Any]]) -> None:
    if not findings:
        output.note("no pipeline files there (.yaml, .yml, .json)")
    for finding in findings:
        if finding["valido"]:
            output.print_line(f"{finding['arquivo']}: ok, pipeline {finding['pipeline']}")
        for fault in finding["erros"]:
            output.complain(f"{finding['arquivo']}: {Fault(fault['campo'], fault['motivo'])}")
