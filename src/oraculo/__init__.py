"""ORÁCULO: an orchestrator for work that many services do together."""

__version__ = "0.1.0"
