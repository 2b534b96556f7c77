"""The page `docs/explanation/state-machine.md`, drawn from `core.transitions`, so that the two cannot disagree."""

from collections.abc import Iterable, Iterator
from enum import StrEnum

from oraculo.core.run import OPEN, RunStatus, TaskStatus
from oraculo.core.transitions import RUN_TRANSITIONS, TASK_TRANSITIONS
from scripts.states_drawing import Edge, states_picture

_INTRODUCTION = """\
# The state machine

<!-- Made by scripts/generate_docs.py from src/oraculo/core/transitions.py: change that, then run `make docs`. -->

A run is a set of tasks, one for each step or destination. Runs and tasks each have a status. This page shows every way
in which one status becomes another; nothing else can happen.

A duplicate, late or unknown answer is no transition. It is counted, the run's history records it, and no status
changes.
"""

_TASK_TEXT = """\
A task in `pendente` waits for earlier steps, for the broker to take its command, or for its next attempt.
An answer may overtake the broker's confirmation. So a pending task accepts answers once its command was published.

For an open task the API also shows a `fase`:

| `fase` | meaning |
|---|---|
| `na_fila` | its command waits in the queue |
| `em_trabalho` | its worker reported progress, or its command left the queue |
| `aguardando_nova_tentativa` | it waits for its next attempt, until `proxima_tentativa_em` |
| `null` | the broker does not say which messages were taken, or the step is behind a bridge |

The reason (`motivo`) of a timeout describes its queue shortly before the timeout: `no answer in 30 s; nobody listened
on queue executador_x`.
"""

_RUN_TEXT = """\
A run ends when no task is open or its quorum is met, at its deadline, or by a cancel. Its end status follows from its
tasks, never from the order in which answers came. The first line that is true decides:

| of the run | its status |
|---|---|
| every task succeeded | `concluida` |
| someone cancelled it | `cancelada` |
| in a pipeline without a met quorum, a required step failed or ran into its own deadline | `erro` |
| in a pipeline without a met quorum, the run's deadline cut off a required step | `timeout` |
| a task succeeded | `parcial` |
| a task failed | `erro` |
| a task ran into a deadline | `timeout` |
| none of these | `cancelada` |
"""


TASK_PICTURE, RUN_PICTURE = "docs/images/states-of-a-task.svg", "docs/images/states-of-a-run.svg"


def state_machine_page() -> str:
    parts = ("A task", _TASK_TEXT, TASK_PICTURE, _task_edges()), ("A run", _RUN_TEXT, RUN_PICTURE, _run_edges())
    return "\n".join([_INTRODUCTION, *(line for part in parts for line in _section(*part))])


def state_machine_pictures() -> dict[str, str]:
    """Return the pictures of the page, by their paths."""
    title = "Every way in which the status of a {} becomes another"
    task = states_picture(title.format("task"), list(TaskStatus), OPEN, _task_edges())
    run = states_picture(title.format("run"), list(RunStatus), [RunStatus.RUNNING], _run_edges())
    return {TASK_PICTURE: task, RUN_PICTURE: run}


def _task_edges() -> list[Edge]:
    return [(before, trigger, after) for before, moves in TASK_TRANSITIONS.items() for trigger, after in moves.items()]


def _run_edges() -> list[Edge]:
    return [
        (before, trigger, after)
        for before, moves in RUN_TRANSITIONS.items()
        for trigger, endings in moves.items()
        for after in endings
    ]


def _section(title: str, text: str, picture: str, edges: list[Edge]) -> Iterator[str]:
    yield f"## {title}\n"
    yield text
    yield f"![A line for each status, an arrow for each transition between two](../{picture.removeprefix('docs/')})\n"
    yield from _table(edges)
    yield ""


def _table(edges: Iterable[Edge]) -> Iterator[str]:
    yield "| in | when | it becomes |"
    yield "|---|---|---|"
    rows: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    for before, trigger, after in edges:
        rows.setdefault((before, trigger), []).append(f"`{after}`")
    yield from (f"| `{before}` | {trigger} | {' or '.join(after)} |" for (before, trigger), after in rows.items())
