"""The page `docs/explanation/state-machine.md`, drawn from `core.transitions`, so that the two cannot disagree."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum

from oraculo.core.run import OPEN, RunStatus, TaskStatus
from oraculo.core.transitions import RUN_TRANSITIONS, TASK_TRANSITIONS

Edge = tuple[StrEnum, StrEnum, StrEnum]  # from, what happened, to

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

The reason (`motivo`) of a timeout describes the task's queue shortly before it: `no answer in 30 s; nobody listened on
queue executador_x`.
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


def state_machine_page() -> str:
    return "\n".join(
        [
            _INTRODUCTION,
            *_section("A task", _TASK_TEXT, _task_edges(), TaskStatus.PENDING, _is_ended_task),
            *_section("A run", _RUN_TEXT, _run_edges(), RunStatus.RUNNING, _is_ended_run),
        ]
    )


def _task_edges() -> list[Edge]:
    return [(before, trigger, after) for before, moves in TASK_TRANSITIONS.items() for trigger, after in moves.items()]


def _run_edges() -> list[Edge]:
    return [
        (before, trigger, after)
        for before, moves in RUN_TRANSITIONS.items()
        for trigger, endings in moves.items()
        for after in endings
    ]


def _is_ended_task(status: StrEnum) -> bool:
    return status not in OPEN


def _is_ended_run(status: StrEnum) -> bool:
    return status is not RunStatus.RUNNING


def _section(
    title: str, text: str, edges: list[Edge], start: StrEnum, is_ended: Callable[[StrEnum], bool]
) -> Iterator[str]:
    yield f"## {title}\n"
    yield text
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {start}"
    yield from (f"    {before} --> {after} : {label}" for (before, after), label in _labels(edges).items())
    yield from (f"    {status} --> [*]" for status in type(start) if is_ended(status))
    yield "```\n"
    yield from _table(edges)
    yield ""


def _labels(edges: Iterable[Edge]) -> Mapping[tuple[StrEnum, StrEnum], str]:
    """Join the triggers of each pair of statuses. Mermaid ends a label at a second colon, so none is left in it."""
    labels: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    for before, trigger, after in edges:
        labels.setdefault((before, after), []).append(trigger.replace(":", " ="))
    return {pair: " / ".join(words) for pair, words in labels.items()}


def _table(edges: Iterable[Edge]) -> Iterator[str]:
    yield "| in | when | it becomes |"
    yield "|---|---|---|"
    rows: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    for before, trigger, after in edges:
        rows.setdefault((before, trigger), []).append(f"`{after}`")
    yield from (f"| `{before}` | {trigger} | {' or '.join(after)} |" for (before, trigger), after in rows.items())
