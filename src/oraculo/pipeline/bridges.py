"""Destinations in other systems: a Celery task or a BullMQ queue.

The command of such a step goes to the bridge's own queue. Its field `ponte` says where the bridge passes it on. The
bridge reads that queue and answers like a worker, so everything else is the same for such a step.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

from oraculo.errors import Fault
from oraculo.wire import naming

CELERY = "celery"
BULLMQ = "bullmq"
QUEUES: Mapping[str, str] = {CELERY: "ponte-celery", BULLMQ: "ponte-bullmq"}  # from which each bridge reads commands

KEYWORDS = "kwargs"  # the payload's fields, or a pipeline step's config, are the task's keyword arguments
PAYLOAD = "payload"  # the whole payload is the task's only argument

_TARGET = re.compile(r"[^\s/?#:]{1,200}")
_ESCAPED = str.maketrans({sign: f"%{ord(sign):02X}" for sign in "%&+"})  # a query reads these signs as something else
_MAX_ATTEMPTS = 1000
_MAX_NAME_BYTES = 255
_RIGHT = {
    CELERY: "celery://task.name, or celery://task.name?queue=high&send=payload",
    BULLMQ: "bullmq://images-queue, or bullmq://images-queue?name=job&attempts=3",
}
# The key that names the target, and the keys that a URL and a block of a pipeline may have.
_TARGET_KEY = {CELERY: "task", BULLMQ: "queue"}
_URL_KEYS = {CELERY: frozenset({"queue", "send"}), BULLMQ: frozenset({"name", "attempts"})}
_BLOCK_KEYS = {
    CELERY: frozenset({"task", "queue", "send", "args", "kwargs"}),
    BULLMQ: frozenset({"queue", "name", "attempts"}),
}


class Bridge(
    msgspec.Struct,
    frozen=True,
    gc=False,
    omit_defaults=True,
    rename={
        "kind": "tipo",
        "target": "alvo",
        "queue": "fila",
        "send": "envio",
        "name": "nome",
        "attempts": "tentativas",
    },
):
    """The place in another system to which a command is passed on. `kind` and `target` are always given."""

    kind: str
    target: str  # the Celery task's name, or the BullMQ queue's
    queue: str = ""  # Celery: the queue that its workers read; empty for the default queue
    send: str = KEYWORDS  # Celery
    args: list[Any] = []  # Celery: positional arguments
    kwargs: dict[str, Any] = {}  # Celery: keyword arguments over those of the payload
    name: str = ""  # BullMQ: the job's name; empty for the step's type
    attempts: int = 0  # of BullMQ itself; 0 means one

    @property
    def url(self) -> str:
        """The URL that a user would write, without arguments."""
        options = {"queue": self.queue, "send": "" if self.send == KEYWORDS else self.send}
        if self.kind == BULLMQ:
            options = {"name": self.name, "attempts": str(self.attempts or "")}
        query = "&".join(f"{key}={value.translate(_ESCAPED)}" for key, value in options.items() if value)
        return f"{self.kind}://{self.target}{'?' if query else ''}{query}"


class ForeignQueue(NamedTuple):
    """The state of a queue in another system, as that system reports it."""

    place: str  # for people
    waiting: int  # messages that nobody has taken yet
    held: int | None = None  # messages in work; None when the system does not say
    listening: int | None = None  # consumers; None when the system does not say
    is_paused: bool = False


def is_bridge(destination: object) -> bool:
    return isinstance(destination, str) and "://" in destination


def destination_fault(destination: str) -> str | None:
    """Return why no command can go to this queue or URL, or None when one can."""
    if not is_bridge(destination):
        return naming.queue_fault(destination)
    read = read_bridge(destination)
    return read if isinstance(read, str) else None


def queue_of(destination: str) -> str:
    """Return the queue of ours to which commands for a valid destination go."""
    return QUEUES[destination.partition("://")[0]] if is_bridge(destination) else destination


def read_bridge(url: str) -> Bridge | str:
    """Return the bridge that a URL names, or its fault as a text."""
    kind, _, rest = url.partition("://")
    if kind not in QUEUES:
        return (
            f"has the unknown scheme {naming.shown(kind)}; use {' or '.join(_RIGHT.values())}, or the name of a queue"
        )
    target, mark, query = rest.partition("?")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(mark)))
    except ValueError:
        return f"has options that cannot be read; as {_RIGHT[kind]}"
    if unknown := options.keys() - _URL_KEYS[kind]:
        return f"has the unknown option {naming.shown(min(unknown))}{naming.nearest(min(unknown), _URL_KEYS[kind])}"
    attempts = options.pop("attempts", None)
    block: dict[str, Any] = {**options, _TARGET_KEY[kind]: target}
    if attempts is not None:
        block["attempts"] = int(attempts) if attempts.isdecimal() and len(attempts) < 10 else attempts[:20]
    made = read_block(kind, block)
    return made if isinstance(made, Bridge) else f"{made[0].field}: {made[0].problem}"


def read_block(kind: str, block: object) -> Bridge | list[Fault]:
    """Return the bridge that the `celery` or `bullmq` object of a step names, or all its faults."""
    if not isinstance(block, dict):
        return [Fault("", f"must be an object, as {{{_TARGET_KEY[kind]}: …}}; got {naming.shown(block)}")]
    faults = [
        Fault(str(key), f"is not a known key{naming.nearest(str(key), _BLOCK_KEYS[kind])}")
        for key in block
        if key not in _BLOCK_KEYS[kind]
    ]
    target = block.get(_TARGET_KEY[kind])
    if not isinstance(target, str) or not _TARGET.fullmatch(target) or not target.isprintable():
        faults.append(
            Fault(_TARGET_KEY[kind], f"must name the {'task' if kind == CELERY else 'queue'}, as {_RIGHT[kind]}")
        )
    faults += _option_faults(kind, block)
    if faults:
        return faults
    if kind == BULLMQ:
        return Bridge(kind, str(target), name=block.get("name", ""), attempts=block.get("attempts", 0))
    return Bridge(
        kind,
        str(target),
        queue=block.get("queue", ""),
        send=block.get("send", KEYWORDS),
        args=block.get("args", []),
        kwargs=block.get("kwargs", {}),
    )


def _option_faults(kind: str, block: Mapping[str, Any]) -> list[Fault]:
    faults: list[Fault] = []
    key = "queue" if kind == CELERY else "name"
    if not isinstance(value := block.get(key, ""), str) or not value.isprintable() or len(value) > 200:
        faults.append(Fault(key, f"must be a text of at most 200 characters; got {naming.shown(value)}"))
    elif kind == CELERY and len(value.encode()) > _MAX_NAME_BYTES:
        problem = f"must have at most {_MAX_NAME_BYTES} bytes in UTF-8, a limit of AMQP; it has {len(value.encode())}"
        faults.append(Fault(key, problem))
    if kind == CELERY and (send := block.get("send", KEYWORDS)) not in (KEYWORDS, PAYLOAD):
        faults.append(Fault("send", f"must be {KEYWORDS} or {PAYLOAD}; got {naming.shown(send)}"))
    attempts = block.get("attempts", 1)
    if isinstance(attempts, bool) or not isinstance(attempts, int) or not 1 <= attempts <= _MAX_ATTEMPTS:
        faults.append(
            Fault("attempts", f"must be a whole number from 1 to {_MAX_ATTEMPTS}; got {naming.shown(attempts)}")
        )
    for key, right in (("args", list), ("kwargs", dict)):
        if key in block and not isinstance(block[key], right):
            problem = f"must be {'a list' if right is list else 'an object'}; got {naming.shown(block[key])}"
            faults.append(Fault(key, problem))
        elif key in block and not _is_json(block[key]):
            faults.append(Fault(key, "must hold nothing but texts, numbers, true, false, null, lists and objects"))
    return faults


def _is_json(value: object) -> bool:
    """Return whether a value survives JSON unchanged. A date does not, nor does a key that is a number."""
    try:
        text = msgspec.json.encode(value)
        return b"\\u0000" not in text and bool(msgspec.json.decode(text) == value)
    except (TypeError, ValueError, RecursionError):
        return False
