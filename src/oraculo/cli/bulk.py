"""Actions on many runs or dead letters: the question before, the progress bar, and the list of refusals."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from oraculo.cli import output
from oraculo.cli.client import Refused
from oraculo.errors import InvalidInput

_NAMED = 5  # refusals that are shown one by one
_PASSED_ON = (401, 403)  # every further call would get the same refusal

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


class Done(NamedTuple):
    succeeded: Sequence[str]
    refused: dict[str, str]  # why, by id

    def end(self) -> None:
        """Name what was refused, and end with 2 when anything was."""
        for number, (each, why) in enumerate(self.refused.items()):
            if number == _NAMED:
                output.note(f"oraculo: {len(self.refused) - _NAMED} more were refused")
                break
            output.complain(f"{each}: {why}")
        if self.refused:
            raise typer.Exit(output.BAD_USAGE)


def confirm(question: str, yes: bool) -> None:
    """Ask, unless --yes was given. Raises InvalidInput where nobody can answer, and ends with 1 after a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput.at("--yes", f"is missing, and nobody is there to answer: {question}")
    if not typer.confirm(question, err=True):
        output.note("nothing was done")
        raise typer.Exit(output.NOT_SUCCEEDED)


def bulk(doing: str, ids: Sequence[str], call: Callable[[str], Any]) -> Done:
    """Call with each id, and go on after a refusal. Raises Refused when the server refuses the API key."""
    succeeded, refused = [], {}
    try:
        for each in _drawn(doing, ids):
            try:
                call(each)
                succeeded.append(each)
            except Refused as error:
                if error.status in _PASSED_ON:
                    raise
                refused[each] = str(error)
    except KeyboardInterrupt:
        output.note(f"{doing}: {len(succeeded)} of {len(ids)} done; the others are as they were")
        raise
    return Done(succeeded, refused)


def _drawn(doing: str, ids: Sequence[str]) -> Iterable[str]:
    """Return the ids, with a progress bar on a terminal."""
    if not sys.stderr.isatty():
        return ids
    from rich.console import Console
    from rich.progress import track

    return track(ids, doing, console=Console(stderr=True))
