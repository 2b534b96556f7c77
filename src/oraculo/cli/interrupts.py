"""Ctrl-C while a command follows a run: the command ends, the run goes on."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from oraculo.cli import output


@contextmanager
def goes_on(run_id: str, context: typer.Context) -> Iterator[None]:
    """Print how to follow the run when Ctrl-C ends the command."""
    try:
        yield
    except KeyboardInterrupt:
        output.note(f"run {run_id} goes on; follow it with:")
        output.note(f"  {watch_command(run_id, context)}")
        raise typer.Exit(output.INTERRUPTED) from None


def watch_command(run_id: str, context: typer.Context) -> str:
    """Return the command that follows a run, with `--url` if this command was given it."""
    source = context.get_parameter_source("url")
    is_named = source is not None and source.name == "COMMANDLINE"
    where = f" --url {shlex.quote(context.params['url'])}" if is_named else ""
    return f"oraculo runs watch {shlex.quote(run_id)}{where}"
