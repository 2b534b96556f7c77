"""The process that tests/servers/prepared.py forks from: `python prepared_program.py SOCKET`, a descriptor."""

import gc
import importlib
import io
import os
import pickle
import socket
import sys
import time
from typing import Any

import httpx2

from oraculo.cli import main

MOST = 1 << 20  # bytes of arguments and environment
_IMPORTED_LATER = (
    *("httptools", "uvloop", "rich.live", "oraculo.api.server", "oraculo.cli.serving", "oraculo.cli.client"),
    *("oraculo.samples.workers", "oraculo.brokers.rabbitmq", "oraculo.brokers.redis_streams", "oraculo.brokers.nats"),
    *("oraculo.stores.sqlite", "oraculo.stores.postgres", "oraculo.stores.redis"),
)


def wait_for_orders(orders: socket.socket) -> tuple[Any, list[int]]:
    """Return in each new process, with what it is for."""
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, MOST, 3)
        if not order:
            os._exit(0)
        if (between := os.fork()) == 0:
            if (made := os.fork()) == 0:
                return pickle.loads(order), descriptors
            orders.send(str(made).encode())
            os._exit(0)
        os.waitpid(between, 0)
        orders.send(b".")  # whoever asked has become the parent
        for one in descriptors:
            os.close(one)


def become(order: dict[str, Any], descriptors: list[int]) -> None:
    if order["is_leader"]:
        os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    sys.argv = ["oraculo", *order["arguments"]]
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, (name, given) in enumerate(zip(("stdin", "stdout", "stderr"), descriptors, strict=True)):
        os.dup2(given, number)
        os.close(given)
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        stream: Any = io.BufferedReader(raw) if number == 0 else raw if is_unbuffered else io.BufferedWriter(raw)
        text = io.TextIOWrapper(
            stream,
            "utf-8",
            "backslashreplace" if number == 2 else "strict",
            line_buffering=number == 2 or os.isatty(number),
            write_through=is_unbuffered,
        )
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


for module in _IMPORTED_LATER:
    importlib.import_module(module)
httpx2.Client().close()  # imports what makes a connection
gc.freeze()
with socket.socket(fileno=int(sys.argv[1])) as asked:
    made_for = wait_for_orders(asked)
become(*made_for)
main()
