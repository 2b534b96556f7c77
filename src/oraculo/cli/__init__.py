"""The command line. Commands import what they need when they run, so that `--help` and the client are quick."""

from oraculo.cli.app import main

__all__ = ["main"]
