"""ORÁCULO: an orchestrator for work that many services do together."""

from importlib import metadata


def _installed_version() -> str:
    try:
        return metadata.version("oraculo-core")
    except metadata.PackageNotFoundError:  # the source is on the path, and nothing is installed
        return "0.0.0"


__version__ = _installed_version()
