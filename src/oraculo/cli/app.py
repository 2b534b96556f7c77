"""The command `oraculo`: every command in one group, and each expected error as one line and an exit status."""

import io
import platform
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from oraculo import __version__
from oraculo.cli import (
    asyncapi,
    check_worker,
    dlq,
    doctor,
    migrate,
    output,
    pipelines,
    queues,
    runs,
    server,
    simulate,
    submit,
)
from oraculo.cli.options import AsJson
from oraculo.errors import OraculoError

# typer has click inside itself or as a dependency, and exports only this subclass of click's usage error.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class OneLineErrors(TyperGroup):
    """A command group that prints an expected error as one line on stderr and exits with 2."""

    def main(self, args: Sequence[str] | None = None, *names: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            code = super().main(args, *names, **{**extra, "standalone_mode": False})
            sys.stdout.flush()
        except _UsageError as error:
            code = _complain_of_usage(error)
        except OraculoError as error:
            code = output.complain(str(error))
        except BrokenPipeError:
            code = output.stop_writing()
        except typer.Abort:
            code = output.INTERRUPTED
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _complain_of_usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    message = str(getattr(error, "format_message", error.__str__)()).strip()
    if not message or "\n" in message:  # a group without a command: its message is the help, or empty
        print(message, end="\n" if message else "", file=sys.stderr)
        return output.BAD_USAGE
    return output.complain(message if context is None else f"{message} (see `{context.command_path} --help`)")


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # plain help is there in half the time
    pretty_exceptions_enable=False,
    help="ORÁCULO: orchestrates work that many services do together.",
    epilog=(
        "Exit status: 0; 1 when the run did not succeed, or not in time, and when doctor, simulate or check-worker "
        "found a fault; 2 for bad usage or settings, and when a server does not answer or refuses; 130 when Ctrl-C "
        "cut it short."
    ),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oraculo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(server.dev)
app.command()(server.serve)
app.command()(server.api)
app.command()(server.engine)
# Options that it does not know are for Celery.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(server.worker)
app.command()(submit.submit)
app.add_typer(runs.app, name="runs")
app.add_typer(queues.app, name="queues")
app.add_typer(dlq.app, name="dlq")
app.add_typer(pipelines.app, name="pipelines")
app.command()(asyncapi.asyncapi)
app.command()(simulate.simulate)
app.command()(check_worker.check_worker)
app.command()(migrate.migrate)
app.command()(doctor.doctor)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    if as_json:
        output.print_json({"versao": __version__, "python": platform.python_version()})
    else:
        typer.echo(f"oraculo {__version__}")


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an encoding that lacks `→` must not end a command
    app(prog_name="oraculo")
