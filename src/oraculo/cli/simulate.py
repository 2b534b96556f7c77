"""`oraculo simulate FILE`: a rehearsal of a pipeline under simulated faults."""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oraculo.cli import output
from oraculo.cli.options import AsJson
from oraculo.errors import Fault, InvalidInput, InvalidPipeline

if TYPE_CHECKING:
    from oraculo.pipeline.definition import Definition
    from oraculo.testing.simulation.rehearsal import Rehearsal

File = Annotated[Path, typer.Argument(help="A pipeline in YAML or JSON.")]
Seeds = Annotated[int, typer.Option(min=1, max=100_000, help="Number of schedules to try.")]
Seed = Annotated[int | None, typer.Option(help="Try this schedule alone.")]
FaultRates = Annotated[
    list[str] | None,
    typer.Option("--fault", help="A fault and its rate, as drop=0.05; the usual ones unless given. Repeatable."),
]
Latencies = Annotated[
    list[str] | None, typer.Option("--latency", help="Mean seconds of a step, as VOICE_OVER=12. Repeatable.")
]
Failures = Annotated[
    list[str] | None, typer.Option("--failure", help="Share of a step's failed attempts, as CAPTIONS=0.3. Repeatable.")
]


def simulate(
    file: File,
    seeds: Seeds = 200,
    seed: Seed = None,
    fault: FaultRates = None,
    latency: Latencies = None,
    failure: Failures = None,
    as_json: AsJson = False,
) -> None:
    """Rehearse a pipeline under faults: does it always end, how, when, and which deadline is tight?"""
    from oraculo.testing.simulation.campaign import silence_logs
    from oraculo.testing.simulation.faults import Faults
    from oraculo.testing.simulation.rehearsal import rehearse
    from oraculo.testing.simulation.scenario import StandIn

    definition = _read(file)
    latencies, failures = _by_step("--latency", latency, definition), _by_step("--failure", failure, definition)
    usual = StandIn(1.0, 0.05)
    stand_ins = {
        step.id: StandIn(latencies.get(step.id, usual.latency), failures.get(step.id, usual.failure_rate))
        for step in definition.steps
    }
    silence_logs()
    tried = _counted(range(seeds) if seed is None else [seed])
    found = rehearse(definition, stand_ins, usual, Faults.parse(fault) if fault else Faults.usual(), tried)
    if as_json:
        output.print_json(_document(definition, found))
    else:
        _print(definition, found)
    raise typer.Exit(output.NOT_SUCCEEDED if found.violations else output.SUCCEEDED)


def _counted(seeds: Sequence[int]) -> Iterator[int]:
    """Yield the seeds, and show the progress on a terminal."""
    for number, seed in enumerate(seeds, start=1):
        if sys.stderr.isatty():
            typer.echo(f"\rseed {number} of {len(seeds)}", err=True, nl=False)
        yield seed
    if sys.stderr.isatty():
        typer.echo("\r\x1b[K", err=True, nl=False)


def _read(file: Path) -> "Definition":
    from oraculo.engine.pipeline_folder import pipeline_bytes
    from oraculo.pipeline.text import read_pipeline
    from oraculo.settings import load_settings

    runs = load_settings().runs
    try:
        return read_pipeline(pipeline_bytes(file), default_retry=runs.retry, default_timeout=runs.timeout)
    except InvalidPipeline as error:
        faults = [Fault(f"{file.name}: {one.field}" if one.field else file.name, one.problem) for one in error.faults]
        raise InvalidPipeline(faults) from None
    except FileNotFoundError:
        raise InvalidInput(Fault(str(file), "there is no such file")) from None
    except OSError as error:
        raise InvalidInput(Fault(str(file), f"cannot be read: {error.strerror}")) from None


def _by_step(option: str, settings: list[str] | None, definition: "Definition") -> dict[str, float]:
    from oraculo.wire.naming import nearest

    known = {step.id for step in definition.steps}
    values: dict[str, float] = {}
    for setting in settings or []:
        step, _, text = setting.rpartition("=")
        if step not in known:
            raise InvalidInput(Fault(option, f"the pipeline has no step '{step}'{nearest(step, known)}"))
        try:
            values[step] = float(text)
        except ValueError:
            values[step] = -1.0
        is_latency = option == "--latency"
        if not (0 < values[step] < math.inf if is_latency else 0 <= values[step] <= 1):  # NaN fails too
            right = "more than 0 seconds, as 12" if is_latency else "a share from 0 to 1"
            raise InvalidInput(Fault(option, f"{step} needs {right}; got '{text}'"))
    return values


def _document(definition: "Definition", found: "Rehearsal") -> dict[str, Any]:
    return {
        "pipeline": definition.name,
        "seeds": found.seeds,
        "always_ends": not found.violations,
        "violations": found.violations,
        "statuses": dict(found.statuses),
        "seconds": {f"p{percent}": round(found.percentile(percent), 3) for percent in (50, 95, 99)},
        "longest_path": {"steps": found.longest_path, "expected_seconds": round(found.longest_path_seconds, 3)},
        "tight_deadlines": [
            {"of": one.of, "seconds": one.seconds, "p95": one.p95 and round(one.p95, 3), "met": one.met}
            for one in found.tight
        ],
        "judged": found.judged,
        "faults": dict(found.troubles),
    }


def _print(definition: "Definition", found: "Rehearsal") -> None:
    statuses = ", ".join(f"{count} {status}" for status, count in found.statuses.most_common())
    output.print_line(f"pipeline {definition.name}: {found.seeds} schedules, {sum(found.troubles.values())} faults")
    ends = "yes" if not found.violations else f"NO: {len(found.violations)} schedules broke a law"
    output.print_line(f"always ends: {ends}")
    output.print_line(f"end statuses: {statuses}")
    took = ", ".join(f"p{percent} {found.percentile(percent):.1f} s" for percent in (50, 95, 99))
    output.print_line(f"times: {took}")
    path = " → ".join(found.longest_path)
    output.print_line(f"longest path: {path}, {found.longest_path_seconds:.1f} s when nothing goes wrong")
    for one in found.tight:
        well = "none ended well" if one.p95 is None else f"95 % of what ended well took at most {one.p95:.1f} s"
        detail = f"{well}, {one.met} of {found.judged} ran into it"
        output.print_line(f"too tight: the deadline of {one.of}, {one.seconds:g} s ({detail})")
    if not found.tight:
        output.print_line("no deadline is too tight")
    if found.judged < found.seeds:
        output.print_line(f"deadlines are judged by the {found.judged} schedules that lost no message")
    for seed, how in list(found.violations.items())[:5]:
        output.print_line(f"seed {seed}: {how}")
