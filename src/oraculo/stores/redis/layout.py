"""The layout of runs in Redis: the keys, the members of the indexes, and the number of the layout.

Every key begins with the namespace and a colon, written `@` below. The Streams broker's only keys with a colon are
`<queue>:delayed`, and there is no `@delayed` here, so both can share a database.

A run is two keys, whatever its width:

    @run:<id>        hash    version, n, state, name, fingerprint, key, head, definition, payload; and a field for each
                             task, named by its number
    @history:<id>    list    its entries, in order

The indexes and the rest:

    @sequence        string  the last `n`: a run's number in the order of creation, never used twice
    @runs            zset    ids by n; and the same for each status in @runs:<status>, for each name in @named:<name>
    @keys            hash    ids by idempotency key
    @due             zset    timers by their time
    @unsent          zset    unsent commands and dead letters, in the order of their members
    @held            zset    commands in work and dead letters, by the slot of their broker and then by n
    @brokers         hash    the slots: w=<broker> for commands, d=<broker> for dead letters; without a name: not known
    @ended           zset    runs that ended and have no timer left, by when they ended
    @pipelines       hash    definitions by name; @pipelines:mark counts their changes
    @engines         zset    engines that live, by the time of their last record
    @installation    string  the id of this installation
    @facts           hash    noted facts
    @layout          string  the number of this layout
    @proof:…         one key of each kind, which a check writes for a moment

Timers, commands and dead letters are members `<id> NUL <task + 1, in 4 bytes>`, with task + 1 = 0 for the run itself:
the end has a fixed length, so that no id can be confused with another, and tasks sort by number.
"""

import struct
from functools import lru_cache
from importlib import resources

from oraculo.clients.redis import Script
from oraculo.core.run import RunStatus
from oraculo.errors import Fault, InvalidSettings
from oraculo.wire.naming import is_name

DEFAULT_NAMESPACE = "oraculo"
SLOT = 2**40  # distance between the scores of two brokers' slots: more than there will ever be runs

_END = struct.Struct(">BI")
_KINDS = {
    "zset": ("runs", "due", "unsent", "held", "ended", "engines", *(f"runs:{status}" for status in RunStatus)),
    "hash": ("keys", "brokers", "pipelines", "facts"),
    "string": ("sequence", "layout", "installation", "pipelines:mark"),
}
_SCRIPTS = (
    "create",
    "change",
    "unsent",
    "held_by",
    "forget_sent",
    "list_runs",
    "prune",
    "put_pipeline",
    "delete_pipeline",
    "attend",
    "advance_layout",
    "prove",
)


class Layout:
    """The keys and scripts of one namespace."""

    def __init__(self, namespace: str, setting: str) -> None:
        if not is_name(namespace):
            problem = "has a namespace that is not 1 to 128 letters, digits, '_', '-' or '.'"
            raise InvalidSettings(Fault(setting, problem))
        self.namespace = namespace
        self._prefix = f"{namespace}:".encode()
        self.scripts = {name: self._script(name) for name in _SCRIPTS}
        self.runs = self.key("runs")
        self.due = self.key("due")

    def key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def run(self, run_id: str) -> bytes:
        return self.key(f"run:{run_id}")

    def history(self, run_id: str) -> bytes:
        return self.key(f"history:{run_id}")

    def with_status(self, status: RunStatus) -> bytes:
        return self.key(f"runs:{status}")

    def with_name(self, name: str) -> bytes:
        return self.key(f"named:{name}")

    def kinds(self) -> dict[bytes, bytes]:
        """Return the type that each shared key must have."""
        return {self.key(name): kind.encode() for kind, names in _KINDS.items() for name in names}

    def _script(self, name: str) -> Script:
        """Return a script, with its `@` replaced by the namespace. `@` has no other meaning there."""
        folder = resources.files(__package__ or "").joinpath("lua")
        shared = folder.joinpath("write.lua").read_text("utf-8") if name in ("create", "change") else ""
        text = shared + folder.joinpath(f"{name}.lua").read_text("utf-8")
        return Script.of(text.replace("@", self._prefix.decode()))


def member(run_id: bytes, task: int | None) -> bytes:
    return run_id + _END.pack(0, 0 if task is None else task + 1)


def run_and_task(found: bytes) -> tuple[str, int | None]:
    number = int.from_bytes(found[-4:], "big")
    return found[: -_END.size].decode(), number - 1 if number else None


@lru_cache(256)  # there are few brokers, and every task in work needs one
def slot_name(via: str | None, dead_letter: bool) -> bytes:
    kind = "d" if dead_letter else "w"
    return (kind if via is None else f"{kind}={via}").encode()


def broker_of(slot: bytes) -> str | None:
    _, sign, via = slot.decode().partition("=")
    return via if sign else None
