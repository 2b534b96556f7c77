"""The packages that kombu needs for a Redis."""

from oraculo.errors import how_to_add


def missing_for_kombu(url: str) -> str | None:
    """Return what kombu lacks for a Redis at `url`, or None. Its own errors do not name the package."""
    if url.partition(":")[0].lower() not in ("redis", "rediss"):
        return None
    try:
        import packaging  # noqa: F401
        import redis  # noqa: F401
    except ImportError as error:
        return f"redis:// needs a package that is not installed ({error.name}): {how_to_add('celery')}"
    return None
