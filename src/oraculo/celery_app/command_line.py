"""Celery's own command line: how our workers are named on it, and how one is run from ours."""

import os
from collections.abc import Sequence
from typing import Any

import click
from celery import Celery
from celery.bin.celery import celery as command_line

from oraculo.errors import Fault, InvalidSettings


def name_worker(name: str) -> None:
    """`celery -A` asks for its app before it reads the worker's options. Without a name of its own (-n) each worker of
    a machine is `celery@host`, whatever its app; RabbitMQ lets one of a name in, and the next one ends."""
    context = click.get_current_context(silent=True)
    if context is not None and context.command is command_line:
        context.default_map = {**_node_name(name), **(context.default_map or {})}


def run_worker(app: Celery, name: str, options: Sequence[str]) -> int:
    """Until a signal; returns the exit status, which `Celery.worker_main` does not. Raises InvalidSettings."""
    if _is_detached(options):
        instead = f"ORACULO_CELERY_APPS=… celery -A {__package__} worker -D"
        why = f"does not detach; leave out -D/--detach and let a supervisor start it, or use `{instead}`"
        raise InvalidSettings(Fault("--engine celery", why))
    arguments = ["--app", app, "worker", *options]  # as a default, the app would come after a variable APP
    try:
        status: int | None = command_line.main(
            arguments, prog_name="celery", standalone_mode=False, default_map=_node_name(name)
        )
    except click.UsageError as error:
        where = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
        raise InvalidSettings(Fault("--engine celery", error.format_message() + where)) from None
    return status or 0


def _is_detached(options: Sequence[str]) -> bool:
    """Celery starts a detached worker with the process's own arguments, as if they were for `celery`: it would end
    at once, unseen, with ours."""
    worker = command_line.commands["worker"]
    context = click.Context(worker, resilient_parsing=True)  # what is wrong with the others, Celery itself says
    given, _, _ = worker.make_parser(context).parse_args(list(options))
    return bool(given.get("detach"))


def _node_name(name: str) -> dict[str, Any]:
    """The default of Celery's option; with the process, so that two of one app may be on a machine."""
    return {"worker": {"hostname": f"{name}-{os.getpid()}@%h"}}
