"""Celery's command line: the names of our workers, and running one from `oraculo worker`."""

import os
from collections.abc import Sequence
from typing import Any

import click
from celery import Celery
from celery.bin.celery import celery as command_line

from oraculo.errors import Fault, InvalidSettings


def name_worker(name: str) -> None:
    """Name the worker that `celery -A` is about to start, unless it has a name.

    By default each worker of a machine is `celery@host`, and RabbitMQ lets only one worker of a name in.
    """
    context = click.get_current_context(silent=True)
    if context is not None and context.command is command_line:
        context.default_map = {**_node_name(name), **(context.default_map or {})}


def run_worker(app: Celery, name: str, options: Sequence[str]) -> int:
    """Run a worker until a signal, and return its exit status. Raises InvalidSettings for a wrong option."""
    if {"-D", "--detach"} & set(options):  # Celery would start `celery` with the arguments of `oraculo`
        instead = "ORACULO_CELERY_APPS=… celery -A oraculo.celery_app worker -D"
        raise InvalidSettings(Fault("--engine celery", f"does not detach; leave out -D/--detach, or use `{instead}`"))
    arguments = ["--app", app, "worker", *options]  # given as a default, the app would come after a variable APP
    try:
        status: int | None = command_line.main(
            arguments, prog_name="celery", standalone_mode=False, default_map=_node_name(name)
        )
    except click.UsageError as error:
        where = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
        raise InvalidSettings(Fault("--engine celery", error.format_message() + where)) from None
    return status or 0


def _node_name(name: str) -> dict[str, Any]:
    """Return the default of Celery's option, with the process id so that a machine may run two workers of one app."""
    return {"worker": {"hostname": f"{name}-{os.getpid()}@%h"}}
