"""Comparison of cached copies of runs with what is stored."""

from collections.abc import Iterable, Mapping

from oraculo.core.run import RunHead


def unchanged_among(copies: Iterable[RunHead], stored: Mapping[str, RunHead]) -> frozenset[str]:
    """Return the ids of copies with the stored version. The creation time counts too, because an id can be reused."""
    return frozenset(
        copy.id
        for copy in copies
        if (now := stored.get(copy.id)) is not None and (now.version, now.created_at) == (copy.version, copy.created_at)
    )
