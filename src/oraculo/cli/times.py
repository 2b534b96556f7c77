"""Moments and durations as people read and write them, in local time."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from oraculo.errors import InvalidInput
from oraculo.wire.timestamps import in_words

_ISO_UTC = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")
_AGO = re.compile(r"(\d+)\s*(s|min|h|d)")
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


def moment(iso: str | None) -> str:
    """Return `14:03:05 CET`, with the date unless it is today's."""
    if iso is None:
        return "-"
    when = _local(iso)
    return when.strftime("%H:%M:%S %Z" if _is_today(when) else "%Y-%m-%d %H:%M:%S %Z")


def moments(name: str, isos: Sequence[str | None]) -> tuple[str, list[str]]:
    """Return a column's name with the zone, and its short moments. Cells have the zone where zones differ."""
    times = [None if iso is None else _local(iso) for iso in isos]
    zones = {when.tzname() for when in times if when is not None}
    cells = ["-" if when is None else _short(when, with_zone=len(zones) > 1) for when in times]
    return (f"{name} {zones.pop()}" if len(zones) == 1 else name), cells


def _short(when: datetime, *, with_zone: bool) -> str:
    if _is_today(when):
        text = when.strftime("%H:%M:%S")
    else:
        text = when.strftime("%b %d %H:%M" if when.year == _now().year else "%Y-%m-%d %H:%M")
    return f"{text} {when.tzname()}" if with_zone else text


def clock(iso: str) -> str:
    """Return the time of day alone, for lines that follow each other."""
    return _local(iso).strftime("%H:%M:%S")


def localized(text: str) -> str:
    """Return a sentence of the server with its moments in local time."""
    return _ISO_UTC.sub(lambda found: moment(found[0]), text)


def duration(milliseconds: float | None) -> str:
    """Return `17 ms`, `0.9 s` or `1 min 3 s`."""
    if milliseconds is None:
        return "-"
    return f"{milliseconds:.0f} ms" if milliseconds < 100 else in_words(milliseconds / 1000)


def moment_option(option: str, text: str | None) -> str | None:
    """Read `2h` (ago), `14:30` or `2026-01-31 14:30`, in local time unless it has a zone, as the API takes it.

    Raises InvalidInput.
    """
    if text is None:
        return None
    when = _read(text.strip())
    if when is None:
        example = "2h or 3d (so long ago), 14:30, 2026-01-31, or 2026-01-31T14:30:00Z"
        raise InvalidInput.at(option, f"'{text}' is no moment; write it as {example}")
    return when.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _read(text: str) -> datetime | None:
    now = _now()
    try:
        if ago := _AGO.fullmatch(text):
            return now - timedelta(seconds=int(ago[1]) * _UNITS[ago[2]])
        return datetime.fromisoformat(f"{now.date()}T{text}" if re.match(r"\d?\d:", text) else text).astimezone()
    except (ValueError, OverflowError):
        return None


def _local(iso: str) -> datetime:
    return datetime.fromisoformat(iso).astimezone()


def _now() -> datetime:
    return datetime.now(UTC).astimezone()


def _is_today(when: datetime) -> bool:
    return when.date() == _now().date()
