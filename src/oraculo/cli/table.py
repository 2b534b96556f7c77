"""The table of the command line: fitted to the width of a terminal, plain columns in a pipe.

On a narrow terminal columns are left out by their rank, and a line below names them. Prose is wrapped, or stands below
its row. Only a column that is marked `cut` may end in an ellipsis; every other value is whole.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from oraculo.cli import output

if TYPE_CHECKING:
    from rich.text import Text

GAP = 2
_LEAST_PROSE = 24  # cells; narrower, a sentence is hard to read
_LEAST_CUT = 25  # cells; `next attempt 14:03:05 CET` is whole

STATUS_STYLES = {
    "concluida": "green",
    "em_execucao": "cyan",
    "pendente": "dim",
    "parcial": "yellow",
    "erro": "red",
    "timeout": "red",
    "ignorada": "dim",
    "cancelada": "yellow",
    "ok": "green",
    "warning": "yellow",
    "error": "red",
}

Row = Sequence[object]


class Column(NamedTuple):
    """A column of a table. At most one, the last, is prose or may be cut."""

    name: str
    rank: int = 0  # the highest is left out first on a narrow terminal; 0: never
    prose: bool = False  # may be wrapped
    cut: bool = False  # may be shortened; a line below names the column


class Fitted(NamedTuple):
    lines: Sequence["Text"]
    missing: Sequence[str]  # names of the columns that were left out
    shortened: str | None = None  # name of the column of which a value was cut


def print_table(columns: Sequence[Column], rows: Sequence[Row], *, empty: str, whole: str = "--json") -> None:
    """Print the rows, or `empty` when there are none. `whole` is the command or option that shows everything."""
    texts = [[output.clean(cell) for cell in row] for row in rows]
    if not texts:
        output.note(empty)
    elif sys.stdout.isatty():
        _print_fitted(columns, texts, whole)
    else:
        _print_plain(columns, texts)


def _print_plain(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print every value, for `grep` and `awk`."""
    lines = [[column.name for column in columns], *rows]
    widths = [max(len(line[number]) for line in lines) for number in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], whole: str) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    fitted = fit(columns, rows, console.width)
    # The terminal breaks longer lines itself, so that copied text is whole.
    console.print(Text("\n").join(fitted.lines), soft_wrap=True, highlight=False)
    if said := remark(fitted, whole):
        console.print(Text(said, style="dim"), soft_wrap=True, highlight=False)


def remark(fitted: Fitted, whole: str) -> str | None:
    """Return the line that names left out and cut columns, and what shows them."""
    parts = [f"left out: {', '.join(fitted.missing)}"] if fitted.missing else []
    parts += [f"cut: {fitted.shortened}"] if fitted.shortened else []
    return f"{'; '.join(parts)}; all with: {whole}" if parts else None


def fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Fitted:
    """Lay out the rows with the columns that have room. Cells are texts of one line."""
    from rich.cells import cell_len
    from rich.text import Text

    grid = [[column.name for column in columns], *rows]
    widths = [max(cell_len(line[number]) for line in grid) for number in range(len(columns))]
    kept = _chosen(columns, grid, widths, width)
    last = kept[-1]
    is_flexible = columns[last].prose or columns[last].cut
    whole = kept[:-1] if is_flexible else kept
    indent = sum(widths[number] + GAP for number in whole)
    is_below = is_flexible and indent + _least(columns[last], last, grid, widths) > width
    indent = GAP if is_below else indent
    lines: list[Text] = []
    is_short = False
    for place, row in enumerate(grid):
        style = "bold" if place == 0 else None
        line = Text(" " * GAP).join(_cell(row[number], widths[number], style) for number in whole)
        if is_flexible:
            parts = _parts(columns[last], _cell(row[last], 0, style), max(1, width - indent))
            is_short = is_short or (columns[last].cut and parts[0].plain != row[last])
            lines += [line] if is_below else [line.append(" " * (indent - line.cell_len)).append_text(parts.pop(0))]
            lines += [Text(" " * indent).append_text(part) for part in parts]
        else:
            lines.append(line)
    for line in lines:
        line.rstrip()
    missing = [column.name for number, column in enumerate(columns) if number not in kept]
    return Fitted(lines, missing, columns[last].name if is_short else None)


def _chosen(columns: Sequence[Column], grid: Sequence[Sequence[str]], widths: Sequence[int], width: int) -> list[int]:
    """Return the numbers of the columns that are shown."""
    kept = list(range(len(columns)))
    least = [_least(column, number, grid, widths) for number, column in enumerate(columns)]
    while sum(least[number] for number in kept) + GAP * (len(kept) - 1) > width:
        droppable = [number for number in kept if columns[number].rank]
        if not droppable:
            break
        kept.remove(max(droppable, key=lambda number: columns[number].rank))
    return kept


def _least(column: Column, number: int, grid: Sequence[Sequence[str]], widths: Sequence[int]) -> int:
    """Return the width that a column needs. Prose needs that of its longest word, so that no id is broken."""
    from rich.cells import cell_len

    if column.cut:
        return min(widths[number], _LEAST_CUT)
    if column.prose:
        words = max((cell_len(word) for line in grid for word in line[number].split()), default=0)
        return min(widths[number], max(words, _LEAST_PROSE))
    return widths[number]


def _cell(text: str, width: int, style: str | None) -> "Text":
    from rich.text import Text

    cell = Text(text, style=STATUS_STYLES.get(text, "") if style is None else style)
    cell.append(" " * (width - cell.cell_len))
    return cell


def _parts(column: Column, cell: "Text", room: int) -> "list[Text]":
    """Return the lines of a cell of the last column."""
    from rich.console import Console

    if column.cut:
        cell.truncate(room, overflow="ellipsis")
        return [cell]
    return list(cell.wrap(Console(width=room), room)) or [cell]
