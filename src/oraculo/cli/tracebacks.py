"""The tracebacks of a run's failed attempts, as its history has them."""

from collections.abc import Iterator, Sequence
from typing import Any

from oraculo.cli import output
from oraculo.cli.client import ServerClient, run_path
from oraculo.cli.times import moment


def traced_attempts(server: ServerClient, run_id: str) -> Iterator[dict[str, Any]]:
    """Yield the history entries that have a traceback, oldest first."""
    after: int | None = 0
    while after is not None:
        page = server.get(run_path(run_id, "/eventos"), apos=after)
        yield from (entry for entry in page["eventos"] if entry["rastreamento"] is not None)
        after = page["proximo"]


def print_tracebacks(attempts: Sequence[dict[str, Any]]) -> None:
    if not attempts:
        output.note("no attempt left a traceback")
    for attempt in attempts:
        output.print_line("")
        output.print_line(
            f"{attempt['tarefa']}, attempt {attempt['tentativa']}, failed {moment(attempt['timestamp'])}:"
        )
        for line in attempt["rastreamento"].splitlines():
            output.print_line(f"  {line}")
