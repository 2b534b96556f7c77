"""`oraculo`: all commands under one name, and every expected error as one line and an exit status."""

import os
import platform
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
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
from oraculo.errors import NO_THREAD, InvalidInput, OraculoError

# typer carries click inside itself, or depends on it, and exports of the usage errors this leaf alone.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_EXIT_GRACE = 5.0  # seconds
_NO_ROOM = "the system has no room for another thread: a limit (`ulimit -u`, a container's `pids`) or memory is used up"


class OneLineErrors(TyperGroup):
    """Says what is wrong in one line on stderr and ends with 2; never a traceback for what can be expected."""

    def main(self, args: Sequence[str] | None = None, *names: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        try:
            _expect_text(sys.argv[1:] if args is None else args)
            code = super().main(args, *names, **{**extra, "standalone_mode": False})
            if sys.stdout is not None:  # as it is where it was closed
                sys.stdout.flush()
        except _UsageError as error:
            code = _tell(error)
        except OraculoError as error:
            code = output.complain(str(error))
        except OSError as error:
            code = output.give_up(error)
        except RuntimeError as error:
            if str(error) != NO_THREAD:
                raise
            code = output.complain(_NO_ROOM)
        except typer.Abort:
            code = output.INTERRUPTED
        if not standalone_mode:
            return code
        sys.exit(code if isinstance(code, int) else 0)


def _expect_text(args: Sequence[str]) -> None:
    """Raises InvalidInput, which does not show the value of an option: it may be a secret. A file may have any name."""
    for before, arg in pairwise(["oraculo", *args]):
        try:
            arg.encode()
        except UnicodeEncodeError:  # Python has bytes that it cannot read as halves of surrogate pairs
            if os.path.lexists(arg.removeprefix("@")):
                continue
            name = (f"behind {before}" if before.startswith("-") else arg).partition("=")[0]
            raise InvalidInput.at(f"the argument {name}", "is not UTF-8; write it in that encoding") from None


def _tell(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    message = str(getattr(error, "format_message", error.__str__)()).strip()
    if not message or "\n" in message:  # a group without a command: the message is its help, or was printed already
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
    status = 1
    output.mend_streams()
    try:
        app(prog_name="oraculo")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    finally:
        _leave_in_time(status)


def _leave_in_time(status: int) -> None:
    """What a user's module does at the exit may never end: `multiprocessing` waits there for its pools."""
    last_resort = threading.Timer(_EXIT_GRACE, _leave, (status,))
    last_resort.daemon = True
    with suppress(RuntimeError):  # where no thread can be started
        last_resort.start()


def _leave(status: int) -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(status)
