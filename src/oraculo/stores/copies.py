"""Copies of runs, compared with what is stored."""

from collections.abc import Iterable, Mapping

from oraculo.core.run import RunHead


def unchanged_among(copies: Iterable[RunHead], stored: Mapping[str, RunHead]) -> frozenset[str]:
    """By their versions; and by their birth, for an id may be given again once its run is gone."""
    return frozenset(
        copy.id
        for copy in copies
        if (now := stored.get(copy.id)) is not None and (now.version, now.created_at) == (copy.version, copy.created_at)
    )
