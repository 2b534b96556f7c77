"""The pictures of the state machine: a vertical line for each status, and a row of arrows for each trigger."""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from html import escape

Edge = tuple[StrEnum, StrEnum, StrEnum]  # from, what happened, to

_GAP, _TOP, _ROW, _EDGE = 128, 66, 38, 70  # pixels: between lines, above the first row, of a row, beside the lines
_LOOP = 24
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2430; text-anchor: middle }
.name { font: 600 13px ui-monospace, monospace }
.open { fill: #eef1fb; stroke: #3f51b5 }
.ended { fill: #e6f4ea; stroke: #2e7d32 }
.lane { stroke: #c9cede; stroke-dasharray: 4 4 }
.arrow { fill: none; stroke: #5b6270; stroke-width: 1.5; marker-end: url(#head) }
.from { fill: #5b6270 }
.label { text-anchor: start; paint-order: stroke; stroke: #fff; stroke-width: 5 }
"""
_HEAD = """\
<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">
<path d="M0,0 L8,4 L0,8 z" fill="#5b6270"/></marker></defs>
"""


def states_picture(title: str, statuses: Sequence[StrEnum], open_statuses: Iterable[StrEnum], edges: list[Edge]) -> str:
    """Return the picture as SVG. Each arrow's title names its two statuses and its trigger."""
    rows: dict[tuple[StrEnum, StrEnum], list[StrEnum]] = {}
    for before, trigger, after in edges:
        rows.setdefault((before, trigger), []).append(after)
    width, bottom = 2 * _EDGE + _GAP * (len(statuses) - 1), _TOP + _ROW * len(rows)
    lines = [*_lanes(statuses, set(open_statuses), bottom)]
    for number, ((before, trigger), afters) in enumerate(rows.items()):
        lines += _arrows(statuses, before, trigger, afters, _TOP + _ROW * number + 22)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 16}" role="img">\n'
    paper = (
        f'<title>{escape(title)}</title>\n<style>\n{_STYLE}</style>\n{_HEAD}<rect width="100%" height="100%" rx="8" '
    )
    return f'{opening}{paper}fill="#fff"/>\n' + "".join(f"{line}\n" for line in lines) + "</svg>\n"


def _lanes(statuses: Sequence[StrEnum], open_statuses: set[StrEnum], bottom: int) -> Iterator[str]:
    for number, status in enumerate(statuses):
        x = _EDGE + _GAP * number
        yield f'<path class="lane" d="M{x},44 V{bottom}"/>'
        kind = "open" if status in open_statuses else "ended"
        yield f'<rect class="{kind}" x="{x - 54}" y="14" width="108" height="30" rx="5"/>'
        yield f'<text class="name" x="{x}" y="34">{escape(status)}</text>'


def _arrows(
    statuses: Sequence[StrEnum], before: StrEnum, trigger: StrEnum, afters: Iterable[StrEnum], y: int
) -> Iterator[str]:
    start = _EDGE + _GAP * statuses.index(before)
    ends = {after: _EDGE + _GAP * statuses.index(after) for after in afters}
    for after, end in ends.items():
        path = f"H{end}" if end != start else f"h{_LOOP} v10 h-{_LOOP}"
        title = escape(f"{before} → {after}: {trigger}")
        yield f'<path class="arrow" d="M{start},{y} {path}"><title>{title}</title></path>'
    yield f'<circle class="from" cx="{start}" cy="{y}" r="3.5"/>'
    left = min(start, *ends.values()) + 8
    yield f'<text class="label" x="{left}" y="{y - 8}">{escape(trigger)}</text>'
