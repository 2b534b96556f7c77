"""The page `docs/explanation/state-machine.md`, drawn from `core.transitions`, so that the two cannot disagree."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum

from oraculo.core.run import OPEN, RunStatus, TaskStatus
from oraculo.core.transitions import RUN_TRANSITIONS, TASK_TRANSITIONS

Edge = tuple[StrEnum, StrEnum, StrEnum]  # from, what happened, to

_INTRODUCTION = """\
# The state machine

<!-- Made by scripts/generate_docs.py from src/oraculo/core/transitions.py: change that, then run `make docs`. -->

A run is a set of tasks, one for each step or destination. Both have a status, and these are all the ways in which one
becomes another; whatever is not drawn here cannot happen. A duplicate, late or unknown answer is no transition: it is
counted, told in the run's history, and changes no status.
"""

_TASK_TEXT = """\
`pendente` waits for what it depends on, for the broker to take its command, or for the pause before a retry. An answer
may overtake the broker's confirm, so it is taken in `pendente` too, once the command was given to the broker.

The API also shows where an open task is, as its `fase`: `na_fila`, `em_trabalho` or `aguardando_nova_tentativa` (until
`proxima_tentativa_em`). `em_trabalho` means that its worker reported progress, or that its command left the queue.
Where a broker cannot say which of its messages were taken, and for a step behind a bridge, `fase` may be `null`.

The reason of a timeout (`motivo`) says what the task's queue looked like shortly before: `no answer in 30 s; nobody
listened on queue executador_x`.
"""

_RUN_TEXT = """\
A run ends when no task of it is open, when its quorum is met, when its deadline comes, or when it is cancelled. Which
ending it is follows from its tasks and from whether it was cancelled, never from the order in which things came.
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
    """One arrow for each pair of statuses. Mermaid ends a label at a second colon, so there is none in it."""
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
