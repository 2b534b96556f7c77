"""Tasks of a Celery app as steps. The app is not changed, and need not know of us."""

from oraculo.bridges.celery.bridge import CeleryBridge

__all__ = ["CeleryBridge"]
