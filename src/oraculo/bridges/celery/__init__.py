"""Tasks of a Celery app as steps. The app is not changed, and need not know of us."""

from oraculo.bridges.celery.bridge import CeleryBridge
from oraculo.bridges.celery.looking import CeleryOutlook

__all__ = ["CeleryBridge", "CeleryOutlook"]
